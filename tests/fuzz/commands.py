"""proto.commands and proto.command_heads: no parser finds another type than the head's, and any command is refused in
one frame.
"""

from __future__ import annotations

from proto import commands
from proto.command_heads import INCOMPLETE, CommandHeadInvalid, check_type_is_first, command_type_of
from proto.commands import CommandCorrupt, command_name, parse_command, refusal, request_id_of
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, ServerError
from tests.proto.light_proto import VALUES_OF_BROKERS, LightProto
from tests.pulsar_bytes import command, fields

TEXT = "refused"
REFUSALS = frozenset(
    {
        BaseCommand.ERROR,
        BaseCommand.SEND_ERROR,
        BaseCommand.SCALABLE_TOPIC_UPDATE,
        BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
        BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE,
        BaseCommand.WATCH_TC_ASSIGNMENTS_UPDATE,
    }
)

SEEDS = (
    commands.ping()[8:],
    commands.auth_response("client", 21, "token", b"data")[8:],
    *(command(kind, fields((1, 7), (2, 8))) for kind in sorted(VALUES_OF_BROKERS[0])),
    b"\x08\x12\x92\x01\x00\x08\x06",
    b"\x88\x00\x06\x32\x04\x08\x01\x10\x05",
)


def check(data: bytes) -> None:
    head = _head_type(data)
    if head is not None:
        for values in VALUES_OF_BROKERS:
            assert LightProto(data, values).command_type(len(data)) in {head, None}
    try:
        parsed = parse_command(data)
    except CommandCorrupt:
        return
    assert head in {parsed.type, None}
    written = parsed.SerializePartialToString()
    assert parse_command(written).SerializePartialToString() == written
    assert command_name(parsed.type)
    _check_first(parsed, data)
    _check_refusal(parsed)


def _head_type(data: bytes) -> int | None:
    """The type by the first bytes, of however many there are; None where they are no head."""
    found = set()
    for there in range(len(data) + 1):
        try:
            found.add(command_type_of(data[:there], len(data)))
        except CommandHeadInvalid:
            assert found <= {INCOMPLETE}, "known once, it stays"
            return None
    found.discard(INCOMPLETE)
    assert len(found) <= 1
    return found.pop() if found else None


def _check_first(parsed: BaseCommand, data: bytes) -> None:
    try:
        check_type_is_first(parsed, data)
    except CommandHeadInvalid:
        return
    assert data[:2] == bytes((8, parsed.type))


def _check_refusal(parsed: BaseCommand) -> None:
    decoder = FrameDecoder(max_frame_bytes=1000)
    decoder.receive_data(refusal(parsed, ServerError.NotAllowedError, TEXT))
    frame = decoder.next_frame()
    assert frame is not None
    assert decoder.is_empty
    answer = parse_command(frame.command)
    assert answer.type in REFUSALS
    assert answer.type != BaseCommand.ERROR or answer.error.request_id == request_id_of(parsed)
