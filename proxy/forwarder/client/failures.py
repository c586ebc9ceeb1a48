"""Why a client's connection ends with an error: what its client is sent, and what is logged."""

from dataclasses import dataclass

from proto.client_machine import Event, State
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.errors import RemoteProtocolError
from proto.frames import FrameTooLarge
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import Status
from proxy.forwarder.client.lookup_failures import CONNECT_AGAIN
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.reauthentication import DISCONNECTED
from proxy.forwarder.listen.admission import Refusal
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError

RELAY_NOT_STARTED = "The proxy cannot relay at the moment"
"""What a client is sent where its relay could not start."""

TARGET_REFUSED = "Target broker cannot be validated."
"""What a client is sent for a denied target: the same words as the Java proxy's, and no more."""

CANNOT_CHECK = "The proxy cannot check the target broker at the moment"

BrokerError = TargetRefused | BrokerLinkFailed | RpcError
"""Why the broker's side of a relay was not opened."""


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """Why a connection ends with an error.

    ``event``: the event of proto.client_machine that ends it. ``code`` and ``message`` are for the client, sent
    ``delay_s`` after the end; ``detail`` is for the log (empty: the message).
    """

    event: Event
    cause: DisconnectCause
    code: int
    message: str
    detail: str = ""
    delay_s: float = 0.0


def corrupt_failure(error: RemoteProtocolError) -> ConnectionFailure:
    """Return the failure of a client that has sent what cannot be read."""
    too_large = isinstance(error, FrameTooLarge)
    cause = DisconnectCause.FRAME_TOO_LARGE if too_large else DisconnectCause.PROTOCOL_ERROR
    text = f"{'Too large' if too_large else 'Not Pulsar'}: {error}"
    return ConnectionFailure(Event.CLIENT_CORRUPT, cause, ServerError.NotAllowedError, text)


def no_memory_failure() -> ConnectionFailure:
    """Return the failure of a client for whose unfinished frame there is no memory."""
    text = "The proxy has no memory for a frame of this size now"
    detail = f"{text} (limits.max_lookup_bytes)"
    code = ServerError.ServiceNotReady
    return ConnectionFailure(Event.CLIENT_CORRUPT, DisconnectCause.NO_MEMORY, code, text, detail)


def denied_failure(detail: str) -> ConnectionFailure:
    """Return the failure of a client whose credentials the deny list names; ``detail``: for the log."""
    cause, code = DisconnectCause.DENIED, ServerError.AuthenticationError
    return ConnectionFailure(Event.DENIED, cause, code, AUTHENTICATION_FAILED, detail)


def disconnected_failure() -> ConnectionFailure:
    """Return the failure of a client whose connection an operator ends."""
    cause, code = DisconnectCause.DISCONNECTED, ServerError.ServiceNotReady
    return ConnectionFailure(Event.DENIED, cause, code, DISCONNECTED)


def limit_text(limit: str) -> str:
    """Return the client's error for a limit that is reached, by the name that the limit has in the configuration."""
    return f"The proxy has reached its limit ({limit})"


def max_connections_failure() -> ConnectionFailure:
    """Return the failure of a client for which there is no room, now that its owner is known."""
    cause, code = DisconnectCause.MAX_CONNECTIONS, ServerError.NotAllowedError
    return ConnectionFailure(Event.DENIED, cause, code, limit_text(Refusal.MAX_CONNECTIONS))


def refusal_failure(limit: str) -> ConnectionFailure:
    """Return the failure of a client for the limit that ``PreAuthConnection.take_place`` has named."""
    if limit == Refusal.MAX_CONNECTIONS:
        return max_connections_failure()
    cause, code = DisconnectCause.QUOTA, ServerError.ServiceNotReady
    return ConnectionFailure(Event.DENIED, cause, code, limit_text(limit))


def envelope_unsupported_failure() -> ConnectionFailure:
    """Return the failure of a client whose Envelopes have a version that the lookup worker does not know."""
    cause, code = DisconnectCause.ENVELOPE_UNSUPPORTED, ServerError.ServiceNotReady
    return ConnectionFailure(Event.ENVELOPE_UNSUPPORTED, cause, code, CONNECT_AGAIN)


def handshake_timeout_failure(timeout_ms: int, state: State) -> ConnectionFailure:
    """Return the failure of a client that has not finished its handshake; ``state``: where it stopped."""
    return ConnectionFailure(
        Event.HANDSHAKE_TIMEOUT,
        DisconnectCause.HANDSHAKE_TIMEOUT,
        ServerError.ServiceNotReady,
        "The handshake took too long",
        f"the handshake was not finished within {timeout_ms} ms ({state.value})",
    )


def relay_start_failure(error: Exception) -> ConnectionFailure:
    """Return the failure of a client for which no relay could start. It may come again, to any forwarder."""
    cause, code = DisconnectCause.RELAY_NOT_BEGUN, ServerError.ServiceNotReady
    return ConnectionFailure(Event.RELAY_START_FAILED, cause, code, RELAY_NOT_STARTED, str(error))


def broker_failure(error: BrokerError) -> tuple[ConnectionFailure, str]:
    """Return the failure of a client for which no broker's side could be opened, and the reason as a metric's label."""
    cause, code = DisconnectCause.LOOKUP_UNAVAILABLE, int(ServerError.ServiceNotReady)
    reason, message, detail = "lookup_worker", CANNOT_CHECK, f"no answer from the lookup worker: {error}"
    match error:
        case TargetRefused():
            cause = DisconnectCause.TARGET_DENIED
            reason, message, detail = error.reason, TARGET_REFUSED, str(error)
        case BrokerLinkFailed():
            cause, code = DisconnectCause.BROKER_FAILED, error.code
            reason, message, detail = error.reason, error.message, str(error)
        case RpcCallRefused(status=Status.PRINCIPAL_DESERIALIZATION_FAILURE):
            cause, code = DisconnectCause.AUTHENTICATION_FAILED, int(ServerError.AuthenticationError)
            reason, message, detail = "bad_principal", AUTHENTICATION_FAILED, str(error)
    return ConnectionFailure(Event.BROKER_FAILED, cause, code, message, detail), reason
