"""Sealed principals: who a client is, written so that only an auth worker can have written it.

A principal travels from the auth worker through the forwarder to the lookup worker (KIP-590: the Envelope's
principal). The forwarder, which reads what strangers send, must not be able to make one up. So the auth worker adds a
MAC under a key that only auth and lookup workers hold; it is new with every start of the cluster and never on disk.

This stands in ``proto`` rather than ``auth`` because both sides need it and siblings do not import each other; it is
bytes in, bytes out.
"""

import hashlib
import hmac
import math

from google.protobuf.message import DecodeError

from proto.rpc_pb2 import Principal, SealedPrincipal

SEAL_KEY_BYTES = 32

# Ties the MAC to this use, so that nothing else signed with the key could pass for a principal.
_CONTEXT = b"pulsar-trio-proxy sealed principal 1\0"


class SealBroken(Exception):
    """Bytes that are no sealed principal: malformed or forged. Says which."""


def seal(principal: Principal, key: bytes) -> bytes:
    """Seal a principal with a key of SEAL_KEY_BYTES."""
    body = principal.SerializeToString(deterministic=True)
    return SealedPrincipal(principal=body, mac=_mac(body, key)).SerializeToString()


def unseal(data: bytes, key: bytes) -> Principal:
    """The principal inside, be its time over or not: see ``end_of``. Raises SealBroken."""
    try:
        sealed = SealedPrincipal.FromString(data)
    except DecodeError:
        raise SealBroken("malformed") from None
    if not hmac.compare_digest(sealed.mac, _mac(sealed.principal, key)):
        raise SealBroken("forged")
    return Principal.FromString(sealed.principal)


def expiry_unix_ms(principal: Principal) -> float:
    """From when on (ms since 1970) nobody may act as this principal any more; infinity: it has no end."""
    return principal.expires_at_unix_ms if principal.HasField("expires_at_unix_ms") else math.inf


def _mac(body: bytes, key: bytes) -> bytes:
    if len(key) != SEAL_KEY_BYTES:  # an empty key, say in a forwarder, would let anybody seal
        raise ValueError(f"a seal's key has {SEAL_KEY_BYTES} bytes")
    return hmac.digest(key, _CONTEXT + body, hashlib.sha256)
