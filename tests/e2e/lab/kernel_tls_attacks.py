"""Clients that misuse a relay whose TLS is in the kernel, and what they, the broker and another client see then.

The broker echoes what it gets. At the end of its input it says GOODBYE, and closes. For BULK it sends BULK_BYTES.
"""

from __future__ import annotations

import hashlib
import queue
import random
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tls_ends import KEY_UPDATE, Records, decrypted, encrypted

from proto import commands
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected
from proxy.runtime.network.kernel_tls import ALERT, APPLICATION_DATA, HANDSHAKE, follow_secrets
from proxy.runtime.network.tls_session import TlsSession

from .cluster import HOST, ProxyCluster
from .processes import children
from .wire import frame

STORED = "pulsar_proxy_stored_relays"
GOODBYE = b"goodbye"
BULK = b"BULK"
BULK_BYTES = 8 << 20
EMPTY_RECORDS = 2_000
PIPELINED = frame(BaseCommand.FLOW, flow={"consumer_id": 1, "permits": 1_000})
"""Behind CONNECT, where the proxy expects frames, and answers a PING itself."""
FATAL_ALERT = b"\x02\x28"
PATIENCE_S = 60.0
STALL_S = 1.0
SMALL_BUFFER_BYTES = 1 << 14
"""At both ends, for bulk: what they hold of it is not the proxy's."""


class EchoBroker:
    """A behaviour of FakeBroker. ``ended``: how each connection has ended whose CONNECT came."""

    def __init__(self) -> None:
        self.ended: queue.Queue[str] = queue.Queue()
        self.bulk = random.Random(5).randbytes(BULK_BYTES)
        self.bulk_sent = 0

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        while (first := decoder.next_frame()) is None:
            if not (data := connection.recv(1 << 16)):
                return
            decoder.receive_data(data)
        if commands.parse_command(first.command).type != BaseCommand.CONNECT:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        connection.sendall(commands.connected(CommandConnected(server_version="echo", protocol_version=19)))
        try:
            data = decoder.take_unread_data()
            while data or (data := connection.recv(1 << 16)):
                if data == BULK:
                    self._send_bulk(connection)
                else:
                    connection.sendall(data)
                data = b""
            connection.sendall(GOODBYE)
            self.ended.put("end")
        except OSError as error:
            self.ended.put(f"{error}")

    def _send_bulk(self, connection: socket.socket) -> None:
        for at in range(0, BULK_BYTES, 1 << 16):
            connection.sendall(self.bulk[at : at + (1 << 16)])
            self.bulk_sent = at + (1 << 16)


class Client:
    """A client that may send records by hand: ``by_hand``, once its relay has started."""

    def __init__(self, port: int, context: ssl.SSLContext, broker_port: int, behind_connect: tuple[bytes, ...]) -> None:
        self.behind_connect = behind_connect
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        self.socket.connect((HOST, port))
        self.session = TlsSession(context, server_side=False, host="localhost")
        done = self.session.continue_handshake()
        while not done:
            self.socket.sendall(self.session.take_outgoing())
            done = self.session.continue_handshake(self.socket.recv(1 << 16))
        self.socket.sendall(self.session.take_outgoing())
        hello = CommandConnect(client_version="attack", protocol_version=19)
        hello.proxy_to_broker_url = f"{HOST}:{broker_port}"
        same_record, *others = behind_connect or (b"",)
        records = encrypted(self.session, commands.connect(hello) + same_record)
        self.socket.sendall(records + b"".join(encrypted(self.session, data) for data in others))
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        while (first := decoder.next_frame()) is None:
            decoder.receive_data(self.receive())
        assert commands.parse_command(first.command).type == BaseCommand.CONNECTED
        self._ahead = decoder.take_unread_data()
        self.by_hand = Records(self.session.take_kernel_keys().sending)

    def receive(self) -> bytes:
        """Receive some data; none at the end."""
        while not self.session.has_ended:
            if not (ciphertext := self.socket.recv(1 << 16)):
                return b""
            if data := decrypted(self.session, ciphertext):
                return data
        return b""

    def read(self, size: int) -> bytes:
        """Receive so much, or up to the end."""
        found = bytearray(self._ahead)
        while len(found) < size and (data := self.receive()):
            found += data
        self._ahead = bytes(found[size:])
        return bytes(found[:size])

    def send(self, data: bytes, record_type: int = APPLICATION_DATA) -> None:
        """Send one record."""
        self.socket.sendall(self.by_hand.make(record_type, data))

    def echoes(self, data: bytes) -> bool:
        """Whether data come back."""
        self.send(data)
        return self.read(len(data)) == data

    def rest(self) -> str:
        """What comes up to the end, and how it ends."""
        try:
            data = self.read(1 << 30)
        except OSError as error:
            return f"{error}"
        has_close_notify = self.session.has_ended and self.session.error is None
        return f"{data.decode()}, {'close_notify' if has_close_notify else 'FIN'}"


