"""TLS records made and read by hand, from the keys that the kernel is given: what a test's peer sends otherwise."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from proxy.runtime.network.kernel_tls import Keys

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
