"""A Pulsar client of raw frames: it says what no real client would, and sees what real ones hide."""

from __future__ import annotations

import itertools
import select
import socket
import time
from types import TracebackType
from typing import Any, Self

from proto.frames import Frame, FrameDecoder, encode_frame
from proto.pulsar_pb2 import BaseCommand

from .schema import Command
from .waiting import BUSY_S

REPLY_TIMEOUT_S = BUSY_S
_FRAME_BYTES_MAX = 64 * 1024 * 1024
_request_ids = itertools.count(1)


class Ended(Exception):
    """The other side ended the connection."""


class WireClient:
    """One connection, from ``source`` if that is given. Everything that waits has a deadline."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, source: str = "", timeout_s: float = BUSY_S) -> None:
        origin = (source, 0) if source else None
        self._socket = socket.create_connection((host, port), timeout=timeout_s, source_address=origin)
        own_host, own_port = self._socket.getsockname()[:2]
        self.address = f"{own_host}:{own_port}"
        """As the proxy's log should name us."""
        self._decoder = FrameDecoder(max_frame_bytes=_FRAME_BYTES_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    # ---- sending

    def send_bytes(self, data: bytes) -> None:
        """Whatever bytes."""
        self._socket.sendall(data)

    def send(self, kind: int, **body: Any) -> None:
        """One command, e.g. ``send(BaseCommand.PING, ping={})``."""
        self.send_bytes(frame(kind, **body))

    def end_sending(self) -> None:
        """Half-close: we say no more but still listen."""
        self._socket.shutdown(socket.SHUT_WR)

    # ---- receiving

    def receive(self, within_s: float = REPLY_TIMEOUT_S) -> Any:
        """The next command; Ended at the end of the stream, TimeoutError when nothing comes."""
        return Command.FromString(self.receive_frame(within_s).command)

    def receive_frame(self, within_s: float = REPLY_TIMEOUT_S) -> Frame:
        """The same, with what stands behind the command."""
        deadline = time.monotonic() + within_s
        while (received := self._decoder.next_frame()) is None:
            self._decoder.receive_data(self._read(deadline))
        return received

    def read_to_end(self, within_s: float = REPLY_TIMEOUT_S) -> bytes:
        """Raw bytes until the other side ends."""
        deadline, parts = time.monotonic() + within_s, [self._decoder.take_unread_data()]
        while True:
            try:
                parts.append(self._read(deadline))
            except Ended:
                return b"".join(parts)

    def wait_for_end(self, within_s: float = REPLY_TIMEOUT_S) -> list[Any]:
        """Whatever commands still come until the other side ends the connection."""
        commands = []
        deadline = time.monotonic() + within_s
        while True:
            try:
                commands.append(self.receive(max(0.0, deadline - time.monotonic())))
            except Ended:
                return commands

    def _read(self, deadline: float) -> bytes:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("nothing came in time")
        self._socket.settimeout(remaining_s)
        try:
            data = self._socket.recv(1 << 16)
        except (ConnectionResetError, BrokenPipeError):
            raise Ended("reset") from None
        if not data:
            raise Ended("end of stream")
        return data

    def has_heard(self) -> bool:
        """Whether anything is there to be received, an end included."""
        poll = select.poll()  # unlike select it takes descriptors beyond 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # ---- a little dialogue

    def connect(self, **fields: Any) -> Any:
        """Say CONNECT; returns the answer, be it CONNECTED or an ERROR."""
        self.send_connect(**fields)
        return self.receive()

    def send_connect(self, **fields: Any) -> None:
        """Say CONNECT without waiting. ``token=…`` is short for the two fields that carry it."""
        if "token" in fields:
            fields |= {"auth_method_name": "token", "auth_data": fields.pop("token").encode()}
        features = {"supports_auth_refresh": True, "supports_get_partitioned_metadata_without_auto_creation": True}
        connect = {"client_version": "wire", "protocol_version": 19, "feature_flags": features, **fields}
        self.send(BaseCommand.CONNECT, connect=connect)

    def partitions(self, topic: str) -> Any:
        """Ask for a topic's partitions, without creating the topic."""
        body = {"topic": topic, "request_id": next(_request_ids), "metadata_auto_creation_enabled": False}
        self.send(BaseCommand.PARTITIONED_METADATA, partition_metadata=body)
        return self.receive()

    def lookup(self, topic: str, **fields: Any) -> Any:
        """Ask for a topic's broker."""
        body = {"topic": topic, "request_id": next(_request_ids), **fields}
        self.send(BaseCommand.LOOKUP, lookup_topic=body)
        return self.receive()

    def producer(self, topic: str) -> Any:
        """Ask for a producer: a broker's business, never a proxy's."""
        body = {"topic": topic, "request_id": next(_request_ids), "producer_id": 1}
        self.send(BaseCommand.PRODUCER, producer=body)
        return self.receive()

    def ping(self) -> Any:
        """PING; returns the answer."""
        self.send(BaseCommand.PING, ping={})
        return self.receive()


def frame(kind: int, **body: Any) -> bytes:
    """A command as a frame."""
    return encode_frame(Command(type=kind, **body).SerializeToString())
