"""A request of lookup mode, from the client's frame to the frame that answers it."""

from collections.abc import Mapping

from proto.frames import Frame, encode_frame
from proto.lookups import client_request_id, failure, kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeError, EnvelopeResponse, Status
from proxy.forwarder.backends import Backends, ClientIdentity
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcCallRefused, RpcError

UNAVAILABLE = "The proxy's lookup service is not available"
_CODES: Mapping[int | None, int] = {
    Status.TOO_MANY_REQUESTS: ServerError.TooManyRequests,
    Status.UNKNOWN_SERVER_ERROR: ServerError.UnknownError,
}
"""What a call's failure is to the client; all others are ServiceNotReady, upon which it comes back."""

NO_LONGER_VALID = "The credential of this connection is no longer valid"


async def answer_frame(
    backends: Backends, command: BaseCommand, frame: Frame, identity: ClientIdentity, client_address: str
) -> bytes:
    """The frame for the client: the lookup worker's embedded response as it is, or an error in the fitting form."""
    try:
        response = await backends.forward(frame.command, identity, client_address)
    except RpcError as error:
        status = error.status if isinstance(error, RpcCallRefused) else None
        code = _CODES.get(status, ServerError.ServiceNotReady)
        return _failed(command, code, UNAVAILABLE, client_address, identity, str(error))
    if response.error == EnvelopeError.ENVELOPE_OK:
        return encode_frame(response.response)
    return _envelope_error(response, command, client_address, identity)


def _envelope_error(
    response: EnvelopeResponse, command: BaseCommand, client_address: str, identity: ClientIdentity
) -> bytes:
    """KIP-590: an envelope's own error is no business of the client's, beyond whether to come back with a new one."""
    if response.error == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE:
        code, text = ServerError.AuthenticationError, NO_LONGER_VALID
    else:
        code, text = ServerError.UnknownError, "The proxy cannot forward this request"
    return _failed(command, code, text, client_address, identity, response.error_message)


def _failed(  # noqa: PLR0917 -- private, and called twice
    command: BaseCommand, code: int, text: str, client_address: str, identity: ClientIdentity, reason: str
) -> bytes:
    kind = kind_of(command)
    get_logger().warning(
        "a lookup was not forwarded", client=client_address, principal=identity.role, request=kind.name, reason=reason
    )
    return encode_frame(failure(kind, client_request_id(command, kind), code, text).SerializeToString())
