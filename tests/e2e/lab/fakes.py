"""Brokers that misbehave on command, which a real one cannot be made to do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, ServerError

from .schema import NO_REQUEST_ID, Command
from .wire import frame

Behaviour = Callable[[socket.socket], None]
ANSWER_LATEST_S = 300.0


class FakeBroker:
    """Listens and gives every connection to `behaviour`, in a thread of its own; with `tls` once TLS is spoken."""

    def __init__(
        self, behaviour: Behaviour, port: int = 0, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self._behaviour = behaviour
        self._tls = tls
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []

    @property
    def visitors(self) -> int:
        """How many connections there were."""
        return len(self._connections)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._tls is None:
                self._behaviour(connection)
            else:
                with self._tls.wrap_socket(connection, server_side=True) as wrapped:
                    self._behaviour(wrapped)


class Eavesdropper:
    """A behaviour: takes all who come in, and keeps every byte."""

    def __init__(self) -> None:
        self.heard = b""

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        self.heard += connection.recv(1 << 16)
        connection.sendall(connected())
        while data := connection.recv(1 << 16):
            self.heard += data


class Recorder:
    """A behaviour: says CONNECTED and keeps the first command of each connection, and what came after."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.heard = b""
        self.ended = False

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        self.commands.append(receive_command(connection))
        connection.sendall(connected())
        self.heard = read_to_end(connection)
        self.ended = True


class Flood:
    """A behaviour: says CONNECTED, then sends 200 MB as fast as they are taken."""

    def __init__(self) -> None:
        self.sent = 0
        self._seen_before = -1

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        receive_command(connection)
        connection.sendall(connected())
        for _ in range(2000):
            connection.sendall(bytes(100_000))
            self.sent += 100_000

    def stalls(self) -> bool:
        """Whether nothing more has gone out since the last look."""
        seen_before, self._seen_before = self._seen_before, self.sent
        return 0 < self.sent == seen_before


class SlowToConnect:
    """A behaviour: says CONNECTED only when told, and keeps what comes after the CONNECT."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.heard = b""

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        receive_command(connection)
        self.asked.set()
        self.may_answer.wait(ANSWER_LATEST_S)
        connection.sendall(connected())
        self.heard = read_to_end(connection)


def receive_command(connection: socket.socket) -> Any:
    """The first command that the proxy sends."""
    decoder = FrameDecoder(max_frame_bytes=1 << 20)
    while (received := decoder.next_frame()) is None:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the proxy went away")
        decoder.receive_data(data)
    return Command.FromString(received.command)


def read_to_end(connection: socket.socket) -> bytes:
    """What the proxy still sends until it ends its direction."""
    parts = []
    while data := connection.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def connected(**fields: object) -> bytes:
    """A broker's CONNECTED."""
    body = {"server_version": "fake broker", "protocol_version": 21, "max_message_size": 5 * 1024 * 1024, **fields}
    return frame(BaseCommand.CONNECTED, connected=body)


def silent(connection: socket.socket) -> None:
    """Accepts, reads, never answers."""
    read_to_end(connection)


def hangs_up(connection: socket.socket) -> None:
    """Closes as soon as it has seen the CONNECT."""
    receive_command(connection)


def refuses(connection: socket.socket) -> None:
    """Answers the CONNECT with an error of its own."""
    receive_command(connection)
    error = {"request_id": NO_REQUEST_ID, "error": ServerError.NotAllowedError, "message": "fake broker says no"}
    connection.sendall(frame(BaseCommand.ERROR, error=error))
    read_to_end(connection)


def talks_nonsense(connection: socket.socket) -> None:
    """Answers the CONNECT with a frame of 2^31-1 bytes."""
    receive_command(connection)
    connection.sendall((2**31 - 1).to_bytes(4, "big") + b"nonsense" * 100)
    read_to_end(connection)


FAREWELL = b"".join(b"%08d" % number for number in range(1 << 17))  # 1 MiB


def answers_after_half_close(connection: socket.socket) -> None:
    """Says CONNECTED, waits until the client has ended its direction, then sends 1 MiB and ends its own."""
    receive_command(connection)
    connection.sendall(connected())
    heard = read_to_end(connection)
    connection.sendall(len(heard).to_bytes(8, "big") + FAREWELL)


def connected_with_4_mib(connection: socket.socket) -> None:
    """Accepts with a CONNECTED that every client would get."""
    receive_command(connection)
    connection.sendall(connected(server_version="x" * (4 << 20)))
    read_to_end(connection)


def connected_with_first_bytes(connection: socket.socket) -> None:
    """Sends its first commands in the same segment as CONNECTED: they are the relay's first bytes."""
    receive_command(connection)
    pings = frame(BaseCommand.PING, ping={}) * 3
    connection.sendall(connected() + pings)
    read_to_end(connection)


@dataclass
class LookupBroker:
    """A behaviour: a broker that answers PING, CONNECT and, with what `answer` says, every LOOKUP.

    It answers no lookup as long as `pausing`.
    """

    answer: dict[str, object]
    lookups: list[Any] = field(default_factory=list)
    _may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._may_answer.set()

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Lookups that come now are answered when the block is left."""
        self._may_answer.clear()
        try:
            yield
        finally:
            self._may_answer.set()

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        while data := connection.recv(1 << 16):
            decoder.receive_data(data)
            while (received := decoder.next_frame()) is not None:
                self.reply_to(connection, Command.FromString(received.command))

    def reply_to(self, connection: socket.socket, command: Any) -> None:
        """Answer one command."""
        if command.type == BaseCommand.PING:
            connection.sendall(frame(BaseCommand.PONG, pong={}))
        elif command.type == BaseCommand.CONNECT:
            connection.sendall(connected())
        else:
            self.lookups.append(command)
            body = {"request_id": command.lookup_topic.request_id, **self.answer}
            answer = frame(BaseCommand.LOOKUP_RESPONSE, lookup_topic_response=body)
            if self._may_answer.is_set():
                connection.sendall(answer)
            else:
                threading.Thread(target=self._answer_later, args=(connection, answer), daemon=True).start()

    def _answer_later(self, connection: socket.socket, answer: bytes) -> None:
        self._may_answer.wait(ANSWER_LATEST_S)
        with contextlib.suppress(OSError):
            connection.sendall(answer)
