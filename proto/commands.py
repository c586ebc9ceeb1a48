"""Pulsar commands: a parser, and encoders of the few commands that a proxy sends itself.

Every encoder returns a whole frame, ready for the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.message import DecodeError

from proto.errors import RemoteProtocolError
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError

NO_REQUEST_ID = (1 << 64) - 1
"""The request id of an error that answers a connection rather than a request."""

PROTOCOL_VERSION = 21
"""The newest protocol version of Pulsar that this proxy was written against."""

PROTOCOL_VERSION_MIN = 10
"""The oldest protocol version that can be served through a proxy; Pulsar's own proxy refuses older ones too."""

AUTH_REFRESH = b"PulsarAuthRefresh"
"""Data of a challenge that asks for fresh credentials and so starts a new exchange (PIP-55)."""

_PONG = encode_frame(BaseCommand(type=BaseCommand.PONG, pong={}).SerializeToString())
_PING = encode_frame(BaseCommand(type=BaseCommand.PING, ping={}).SerializeToString())

_REQUEST_FIELDS: Mapping[int, str] = MappingProxyType(
    {
        BaseCommand.SUBSCRIBE: "subscribe",
        BaseCommand.PRODUCER: "producer",
        BaseCommand.ACK: "ack",
        BaseCommand.UNSUBSCRIBE: "unsubscribe",
        BaseCommand.CLOSE_PRODUCER: "close_producer",
        BaseCommand.CLOSE_CONSUMER: "close_consumer",
        BaseCommand.CONSUMER_STATS: "consumer_stats",
        BaseCommand.SEEK: "seek",
        BaseCommand.GET_LAST_MESSAGE_ID: "get_last_message_id",
        BaseCommand.GET_OR_CREATE_SCHEMA: "get_or_create_schema",
        BaseCommand.NEW_TXN: "new_txn",
        BaseCommand.ADD_PARTITION_TO_TXN: "add_partition_to_txn",
        BaseCommand.ADD_SUBSCRIPTION_TO_TXN: "add_subscription_to_txn",
        BaseCommand.END_TXN: "end_txn",
        BaseCommand.END_TXN_ON_PARTITION: "end_txn_on_partition",
        BaseCommand.END_TXN_ON_SUBSCRIPTION: "end_txn_on_subscription",
        BaseCommand.TC_CLIENT_CONNECT_REQUEST: "tc_client_connect_request",
        BaseCommand.WATCH_TOPIC_LIST: "watch_topic_list",
        BaseCommand.WATCH_TOPIC_LIST_CLOSE: "watch_topic_list_close",
    }
)


@dataclass(frozen=True, slots=True)
class _TypedRefusal:
    """Where a request has the id that its client waits for, and which response with that id reports a failure."""

    request_field: str
    id_field: str
    response_type: BaseCommand.Type
    response_field: str


_TYPED_REFUSALS: Mapping[int, _TypedRefusal] = MappingProxyType(
    {
        BaseCommand.SCALABLE_TOPIC_LOOKUP: _TypedRefusal(
            "scalable_topic_lookup", "session_id", BaseCommand.SCALABLE_TOPIC_UPDATE, "scalable_topic_update"
        ),
        BaseCommand.SCALABLE_TOPIC_SUBSCRIBE: _TypedRefusal(
            "scalable_topic_subscribe",
            "request_id",
            BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
            "scalable_topic_subscribe_response",
        ),
        BaseCommand.WATCH_SCALABLE_TOPICS: _TypedRefusal(
            "watch_scalable_topics",
            "watch_id",
            BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE,
            "watch_scalable_topics_update",
        ),
        BaseCommand.WATCH_TC_ASSIGNMENTS: _TypedRefusal(
            "watch_tc_assignments", "watch_id", BaseCommand.WATCH_TC_ASSIGNMENTS_UPDATE, "watch_tc_assignments_update"
        ),
    }
)
"""Requests of Pulsar 5 whose ids are no request ids to a client: a CommandError would answer none of them."""


class CommandCorrupt(RemoteProtocolError):
    """Bytes that are not a BaseCommand, or a command without the message that its type requires."""


