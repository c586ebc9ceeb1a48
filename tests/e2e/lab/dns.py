"""A name server on loopback, over UDP and TCP, whose records a test may change."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
from local.ports import free_port

_SITECUSTOMIZE = """\
import dns.resolver


def read(self, _file):
    self.nameservers, self.port, self.search = ["127.0.0.1"], {port}, []


dns.resolver.BaseResolver.read_resolv_conf = read
"""

UDP_BYTES_MAX = 512
"""RFC 1035, 2.3.4; what is longer is asked for again over TCP."""


class NameServer:
    """``add`` records at any time. Listens on ``port`` of ``host``, by default a free one of 127.0.0.1.

    ``silent_zone``: names below it get no answer, as if their owner's name server were very slow.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, silent_zone: str = "") -> None:
        self._records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self._silent_suffix = f".{silent_zone}." if silent_zone else ""
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.host, self.port = host, port or free_port()
        self._udp.bind((host, self.port))
        self._tcp = socket.create_server((host, self.port))
        self.asked: list[tuple[str, str, str]] = []
        """Transport, name and type of each question."""

    def silent_names(self) -> set[str]:
        """The names below ``silent_zone`` that were asked for."""
        return {name for _, name, _ in list(self.asked) if self._is_silent(name)}

    def _is_silent(self, name: str) -> bool:
        return bool(self._silent_suffix) and name.endswith(self._silent_suffix)

    def add(self, name: str, kind: str, *records: str, ttl: int = 1) -> None:
        """Set the records of a name and type."""
        self._records[dns.name.from_text(name).to_text(), kind] = (ttl, list(records))

    def environment(self, directory: Path) -> dict[str, str]:
        """In which Pythons (dnspython) take this for their only name server; in place of /etc/resolv.conf, which is
        the machine's."""
        (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(port=self.port))
        return {**os.environ, "PYTHONPATH": str(directory)}

    def __enter__(self) -> Self:
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sock in (self._udp, self._tcp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve_udp(self) -> None:
        while True:
            try:
                data, address = self._udp.recvfrom(65535)
                if not data:  # shut down
                    return
                response = self._response(data, "udp")
                if self._is_silent(response.question[0].name.to_text().lower()):
                    continue
                wire = response.to_wire()
                if len(wire) > UDP_BYTES_MAX:
                    response.answer.clear()
                    response.flags |= dns.flags.TC
                    wire = response.to_wire()
                self._udp.sendto(wire, address)
            except OSError:
                return

    def _serve_tcp(self) -> None:
        while True:
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                (length,) = struct.unpack("!H", stream.read(2))
                wire = self._response(stream.read(length), "tcp").to_wire()
                connection.sendall(struct.pack("!H", len(wire)) + wire)

    def _response(self, data: bytes, transport: str) -> dns.message.Message:
        request = dns.message.from_wire(data)
        response = dns.message.make_response(request)
        question = request.question[0]
        name, kind = question.name.to_text().lower(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((transport, name, kind))
        if name not in {known for known, _ in self._records}:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif (name, kind) in self._records:
            ttl, records = self._records[name, kind]
            response.answer.append(dns.rrset.from_text(name, ttl, "IN", kind, *records))
        return response
