"""TLS of an OpenSSL that has X25519MLKEM768, through pyOpenSSL, whatever this Python's own is (before 3.5: without)."""

from __future__ import annotations

import socket

from OpenSSL import SSL

from .certificates import HOST, Pair

PORTION_BYTES = 500
HYBRID = "X25519MLKEM768"
CLASSIC = "x25519"
_BUFFER_BYTES = 1 << 16


class PostQuantumSocket:
    """A socket with TLS 1.3 by OpenSSL's defaults; what it sends leaves in portions of PORTION_BYTES.

    ``sent_bytes`` is the size of each flight of the handshake.
    """

    def __init__(self, plain: socket.socket, session: SSL.Connection) -> None:
        self._plain, self._session = plain, session
        self.sent_bytes: list[int] = []
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                session.do_handshake()
            except SSL.WantReadError:
                self._flush()
                self._feed()
            else:
                self._flush()
                return

    @property
    def group(self) -> str:
        """The group that was negotiated, in OpenSSL's words."""
        return self._session.get_group_name() or ""

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        self._session.sendall(data)
        self._flush()

    def recv(self, size: int) -> bytes:
        """Receive what comes next; empty at the end."""
        while True:
            try:
                return self._session.recv(size)
            except SSL.WantReadError:
                if not self._feed():
                    return b""
            except SSL.ZeroReturnError:
                return b""

    def settimeout(self, seconds: float | None) -> None:
        """Wait so long for what comes next."""
        self._plain.settimeout(seconds)

    def close(self) -> None:
        """Close it, without close_notify."""
        self._plain.close()

    def _feed(self) -> bool:
        data = self._plain.recv(_BUFFER_BYTES)
        if data:
            self._session.bio_write(data)
        elif not self._session.get_finished():
            raise ConnectionError("the other side ended the handshake")
        return bool(data)

    def _flush(self) -> None:
        try:
            data = self._session.bio_read(_BUFFER_BYTES)
        except SSL.WantReadError:
            return
        self.sent_bytes.append(len(data))
        for start in range(0, len(data), PORTION_BYTES):
            self._plain.sendall(data[start : start + PORTION_BYTES])


def client_session(trust: str, name: str = HOST) -> SSL.Connection:
    """Return a session of a client that trusts an authority's file alone."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.load_verify_locations(trust)
    context.set_verify(SSL.VERIFY_PEER)
    session = SSL.Connection(context, None)
    session.set_tlsext_host_name(name.encode())
    session.set_connect_state()
    return session


def server_session(pair: Pair) -> SSL.Connection:
    """Return a session of a server with a certificate."""
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.use_certificate_chain_file(pair.certificate)
    context.use_privatekey_file(pair.key)
    session = SSL.Connection(context, None)
    session.set_accept_state()
    return session
