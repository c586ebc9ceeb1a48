"""The ends of a connection with kernel TLS: its contexts, and records made and read by hand from the kernel's keys."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from e2e.lab.certificates import Authority

from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.network.kernel_tls import KernelTlsSession, KeyLog, Keys
from proxy.runtime.network.tls import ListenerContexts, broker_context

V2, V3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
SUITES_1_2 = (
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
)

_TAG_BYTES = 16
_TLS_1_3 = 0x0304


class Records:
    """One direction of a connection. A record has its type, its data and, in TLS 1.3, padding."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._aead = AESGCM(keys.key) if keys.cipher.salt_bytes else ChaCha20Poly1305(keys.key)
        self._number = keys.sequence_number
        self._explicit_nonce = int.from_bytes(keys.iv[4:])

    @property
    def _has_explicit_nonce(self) -> bool:
        return self._keys.version != _TLS_1_3 and bool(self._keys.cipher.salt_bytes)

    def _nonce(self) -> bytes:
        return (int.from_bytes(self._keys.iv) ^ self._number).to_bytes(12)

    def _additional(self, record_type: int, size: int) -> bytes:
        return self._number.to_bytes(8) + bytes([record_type, 3, 3]) + size.to_bytes(2)

    def make(self, record_type: int, data: bytes, padding: int = 0) -> bytes:
        """Return a protected record."""
        if self._keys.version == _TLS_1_3:
            body = data + bytes([record_type]) + bytes(padding)
            head = b"\x17\x03\x03" + (len(body) + _TAG_BYTES).to_bytes(2)
            sealed = self._aead.encrypt(self._nonce(), body, head)
        else:
            explicit = self._explicit_nonce.to_bytes(8) if self._has_explicit_nonce else b""
            nonce = self._keys.iv[:4] + explicit if explicit else self._nonce()
            sealed = explicit + self._aead.encrypt(nonce, data, self._additional(record_type, len(data)))
            head = bytes([record_type, 3, 3]) + len(sealed).to_bytes(2)
            self._explicit_nonce += 1
        self._number += 1
        return head + sealed

    def read(self, record: bytes) -> tuple[int, bytes]:
        """Return a protected record's type and data; an error where the keys or the number are others."""
        head, sealed = record[:5], record[5:]
        if self._keys.version == _TLS_1_3:
            body = self._aead.decrypt(self._nonce(), sealed, head).rstrip(b"\0")
            found = body[-1], body[:-1]
        else:
            explicit = sealed[:8] if self._has_explicit_nonce else b""
            sealed = sealed[len(explicit) :]
            additional = self._additional(head[0], len(sealed) - _TAG_BYTES)
            nonce = self._keys.iv[:4] + explicit if explicit else self._nonce()
            found = head[0], self._aead.decrypt(nonce, sealed, additional)
        self._number += 1
        return found


class Scene:
    """A listener's contexts and a client's, both with a key log, and the ends of one handshake."""

    def __init__(self, directory: Path, *, suite: str = "", version: ssl.TLSVersion | None = None) -> None:
        authority = Authority(directory, "ours")
        pair = authority.server("server")
        self.files = ListenerTls(certificate=pair.certificate, key=pair.key)
        self.client = broker_context(BrokerTls(trust=authority.file)).value
        if version is not None:
            self.client.minimum_version = self.client.maximum_version = version
        self.log = KeyLog()
        self.log.follow(self.client)
        self.reload()
        if suite:
            self.loaded.set_ciphers(suite)
            self.client.set_ciphers(suite)

    def reload(self) -> None:
        self.listener = ListenerContexts("listener[0].tls", self.files)
        self.loaded = self.listener._loaded
        self.log.follow(self.loaded)

    def server_end(self) -> KernelTlsSession:
        return KernelTlsSession(self.listener.front_context, self.log, server_side=True)

    def client_end(self) -> KernelTlsSession:
        return KernelTlsSession(self.client, self.log, server_side=False, host="localhost")
