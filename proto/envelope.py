"""The Envelope: a client's requests, whole, on their way through the forwarder to a lookup worker (KIP-590).

It names whose requests they are, and the auth worker's seal proves it; the receiver authenticates nobody a second
time. Errors of the Envelope are told apart from errors inside: those are part of the embedded response.
"""

from functools import lru_cache
from typing import NamedTuple

from proto.addresses import AddressInvalid, parse_host_port
from proto.commands import CommandCorrupt, command_name, parse_command
from proto.lookup_requests import Request, parse_request
from proto.rpc_pb2 import EnvelopeRequest, EnvelopeResponse, Principal, ResolveTargetRequest
from proto.sealed_principal import SealBroken, expiry_unix_ms, unseal
from proto.varints import varint

ENVELOPE_VERSION = 1
"""Written by a sender; a receiver refuses what is newer than its own, since it could not know what it leaves out."""


CLIENTS_MAX = 4096
"""Of how many what was found is kept."""

_NOBODY = Principal()

_REQUESTS_TAG = bytes((EnvelopeRequest.REQUESTS_FIELD_NUMBER << 3 | 2,))


class EnvelopeRefused(Exception):
    """An Envelope, or a request in it, that is not accepted; ``error`` is an EnvelopeResponse.Error, the text
    is for the log.
    """

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = error


def verify_envelope_principal(envelope: EnvelopeRequest, seal_key: bytes | None, now_unix_ms: int | None) -> Principal:
    """Whose requests they are: the sealed principal, and nothing else, decides. Raises EnvelopeRefused.

    ``seal_key``: None where the cluster does not authenticate; then they are nobody's. ``now_unix_ms``: None where
    sessions may go on past their principal's end, since it is only observed.
    """
    if envelope.version > ENVELOPE_VERSION:
        text = f"an Envelope of version {envelope.version}; this worker knows {ENVELOPE_VERSION}"
        raise EnvelopeRefused(EnvelopeResponse.UNSUPPORTED_VERSION, text)
    if not envelope.requests:
        raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, "an Envelope without a request")
    principal = _NOBODY
    if seal_key is not None:
        claim = _Claim(envelope.principal_name, envelope.principal_type)
        principal = _principal_under(envelope.sealed_principal, claim, seal_key, now_unix_ms)
    try:
        _address(envelope.client_address)
    except AddressInvalid as error:
        raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, f"no client address: {error}") from None
    return principal


def verify_target_principal(request: ResolveTargetRequest, seal_key: bytes | None, now_unix_ms: int) -> Principal:
    """Whose relay is to be opened, by the seal as in ``principal_of``. Raises EnvelopeRefused."""
    if seal_key is None:
        return _NOBODY
    return _principal_under(request.sealed_principal, _Claim(request.principal_name), seal_key, now_unix_ms)


class _Claim(NamedTuple):
    """Who a caller says it is; ``type`` None: it does not say of which type."""

    name: str
    type: str | None = None


def _principal_under(sealed: bytes, claim: _Claim, seal_key: bytes, now_unix_ms: int | None) -> Principal:
    """The principal under a seal that holds now, or ever did where ``now_unix_ms`` is None. Raises EnvelopeRefused,
    also where another principal is claimed.
    """
    try:
        principal, end_unix_ms = _unsealed(sealed, seal_key)
    except SealBroken as error:
        raise _bad_principal(f"the sealed principal is {error}") from None
    if now_unix_ms is not None and end_unix_ms <= now_unix_ms:
        raise _bad_principal("the sealed principal is expired")
    if principal.name != claim.name or claim.type not in {None, principal.type}:
        raise _bad_principal("the principal is not the one under the seal")
    return principal


def _bad_principal(text: str) -> EnvelopeRefused:
    return EnvelopeRefused(EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE, text)


# A client sends many Envelopes, and what was found of its address and of its seal holds for all of them.
_address = lru_cache(CLIENTS_MAX)(parse_host_port)


@lru_cache(CLIENTS_MAX)
def _unsealed(sealed: bytes, seal_key: bytes) -> tuple[Principal, float]:
    """The principal inside, be its time over or not, and when it is. Raises SealBroken."""
    principal = unseal(sealed, seal_key)
    return principal, expiry_unix_ms(principal)


def parse_embedded_request(data: bytes) -> tuple[Request, bytes]:
    """What one of an Envelope's requests asks, and its request id, a varint. Raises EnvelopeRefused, and
    RequestRefused where no broker must see it.
    """
    try:
        parsed = parse_request(data)
    except KeyError:
        text = f"{command_name(parse_command(data).type)} may not be forwarded"
        raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, text) from None
    except CommandCorrupt as error:
        raise EnvelopeRefused(EnvelopeResponse.UNSUPPORTED_VERSION, str(error)) from None
    return parsed


def encode_embedded_request(request: bytes) -> bytes:
    """One of an Envelope's requests, as it stands in its serialized form: to be put behind the rest of it."""
    return _REQUESTS_TAG + varint(len(request)) + request
