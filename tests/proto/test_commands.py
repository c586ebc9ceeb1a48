"""Commands: what the proxy writes itself, byte for byte, and which request a refusal answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pulsar_bytes import command, decoded_frame, field, fields, frame

from proto import commands
from proto.commands import CommandCorrupt, parse_command
from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError

NONE = 2**64 - 1

# Type → the field of its message that holds the request id, in Pulsar 5.0.0-M1. All the others but those of
# TYPED_REFUSALS have none that the proxy should answer to: they are answers themselves, or begin no request.
REQUEST_ID_FIELDS = {
    4: 5,  # SUBSCRIBE
    5: 3,  # PRODUCER
    10: 8,  # ACK
    12: 2,  # UNSUBSCRIBE
    15: 2,  # CLOSE_PRODUCER
    16: 2,  # CLOSE_CONSUMER
    25: 1,  # CONSUMER_STATS
    28: 2,  # SEEK
    29: 2,  # GET_LAST_MESSAGE_ID
    39: 1,  # GET_OR_CREATE_SCHEMA
    50: 1,  # NEW_TXN
    52: 1,  # ADD_PARTITION_TO_TXN
    54: 1,  # ADD_SUBSCRIPTION_TO_TXN
    56: 1,  # END_TXN
    58: 1,  # END_TXN_ON_PARTITION
    60: 1,  # END_TXN_ON_SUBSCRIPTION
    62: 1,  # TC_CLIENT_CONNECT_REQUEST
    64: 1,  # WATCH_TOPIC_LIST
    67: 1,  # WATCH_TOPIC_LIST_CLOSE
}
# Requests whose clients wait for their own id in a response of its own type, as brokers answer them (javap on Pulsar
# 5.0.0-M1: ClientCnx looks its sessions and watches up by these ids, and brokers' errors come by newScalableTopicError,
# sendScalableTopicSubscribeError, newWatchScalableTopicsError and newWatchTcAssignmentsError). The id is field 1 of
# each. Type → the response's type, and the fields of its error and message.
TYPED_REFUSALS = {
    70: (71, 3, 4),  # SCALABLE_TOPIC_LOOKUP, SCALABLE_TOPIC_UPDATE
    73: (74, 2, 3),  # SCALABLE_TOPIC_SUBSCRIBE and its response
    76: (77, 4, 5),  # WATCH_SCALABLE_TOPICS and their update
    79: (80, 3, 4),  # WATCH_TC_ASSIGNMENTS and their update
}
PULSARS_TYPES = [*range(2, 41), *range(50, 69), *range(70, 82)]
SEND = 6

NUMBERED = fields(*((number, 9000 + number) for number in range(1, 12)))
"""A message in which every field tells its own number."""


def refusal_of(data: bytes) -> tuple[int, dict[int, int | bytes]]:
    return decoded_frame(commands.refusal(parse_command(data), 22, "not here"))


@pytest.mark.parametrize("kind", sorted({*PULSARS_TYPES, 1, 41, 69, 82, 5000} - {SEND, *TYPED_REFUSALS}))
def test_the_refusal_of_every_command_answers_its_request(kind: int) -> None:
    request_id = 9000 + REQUEST_ID_FIELDS[kind] if kind in REQUEST_ID_FIELDS else NONE
    assert refusal_of(command(kind, NUMBERED)) == (14, {1: request_id, 2: 22, 3: b"not here"})


@pytest.mark.parametrize("kind", TYPED_REFUSALS)
@pytest.mark.parametrize("own_id", [0, 1, 2**63, 2**64 - 1])
def test_the_refusal_of_a_stream_of_updates_answers_its_own_id(kind: int, own_id: int) -> None:
    response, error, message = TYPED_REFUSALS[kind]
    asked = command(kind, fields((1, own_id), (2, "topic://public/default/t"), (99, "newer")))
    assert refusal_of(asked) == (response, {1: own_id, error: 22, message: b"not here"})


@pytest.mark.parametrize("kind", [*REQUEST_ID_FIELDS, *TYPED_REFUSALS])
@pytest.mark.parametrize("body", [None, b"", fields((15, 1))], ids=["no message", "empty", "no request id"])
def test_the_refusal_of_a_request_without_an_id(kind: int, body: bytes | None) -> None:
    assert refusal_of(command(kind, body)) == (14, {1: NONE, 2: 22, 3: b"not here"})


@pytest.mark.parametrize("kind", REQUEST_ID_FIELDS)
@pytest.mark.parametrize("request_id", [0, 1, 2**63, 2**64 - 2])
def test_request_ids_at_their_bounds(kind: int, request_id: int) -> None:
    body = fields((REQUEST_ID_FIELDS[kind], request_id))
    assert commands.request_id_of(parse_command(command(kind, body))) == request_id


def test_the_refusal_of_a_message_is_a_send_error() -> None:
    sent = command(SEND, fields((1, 7), (2, 2**64 - 1), (3, 10)))
    assert refusal_of(sent) == (8, {1: 7, 2: 2**64 - 1, 3: 22, 4: b"not here"})


def test_the_refusal_of_something_without_a_type() -> None:
    assert refusal_of(b"") == (14, {1: NONE, 2: 22, 3: b"not here"})


@pytest.mark.conforms("pip-30.25")
def test_every_type_of_the_schema_is_pulsars() -> None:
    assert sorted(BaseCommand.Type.values()) == [0, *PULSARS_TYPES]


def test_a_message_stands_under_the_number_of_its_type() -> None:
    assert {entry.number for entry in BaseCommand.DESCRIPTOR.fields} <= {1, *PULSARS_TYPES}


# ---- parsing


def test_parsing_keeps_what_the_schema_does_not_know() -> None:
    data = command(23, fields((1, "topic"), (2, 7), (99, "new"))) + field(200, "newer")
    assert parse_command(data).SerializeToString() == data


def test_parsing_keeps_the_number_of_a_command_that_is_newer() -> None:
    assert parse_command(field(1, 4711)).type == 4711


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\x0a", b"\x12\x7f\x00", command(23, fields((1, b"\xff\xfe"))), b"\x08" + b"\xff" * 11],
    ids=["tag", "no length", "length beyond", "no utf-8", "endless varint"],
)
def test_bytes_that_are_no_command(data: bytes) -> None:
    with pytest.raises(CommandCorrupt, match=r"^bytes that are not a Pulsar command$") as caught:
        parse_command(data)
    assert caught.value.__cause__ is None


@given(st.binary(max_size=80))
def test_parsing_fails_only_as_a_protocol_error(data: bytes) -> None:
    try:
        parsed = parse_command(data)
    except RemoteProtocolError:
        return
    assert commands.command_name(parsed.type)
    assert commands.refusal(parsed, 22, "x")


# ---- writing


def test_ping_and_pong() -> None:
    assert commands.ping() == frame(command(18))
    assert commands.pong() == frame(command(19))


def test_an_error_that_ends_the_connection() -> None:
    data = commands.error(commands.NO_REQUEST_ID, 3, "Failed to authenticate")
    assert decoded_frame(data) == (14, {1: NONE, 2: 3, 3: b"Failed to authenticate"})


def test_an_error_with_a_code_of_zero_still_says_it() -> None:
    # the three fields are required in Pulsar's own schema
    assert decoded_frame(commands.error(0, 0, "")) == (14, {1: 0, 2: 0, 3: b""})


def test_an_error_with_a_code_that_is_newer_than_the_proxy() -> None:
    assert decoded_frame(commands.error(1, 4711, "new"))[1][2] == 4711


def test_connect_and_connected() -> None:
    assert decoded_frame(commands.connect(CommandConnect(client_version="c", protocol_version=21))) == (
        2,
        {1: b"c", 4: 21},
    )
    assert decoded_frame(commands.connected(CommandConnected(server_version="s"))) == (3, {1: b"s"})


@pytest.mark.conforms("pip-30.5", "pip-30.6", "pip-30.7")
def test_a_challenge_and_its_answer() -> None:
    data = fields((1, "sasl"), (2, b"\x00\xff"))
    assert decoded_frame(commands.auth_challenge("s", 21, "sasl", b"\x00\xff")) == (36, {1: b"s", 2: data, 3: 21})
    assert decoded_frame(commands.auth_response("c", 19, "sasl", b"\x00\xff")) == (37, {1: b"c", 2: data, 3: 19})


@pytest.mark.conforms("pip-30.5", "pip-30.6")
def test_a_challenge_without_a_version_is_of_version_0() -> None:
    """PIP-30: ``protocol_version = 3 [default = 0]``."""
    body = fields((2, fields((1, "sasl"), (2, b"data"))))
    asked, answered = parse_command(command(36, body)).auth_challenge, parse_command(command(37, body)).auth_response
    assert (asked.protocol_version, asked.challenge.auth_data) == (0, b"data")
    assert (answered.protocol_version, answered.response.auth_data) == (0, b"data")


@pytest.mark.conforms("pip-1.29", "pip-30.4")
def test_the_fields_of_connect_that_say_who_it_is() -> None:
    """PIP-30 for 3 and 5, PIP-1 for 7."""
    connect = parse_command(command(2, fields((3, b"data"), (5, "token"), (7, "alice")))).connect
    assert (connect.auth_data, connect.auth_method_name, connect.original_principal) == (b"data", "token", "alice")


@pytest.mark.conforms("pip-1.34")
def test_the_field_that_sends_a_client_to_the_proxy() -> None:
    """PIP-1: ``proxy_through_service_url = 8 [default = false]``."""
    answer = BaseCommand(type=BaseCommand.LOOKUP_RESPONSE, lookup_topic_response={"proxy_through_service_url": True})
    assert decoded_frame(commands.encode(answer)) == (24, {8: 1})
    assert not parse_command(command(24, b"")).lookup_topic_response.proxy_through_service_url


def test_any_command_as_a_frame() -> None:
    data = command(23, fields((1, "topic"), (2, 7)))
    assert commands.encode(parse_command(data)) == frame(data)


# ---- names


@pytest.mark.parametrize(
    ("written", "method"),
    [
        ({}, "none"),
        ({2: 0}, "none"),
        ({2: 1}, "ycav1"),
        ({2: 2}, "athens"),
        ({2: 3}, "none"),
        ({2: 2**31 - 1}, "none"),
        ({5: "token"}, "token"),
        ({5: "token", 2: 2}, "token"),
        ({5: "", 2: 2}, "athens"),
        ({5: "none"}, "none"),
    ],
)
def test_the_method_of_new_and_old_clients(written: dict[int, int | str], method: str) -> None:
    connect = CommandConnect.FromString(fields(*written.items()))
    assert commands.auth_method_of(connect) == method


def test_names_of_commands() -> None:
    assert commands.command_name(23) == "LOOKUP"
    assert commands.command_name(0) == "UNKNOWN"
    assert commands.command_name(4711) == "command type 4711"
    assert commands.command_name(-1) == "command type -1"


def test_names_of_errors_are_bounded() -> None:
    assert commands.error_name(6) == "ServiceNotReady"
    assert {commands.error_name(number) for number in range(26)} == set(ServerError.keys())
    assert {commands.error_name(number) for number in (26, 4711, -1, 2**31 - 1)} == {"other"}
