"""Sealed principals: authenticated principals with a MAC that only auth workers can compute.

A principal travels from the auth worker through the forwarder to the lookup worker (KIP-590: the Envelope's
principal). The forwarder parses input of unauthenticated clients and must not be able to forge a principal. So the auth
worker adds a MAC under a key that only auth and lookup workers hold. The key is new with every start of the cluster and
is never written to disk.

This module is part of ``proto`` rather than ``auth`` because both sides need it and siblings do not import each other.
It maps bytes to bytes.
"""

import hashlib
import hmac
import math

from google.protobuf.message import DecodeError

from proto.errors import ProtoError
from proto.rpc_pb2 import Principal, SealedPrincipal

SEAL_KEY_BYTES = 32

_OVERHEAD_BYTES_MAX = 64
"""Bytes of a sealed principal beside the principal itself: the MAC, and two fields' tags and sizes."""

# Domain separation: nothing else that is signed with the key can pass for a principal.
_CONTEXT = b"pulsar-trio-proxy sealed principal 1\0"


class SealBroken(ProtoError):
    """Bytes that are no sealed principal. The text is "malformed" or "forged"."""


def seal(principal: Principal, key: bytes) -> bytes:
    """Seal a principal with a key of SEAL_KEY_BYTES."""
    body = principal.SerializeToString(deterministic=True)
    return SealedPrincipal(principal=body, mac=_mac(body, key)).SerializeToString()


def unseal(data: bytes, key: bytes) -> Principal:
    """Return the sealed principal without a check of its expiry (``expiry_unix_ms``). Raises SealBroken."""
    try:
        sealed = SealedPrincipal.FromString(data)
    except DecodeError:
        raise SealBroken("malformed") from None
    # Receivers cache what they have unsealed. A field beside these two has no MAC, and could have any size.
    if len(data) > len(sealed.principal) + _OVERHEAD_BYTES_MAX:
        raise SealBroken("malformed")
    if not hmac.compare_digest(sealed.mac, _mac(sealed.principal, key)):
        raise SealBroken("forged")
    return Principal.FromString(sealed.principal)


def expiry_unix_ms(principal: Principal) -> float:
    """Return when the principal expires, in milliseconds since 1970; infinity if it does not."""
    return principal.expires_at_unix_ms if principal.HasField("expires_at_unix_ms") else math.inf


def _mac(body: bytes, key: bytes) -> bytes:
    if len(key) != SEAL_KEY_BYTES:  # an empty key, for example in a forwarder, would let any process seal
        raise ValueError(f"a seal's key has {SEAL_KEY_BYTES} bytes")
    return hmac.digest(key, _CONTEXT + body, hashlib.sha256)
