"""What a client is sent where its request of lookup mode fails."""

from collections.abc import Mapping

from proto.commands import CommandCorrupt, command_name, parse_command
from proto.frames import encode_frame
from proto.lookup_kinds import KINDS, LookupKind, client_request_id, failure_answer, kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeResponse, Status
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError

UNAVAILABLE = "The proxy's lookup service is not available"
NO_MEMORY = "The proxy has too many lookups under way"
TOO_MANY = "Too many lookups under way in this connection"
NO_ROOM = "The proxy has too many large answers under way"
CONNECT_AGAIN = "The proxy's lookup service is of another version: connect again"
NO_LONGER_VALID = "The credential of this connection is no longer valid"

_CODES: Mapping[int | None, int] = {
    Status.TOO_MANY_REQUESTS: ServerError.TooManyRequests,
    Status.UNKNOWN_SERVER_ERROR: ServerError.UnknownError,
}


def code_of_rpc_error(error: RpcError) -> int:
    """Return the code for a client whose Envelope failed: by default ServiceNotReady, upon which it comes again."""
    status = error.status if isinstance(error, RpcCallRefused) else None
    return _CODES.get(status, ServerError.ServiceNotReady)


def envelope_failure(error: int | None) -> tuple[int, str]:
    """Return code and text for a client whose Envelope was answered with an error of its own; None: with nonsense.

    KIP-590: such an error is no business of the client's, beyond whether to come back with a new credential. (An
    Envelope of an unknown version is not handled here: its client connects again.)
    """
    if error == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE:
        return ServerError.AuthenticationError, NO_LONGER_VALID
    return ServerError.UnknownError, "The proxy cannot forward this request"


def parse_request(request: bytes) -> tuple[BaseCommand, LookupKind]:
    """Return a request and its kind. Raises CommandCorrupt where it only begins as one."""
    command = parse_command(request)
    if command.type not in KINDS:
        raise CommandCorrupt(f"{command_name(command.type)} that begins as another command")
    return command, kind_of(command)


def failure_frame(command: BaseCommand, kind: LookupKind, code: int, text: str) -> bytes:
    """Return the frame that tells a client that its request failed."""
    return encode_frame(failure_answer(kind, client_request_id(command, kind), code, text).SerializeToString())