def parse_command(data: bytes) -> BaseCommand:
    """Parse a serialized BaseCommand; raises CommandCorrupt."""
    try:
        return BaseCommand.FromString(data)
    except DecodeError:
        raise CommandCorrupt("bytes that are not a Pulsar command") from None


def command_name(command_type: int) -> str:
    """Return a command type's name for logs and error texts, also of one newer than this proxy."""
    try:
        return BaseCommand.Type.Name(command_type)
    except ValueError:
        return f"command type {command_type}"


def error_name(error: int) -> str:
    """Return a ServerError's name for logs and labels; "other" for unknown numbers, which bounds the labels."""
    try:
        return ServerError.Name(error)
    except ValueError:
        return "other"


def ping() -> bytes:
    """Return a PING frame."""
    return _PING


def pong() -> bytes:
    """Return a PONG frame."""
    return _PONG


def error(request_id: int, code: int, message: str) -> bytes:
    """Encode a CommandError. ``request_id`` is ``NO_REQUEST_ID`` where it ends the connection."""
    return encode(
        BaseCommand(
            type=BaseCommand.ERROR,
            error={"request_id": request_id, "error": code, "message": message},
        )
    )


def refusal(command: BaseCommand, code: int, message: str) -> bytes:
    """Encode the error for a command that is not served, in the form that its sender can match to the command."""
    if command.type == BaseCommand.SEND:
        return encode(
            BaseCommand(
                type=BaseCommand.SEND_ERROR,
                send_error={
                    "producer_id": command.send.producer_id,
                    "sequence_id": command.send.sequence_id,
                    "error": code,
                    "message": message,
                },
            )
        )
    typed = _TYPED_REFUSALS.get(command.type)
    body = getattr(command, typed.request_field) if typed is not None else None
    if typed is None or body is None or not body.HasField(typed.id_field):
        return error(request_id_of(command), code, message)
    answer = {typed.id_field: getattr(body, typed.id_field), "error": code, "message": message}
    return encode(BaseCommand(type=typed.response_type, **{typed.response_field: answer}))


def request_id_of(command: BaseCommand) -> int:
    """Return the request id of a command that only brokers serve, or NO_REQUEST_ID if it has none."""
    field = _REQUEST_FIELDS.get(command.type)
    if field is None or not command.HasField(field):
        return NO_REQUEST_ID
    body = getattr(command, field)
    return int(body.request_id) if body.HasField("request_id") else NO_REQUEST_ID


def connect(message: CommandConnect) -> bytes:
    """Encode a CONNECT frame."""
    return encode(BaseCommand(type=BaseCommand.CONNECT, connect=message))


def connected(message: CommandConnected) -> bytes:
    """Encode a CONNECTED frame."""
    return encode(BaseCommand(type=BaseCommand.CONNECTED, connected=message))


def auth_challenge(server_version: str, protocol_version: int, method: str, data: bytes) -> bytes:
    """Encode an AUTH_CHALLENGE frame (PIP-30, step 2)."""
    return encode(
        BaseCommand(
            type=BaseCommand.AUTH_CHALLENGE,
            auth_challenge={
                "server_version": server_version,
                "protocol_version": protocol_version,
                "challenge": {"auth_method_name": method, "auth_data": data},
            },
        )
    )


def auth_response(client_version: str, protocol_version: int, method: str, data: bytes) -> bytes:
    """Encode an AUTH_RESPONSE frame (PIP-30, step 3)."""
    return encode(
        BaseCommand(
            type=BaseCommand.AUTH_RESPONSE,
            auth_response={
                "client_version": client_version,
                "protocol_version": protocol_version,
                "response": {"auth_method_name": method, "auth_data": data},
            },
        )
    )


def auth_method_of(message: CommandConnect) -> str:
    """Return the authentication method of a CONNECT from either of its two fields; "none" if neither names one."""
    if message.auth_method_name:
        return str(message.auth_method_name)
    if message.auth_method == 1:
        return "ycav1"
    if message.auth_method == 2:  # noqa: PLR2004 -- AuthMethodAthens
        return "athens"
    return "none"


def encode(command: BaseCommand) -> bytes:
    """Encode any command as a frame without payload."""
    return encode_frame(command.SerializeToString())
