"""Lookup mode: a client's requests, from its frames to the frames that answer them."""

from collections.abc import Awaitable, Callable, Mapping

import trio

from proto import commands
from proto.commands import command_name
from proto.frames import Frame, encode_frame
from proto.lookups import client_request_id, failure, kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeError, EnvelopeResponse, Status
from proxy.forwarder.authentication import ClientIdentity
from proxy.forwarder.backends import Backends
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcCallRefused, RpcError
from proxy.runtime.tasks import ByteBudget, InFlight

BYTES_MAX = 4 * 1024 * 1024
"""Requests under way and answers not yet sent that one client may make us keep."""

TOPIC_LIST_BYTES = 512 * 1024
"""What a request for a topic list counts beforehand, since its answer may be large."""

Send = Callable[[bytes], Awaitable[None]]

UNAVAILABLE = "The proxy's lookup service is not available"
_CODES: Mapping[int | None, int] = {
    Status.TOO_MANY_REQUESTS: ServerError.TooManyRequests,
    Status.UNKNOWN_SERVER_ERROR: ServerError.UnknownError,
}
"""What a call's failure is to the client; all others are ServiceNotReady, upon which it comes back."""

NO_LONGER_VALID = "The credential of this connection is no longer valid"


class LookupMode:
    """One client's requests under way, bounded in number and in bytes.

    Above the number a request is answered TooManyRequests. Above the bytes nothing more is read from this client until
    some of its answers have left: it feels that, and nobody else.
    """

    def __init__(
        self, backends: Backends, metrics: ForwarderMetrics, client_address: str, nursery: trio.Nursery, send: Send
    ) -> None:
        self.under_way = InFlight()
        self._backends = backends
        self._metrics = metrics
        self._client_address = client_address
        self._nursery = nursery
        self._send = send
        self._bytes = ByteBudget(BYTES_MAX)

    async def forward(self, command: BaseCommand, frame: Frame, identity: ClientIdentity) -> None:
        """Begin to answer a request. Raises CommandCorrupt where its message is missing."""
        kind = kind_of(command)
        if self.under_way.count >= self._backends.config.limits.max_concurrent_lookups_per_connection:
            self._metrics.refused_commands.labels(reason="too_many_requests").inc()
            text = "Too many lookups under way in this connection"
            busy = failure(kind, client_request_id(command, kind), ServerError.TooManyRequests, text)
            await self._send(commands.encode(busy))
            return
        size = len(frame.command) + (TOPIC_LIST_BYTES if command.type == BaseCommand.GET_TOPICS_OF_NAMESPACE else 0)
        await self._bytes.take(size)
        self.under_way.begin()
        self._nursery.start_soon(self._answer, command, frame, identity, size)

    async def _answer(self, command: BaseCommand, frame: Frame, identity: ClientIdentity, size: int) -> None:
        answer = b""
        try:
            answer = await answer_frame(self._backends, command, frame, identity, self._client_address)
            self._bytes.add(len(answer))
            await self._send(answer)
        finally:
            self._bytes.give(size + len(answer))
            self.under_way.end()

    async def refuse(self, command: BaseCommand, identity: ClientIdentity) -> None:
        """Answer a command that only a broker serves, in the form that its sender can match."""
        name = command_name(command.type)
        self._metrics.refused_commands.labels(reason="not_served").inc()
        get_logger().info(
            "refused a command that needs a broker", client=self._client_address, principal=identity.role, command=name
        )
        text = f"{name} needs a connection to a broker; this one only serves lookups"
        await self._send(commands.refusal(command, ServerError.NotAllowedError, text))


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
