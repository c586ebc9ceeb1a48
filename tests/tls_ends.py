"""The ends of a connection with kernel TLS: its contexts, and records made and read by hand from the kernel's keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from e2e.lab.certificates import Authority

from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.network import kernel_tls
from proxy.runtime.network.kernel_tls import CIPHERS, Keys
from proxy.runtime.network.tls import ListenerContexts, broker_context
from proxy.runtime.network.tls_session import TlsSession

KEY_UPDATE, NEW_SESSION_TICKET = b"\x18\x00\x00\x01\x00", b"\x04\x00\x00\x01x"
KEY_UPDATE_REQUESTED = b"\x18\x00\x00\x01\x01"

_TAG_BYTES = 16


@contextmanager
def kernel_with(*ciphers: str) -> Iterator[None]:
    """As if the kernel had these ciphers, until the end of the context; contexts that are made in it have a key log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_tls, "_kernel_takes", lambda name: name in ciphers)
        patch.setattr(kernel_tls, "_key_log", None)
        patch.setattr(kernel_tls, "_is_used", False)
        kernel_tls.kernel_ciphers.cache_clear()
        try:
            kernel_tls.use_kernel_tls("auto")
            yield
        finally:
            if kernel_tls._key_log is not None:
                kernel_tls._key_log.close()
            kernel_tls.kernel_ciphers.cache_clear()


def key_log_bytes() -> int:
    """How much is in this process's key log."""
    log = kernel_tls.current_key_log()
    assert log is not None
    return os.fstat(log._memory).st_size


class Records:
    """One direction of a connection with TLS 1.3. A record has its type, its data, and padding."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._aead = AESGCM(keys.key) if keys.cipher.salt_bytes else ChaCha20Poly1305(keys.key)
        self._number = keys.sequence_number

    def _nonce(self) -> bytes:
        return (int.from_bytes(self._keys.iv) ^ self._number).to_bytes(12)

    def make(self, record_type: int, data: bytes, padding: int = 0) -> bytes:
        """Return a protected record."""
        body = data + bytes([record_type]) + bytes(padding)
        head = b"\x17\x03\x03" + (len(body) + _TAG_BYTES).to_bytes(2)
        sealed = self._aead.encrypt(self._nonce(), body, head)
        self._number += 1
        return head + sealed

    def read(self, record: bytes) -> tuple[int, bytes]:
        """Return a protected record's type and data; an error where the keys or the number are others."""
        body = self._aead.decrypt(self._nonce(), record[5:], record[:5]).rstrip(b"\0")
        self._number += 1
        return body[-1], body[:-1]


class Scene:
    """A listener's contexts and a client's. Make it within ``kernel_with``, or where kernel TLS is used."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory, "ours")
        pair = self.authority.server("server")
        self.files = ListenerTls(certificate=pair.certificate, key=pair.key)
        self.client = broker_context(BrokerTls(trust=self.authority.file)).value
        self.reload()

    def reload(self) -> None:
        self.listener = ListenerContexts("listener[0].tls", self.files)

    def server_end(self) -> TlsSession:
        return TlsSession(self.listener.front_context, server_side=True)

    def client_end(self) -> TlsSession:
        return TlsSession(self.client, server_side=False, host="localhost")

    def ends(self, end: str = "server") -> tuple[TlsSession, TlsSession]:
        """Both ends behind their handshake, the named one first."""
        server, client = self.server_end(), self.client_end()
        shake_hands(server, client)
        return (server, client) if end == "server" else (client, server)


def shake_hands(one: TlsSession, other: TlsSession) -> None:
    """Perform a handshake, which leaves nothing to be sent or read."""
    done = {one: one.continue_handshake(), other: other.continue_handshake()}
    while not all(done.values()):
        for sender, receiver in ((one, other), (other, one)):
            if records := sender.take_outgoing():
                done[receiver] = receiver.continue_handshake(records) or done[receiver]
    assert one.unread == other.unread == b""


def decrypted(session: TlsSession, ciphertext: bytes) -> bytes:
    """What a session reads, of what it had and what comes."""
    whole = session.unread + ciphertext
    plaintext = bytearray(len(whole))
    return bytes(plaintext[: session.decrypt(memoryview(whole), memoryview(plaintext))])


def encrypted(session: TlsSession, data: bytes) -> bytes:
    """Records of a session."""
    return session.encrypt(memoryview(data))


ALL_CIPHERS = tuple(CIPHERS)
