"""Relays with both ends in our hands, as plain sockets: so cheap that there may be ten thousand of them."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from proto.pulsar_pb2 import BaseCommand

from .fakes import connected, receive_command
from .wire import frame

HOST = "127.0.0.1"
AT_ONCE = 50
TIMEOUT_S = 60.0
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class Ends:
    """One relay: the client's socket and the broker's."""

    client: socket.socket
    broker: socket.socket

    def close(self) -> None:
        """The client leaves, then the broker."""
        self.client.close()
        self.broker.close()


class Crowd:
    """Many relays through one proxy. We are the clients, and at `broker_port` the broker.

    ``token``: that of each client; ``told``: whom the broker must be told then, and which token of the proxy's.
    """

    def __init__(self, proxy_port: int, broker_port: int, *, token: str = "", told: tuple[str, str] = ("", "")) -> None:
        self.relays: list[Ends] = []
        self._told = told
        self._proxy_port = proxy_port
        self._listener = socket.create_server((HOST, broker_port), backlog=4096)
        self._listener.settimeout(TIMEOUT_S)
        self._hello = frame(
            BaseCommand.CONNECT,
            connect={
                "client_version": "crowd",
                "protocol_version": 19,
                "proxy_to_broker_url": f"{HOST}:{broker_port}",
                **({"auth_method_name": "token", "auth_data": token.encode()} if token else {}),
            },
        )
        self._marks = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_all()
        self._listener.close()

    def open(self, count: int, *, at_once: int = AT_ONCE, client_host: str = HOST) -> None:
        """So many relays more, of clients at this address; `at_once` of them are under way at a time."""
        while count > 0:
            batch = min(count, at_once)
            self.relays += self._open(batch, client_host)
            count -= batch

    def _open(self, count: int, client_host: str) -> list[Ends]:
        with contextlib.ExitStack() as opened:  # a failure must leave none of them open: other tests follow
            clients, brokers = self.shake_hands(count, opened, client_host)
            for number, client in enumerate(clients):
                command = receive_command(client)
                assert command.type == BaseCommand.CONNECTED, command
                client.sendall(number.to_bytes(_NUMBER_BYTES, "big"))  # the broker is to know which one it is
            relays = [
                Ends(clients[int.from_bytes(read_exactly(broker, _NUMBER_BYTES), "big")], broker) for broker in brokers
            ]
            opened.pop_all()
        return relays

    def shake_hands(
        self, count: int, opened: contextlib.ExitStack, client_host: str = HOST
    ) -> tuple[list[socket.socket], list[socket.socket]]:
        """So many clients have sent CONNECT, and the broker of each has answered; both in the order of their coming."""
        clients = []
        for _ in range(count):
            connection = socket.create_connection((HOST, self._proxy_port), TIMEOUT_S, (client_host, 0))
            client = opened.enter_context(connection)
            client.sendall(self._hello)
            clients.append(client)
        brokers = []
        for _ in range(count):
            broker = opened.enter_context(self._listener.accept()[0])
            broker.settimeout(TIMEOUT_S)
            connect = receive_command(broker).connect
            assert (connect.original_principal, connect.auth_data.decode()) == self._told
            broker.sendall(connected())
            brokers.append(broker)
        return clients, brokers

    def exchange(self) -> None:
        """A few bytes through every relay in both directions, other ones for each."""
        mark = next(self._marks)
        for number, ends in enumerate(self.relays):
            ends.client.sendall(b"to broker %08d %08d" % (mark, number))
            ends.broker.sendall(b"to client %08d %08d" % (mark, number))
        for number, ends in enumerate(self.relays):
            for receiver, words in ((ends.broker, b"to broker"), (ends.client, b"to client")):
                expected = b"%s %08d %08d" % (words, mark, number)
                assert read_exactly(receiver, len(expected)) == expected

    def ended(self) -> int:
        """How many clients have been told that their connection is over, or been reset."""
        return sum(_is_over(ends.client) for ends in self.relays)

    def close_all(self) -> None:
        """Every client leaves, and every broker."""
        for ends in self.relays:
            ends.close()
        self.relays.clear()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer only where the stream ends before."""
    parts = bytearray()
    while len(parts) < size and (data := connection.recv(size - len(parts))):
        parts += data
    return bytes(parts)


def _is_over(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(TIMEOUT_S)


@contextlib.contextmanager
def many_open_files(wanted: int) -> Iterator[int]:
    """Raise this process's limit, which its children inherit, to `wanted` or as far as may be; tells how far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    except (ValueError, PermissionError):
        limit = hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limit))
