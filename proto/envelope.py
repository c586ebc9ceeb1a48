"""The Envelope: a client's requests, whole, on their way through the forwarder to a lookup worker (KIP-590).

It names whose requests they are, and the auth worker's seal proves it; the receiver authenticates nobody a second
time. Errors of the Envelope are told apart from errors inside: those are part of the embedded response.
"""

from proto.addresses import AddressInvalid, parse_host_port
from proto.commands import CommandCorrupt, command_name, parse_command
from proto.lookups import KINDS, LookupKind, kind_of
from proto.pulsar_pb2 import BaseCommand
from proto.rpc_pb2 import EnvelopeError, EnvelopeRequest, Principal
from proto.sealed_principal import SealBroken, unseal

ENVELOPE_VERSION = 1
"""Written by a sender; a receiver refuses what is newer than its own, since it could not know what it leaves out."""


class EnvelopeRefused(Exception):
    """An Envelope, or a request in it, that is not accepted; ``error`` is an EnvelopeError, the text is for the log."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = error


def principal_of(envelope: EnvelopeRequest, seal_key: bytes | None, now_unix_ms: int) -> Principal:
    """Whose requests they are: the sealed principal, and nothing else, decides. Raises EnvelopeRefused.

    ``seal_key``: None where the cluster does not authenticate; then they are nobody's.
    """
    if envelope.version > ENVELOPE_VERSION:
        text = f"an Envelope of version {envelope.version}; this worker knows {ENVELOPE_VERSION}"
        raise EnvelopeRefused(EnvelopeError.ENVELOPE_UNSUPPORTED_VERSION, text)
    if not envelope.requests:
        raise EnvelopeRefused(EnvelopeError.ENVELOPE_INVALID_REQUEST, "an Envelope without a request")
    try:
        parse_host_port(envelope.client_address)
    except AddressInvalid as error:
        raise EnvelopeRefused(EnvelopeError.ENVELOPE_INVALID_REQUEST, f"no client address: {error}") from None
    if seal_key is None:
        return Principal()
    try:
        principal = unseal(envelope.sealed_principal, seal_key, now_unix_ms)
    except SealBroken as error:
        text = f"the sealed principal is {error}"
        raise EnvelopeRefused(EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE, text) from None
    if (principal.type, principal.name) != (envelope.principal_type, envelope.principal_name):
        text = "the principal is not the one under the seal"
        raise EnvelopeRefused(EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE, text)
    return principal


def embedded_request(data: bytes) -> tuple[BaseCommand, LookupKind]:
    """One of an Envelope's requests, and its kind. Raises EnvelopeRefused."""
    try:
        command = parse_command(data)
        if command.type not in KINDS:
            text = f"{command_name(command.type)} may not be forwarded"
            raise EnvelopeRefused(EnvelopeError.ENVELOPE_INVALID_REQUEST, text)
        return command, kind_of(command)
    except CommandCorrupt as error:
        raise EnvelopeRefused(EnvelopeError.ENVELOPE_UNSUPPORTED_VERSION, str(error)) from None