class Attacks:
    """All of them, one after the other, in one cluster beside a client that does nothing wrong."""

    def __init__(
        self, cluster: ProxyCluster, tls_port: int, context: ssl.SSLContext, broker: EchoBroker, port: int
    ) -> None:
        follow_secrets(context)
        self._cluster, self._tls_port, self._context = cluster, tls_port, context
        self._broker, self._port = broker, port
        self._steady = self._connect()

    def _connect(self, *behind_connect: bytes) -> Client:
        return Client(self._tls_port, self._context, self._port, behind_connect)

    def run(self) -> dict[str, Any]:
        """Return what was seen, by attack. In the end the fd store has the other client's relay alone."""
        attacks: dict[str, Callable[[Client], object]] = {
            "key update": lambda client: client.send(KEY_UPDATE, HANDSHAKE),
            "end within a record": self._end_within_a_record,
            "empty records": self._send_empty_records,
            "fatal alert": lambda client: client.send(FATAL_ALERT, ALERT),
            "garbage": lambda client: client.socket.sendall(b"GET / HTTP/1.0\r\n\r\n"),
            "too long": lambda client: client.socket.sendall(b"\x17\x03\x03\xff\xff" + bytes(100)),
            "changed": lambda client: client.socket.sendall(_changed(client.by_hand.make(APPLICATION_DATA, b"data"))),
            "close_notify": lambda client: client.socket.sendall(
                b"".join((client.by_hand.make(APPLICATION_DATA, b"last"), client.by_hand.make(ALERT, b"\x01\x00")))
            ),
            "bulk": self._take_bulk,
        }
        self._cluster.wait_for_total(STORED, 1)  # so the kernel has it
        seen = {name: self._observe(attack, self._connect()) for name, attack in attacks.items()}
        seen["pipelined"] = self._observe(self._end, self._connect(PIPELINED, PIPELINED))
        assert self._steady.echoes(b"x" * 10_000)
        self._cluster.wait_for_total(STORED, 1)
        return seen

    def _observe(self, attack: Callable[[Client], object], client: Client) -> dict[str, Any]:
        pipelined = client.read(sum(map(len, client.behind_connect)))
        assert pipelined == b"".join(client.behind_connect)
        assert client.echoes(b"before")
        found = attack(client)
        rest = client.rest()
        client.socket.close()
        return {
            "found": found,
            "client": rest,
            "broker": self._broker.ended.get(timeout=PATIENCE_S),
            "other": self._steady.echoes(b"on and on"),
        }

    @staticmethod
    def _end(client: Client) -> None:
        client.send(b"\x01\x00", ALERT)

    @staticmethod
    def _end_within_a_record(client: Client) -> None:
        client.socket.sendall(client.by_hand.make(APPLICATION_DATA, b"data" * 100)[:77])
        client.socket.shutdown(socket.SHUT_WR)

    def _send_empty_records(self, client: Client) -> bool:
        client.socket.sendall(b"".join(client.by_hand.make(APPLICATION_DATA, b"") for _ in range(EMPTY_RECORDS)))
        is_echoed = client.echoes(b"behind them")
        self._end(client)
        return is_echoed

    def _take_bulk(self, client: Client) -> dict[str, Any]:
        """Read nothing until the broker is stuck; then all of it."""
        (forwarder,) = children(self._cluster.pid, "forwarder")
        before_kib = _memory_kib(forwarder)
        client.send(BULK)
        broker, moved_at, moved = self._broker, time.monotonic(), -1
        while time.monotonic() < moved_at + STALL_S:
            if broker.bulk_sent != moved:
                moved_at, moved = time.monotonic(), broker.bulk_sent
            time.sleep(0.05)
        grown_kib = _memory_kib(forwarder) - before_kib
        is_whole = hashlib.sha256(client.read(BULK_BYTES)).digest() == hashlib.sha256(broker.bulk).digest()
        self._end(client)
        return {"grown_kib": grown_kib, "is_whole": is_whole}


def _changed(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


def _memory_kib(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
