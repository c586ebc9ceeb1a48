"""The Envelope: a client's whole requests on their way through the forwarder to a lookup worker (KIP-590).

It names the principal of the requests, which the auth worker's seal proves; the receiver does not authenticate the
client a second time. Errors of the Envelope are separate from errors of a request: those are part of the embedded
response.
"""

from functools import lru_cache
from typing import NamedTuple

from proto.addresses import AddressInvalid, parse_host_port
from proto.commands import CommandCorrupt, command_name, parse_command
from proto.errors import ProtoError
from proto.lookup_requests import LookupRequest, RequestParser
from proto.rpc_pb2 import EnvelopeRequest, EnvelopeResponse, Principal, ResolveTargetRequest
from proto.sealed_principal import SealBroken, expiry_unix_ms, unseal
from proto.varints import varint

ENVELOPE_VERSION = 1
"""Version that a sender writes. A receiver refuses newer ones, since it does not know the fields that they add."""

CLIENTS_MAX = 4096
"""Limit of the clients in a verifier's caches."""

_NO_PRINCIPAL = Principal()

_REQUESTS_TAG = bytes((EnvelopeRequest.REQUESTS_FIELD_NUMBER << 3 | 2,))


class EnvelopeRefused(ProtoError):
    """An Envelope, or a request in it, that is not accepted.

    ``error`` is an EnvelopeResponse.Error; the text is for the log.
    """

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = error


class EnvelopeVerifier:
    """Verifier of the principals of Envelopes and targets, by the auth worker's seal.

    A client sends many Envelopes, and the results for its address and its seal hold for all of them: those of the last
    CLIENTS_MAX clients are cached.
    """

    def __init__(self) -> None:
        self._parse_address = lru_cache(CLIENTS_MAX)(parse_host_port)
        self._unseal = lru_cache(CLIENTS_MAX)(_unseal_with_expiry)

    def verify_envelope(self, envelope: EnvelopeRequest, seal_key: bytes | None, now_unix_ms: int | None) -> Principal:
        """Return the principal of an Envelope's requests, which only the seal determines. Raises EnvelopeRefused.

        ``seal_key``: None where the cluster does not authenticate; the principal is then empty. ``now_unix_ms``: None
        where sessions may continue past their principal's expiry, since it is only observed.
        """
        if envelope.version > ENVELOPE_VERSION:
            text = f"an Envelope of version {envelope.version}; this worker knows {ENVELOPE_VERSION}"
            raise EnvelopeRefused(EnvelopeResponse.UNSUPPORTED_VERSION, text)
        if not envelope.requests:
            raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, "an Envelope without a request")
        principal = _NO_PRINCIPAL
        if seal_key is not None:
            claim = _Claim(envelope.principal_name, envelope.principal_type)
            principal = self._verify_seal(envelope.sealed_principal, claim, seal_key, now_unix_ms)
        try:
            self._parse_address(envelope.client_address)
        except AddressInvalid as error:
            raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, f"no client address: {error}") from None
        return principal

    def verify_target(
        self, request: ResolveTargetRequest, seal_key: bytes | None, now_unix_ms: int, *, routes_sni: bool = False
    ) -> Principal:
        """Return the principal of a relay that is to be opened, as ``verify_envelope`` does. Raises EnvelopeRefused.

        ``routes_sni``: a listener passes TLS through. Its clients have no principal, and may claim none. Where the own
        hosts of an HTTP upstream are asked for, the answer is the configuration's, and for all clients: it needs none.
        """
        if request.upstream and not request.target:
            return _NO_PRINCIPAL
        if request.server_name:
            if not routes_sni:
                raise _bad_principal("no listener passes TLS through, so no client may be without a principal")
            if request.principal_name or request.sealed_principal or request.any_broker:
                raise _bad_principal("a client whose TLS is passed through has no principal")
            return _NO_PRINCIPAL
        if seal_key is None:
            return _NO_PRINCIPAL
        return self._verify_seal(request.sealed_principal, _Claim(request.principal_name), seal_key, now_unix_ms)

    def _verify_seal(self, sealed: bytes, claim: "_Claim", seal_key: bytes, now_unix_ms: int | None) -> Principal:
        """Return the principal under a valid seal; ``now_unix_ms`` None: its expiry does not matter.

        Raises EnvelopeRefused, also where another principal is claimed.
        """
        try:
            principal, end_unix_ms = self._unseal(sealed, seal_key)
        except SealBroken as error:
            raise _bad_principal(f"the sealed principal is {error}") from None
        if now_unix_ms is not None and end_unix_ms <= now_unix_ms:
            raise _bad_principal("the sealed principal is expired")
        if principal.name != claim.name or claim.type not in {None, principal.type}:
            raise _bad_principal("the principal is not the one under the seal")
        return principal


class _Claim(NamedTuple):
    """Principal that a caller claims; ``type`` is None where the caller states none."""

    name: str
    type: str | None = None


def _bad_principal(text: str) -> EnvelopeRefused:
    return EnvelopeRefused(EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE, text)


def _unseal_with_expiry(sealed: bytes, seal_key: bytes) -> tuple[Principal, float]:
    """Return the sealed principal and its expiry, without a check of the expiry. Raises SealBroken."""
    principal = unseal(sealed, seal_key)
    return principal, expiry_unix_ms(principal)


def parse_embedded_request(data: bytes, parser: RequestParser) -> tuple[LookupRequest, bytes]:
    """Parse one of an Envelope's requests; return the request and its request id, a varint.

    Raises EnvelopeRefused, and RequestRefused for a request that no broker must receive.
    """
    try:
        parsed = parser.parse_request(data)
    except KeyError:
        text = f"{command_name(parse_command(data).type)} may not be forwarded"
        raise EnvelopeRefused(EnvelopeResponse.INVALID_REQUEST, text) from None
    except CommandCorrupt as error:
        raise EnvelopeRefused(EnvelopeResponse.UNSUPPORTED_VERSION, str(error)) from None
    return parsed


def encode_embedded_request(request: bytes) -> bytes:
    """Encode one of an Envelope's requests as a field, to be appended to the rest of the serialized Envelope."""
    return _REQUESTS_TAG + varint(len(request)) + request
