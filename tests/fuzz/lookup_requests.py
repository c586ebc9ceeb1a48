"""proto.lookup_requests: what reaches a broker is the client's request as protobuf reads it, without an identity, and a
broker reads it; requests that came before change nothing.
"""

from __future__ import annotations

from proto.commands import CommandCorrupt
from proto.frames import FrameDecoder
from proto.lookup_kinds import KINDS, failure_answer
from proto.lookup_requests import PROXY_ID_MIN, LookupRequest, RequestParser
from proto.pulsar_pb2 import BaseCommand
from proto.request_rules import RequestRefused
from proto.varints import varint
from tests.proto import pulsar_parser
from tests.pulsar_bytes import command, decoded, field, fields

LOOKUP, METADATA, TOPICS, SCHEMA = 23, 21, 32, 34
TOPIC = (1, "persistent://t/n/topic")
PROXY_ID = PROXY_ID_MIN + 4711

SEEDS = (
    command(LOOKUP, fields(TOPIC, (2, 7), (3, 0))),
    command(LOOKUP, fields(TOPIC, (2, 300), (7, "inside"), (8, fields((1, "k"), (2, "v"))))),
    command(LOOKUP, fields(TOPIC, (2, 7), (4, "admin"), (5, "data"), (6, "token"))),
    command(LOOKUP, fields(TOPIC, (2, 7), (3, 0), (31, "new"))),
    command(METADATA, fields(TOPIC, (2, 2**63), (6, 0))),
    command(TOPICS, fields((1, 7), (2, "tenant/namespace"), (4, ".*"))),
    command(SCHEMA, fields((1, 7), (2, "topic"), (3, b"12345678"))),
    command(LOOKUP, fields((2, 7), TOPIC)) + field(200, "x"),
    command(LOOKUP, fields(TOPIC, (2, 7))) + field(LOOKUP, fields((4, "admin"))),
)

_used = RequestParser()


def check(data: bytes) -> None:
    expected = _parse(RequestParser(), data)
    for _ in range(2):
        _check_equal(_parse(_used, data), expected)
    if isinstance(expected, str):
        return
    request, request_id = expected
    plain = BaseCommand.FromString(data)
    kind = KINDS[plain.type]
    body = getattr(plain, kind.request_field)
    assert request.kind is kind
    assert request_id == varint(body.request_id)
    for name in ("request_id", *pulsar_parser.IDENTITY):
        if name in body.DESCRIPTOR.fields_by_name:
            body.ClearField(name)
    body.request_id = PROXY_ID
    sent = _sent(request)
    assert BaseCommand.FromString(sent).SerializeToString(deterministic=True) == plain.SerializeToString(
        deterministic=True
    )
    number, message = pulsar_parser.read(sent)
    assert number == plain.type
    assert message["request_id"] == PROXY_ID
    assert not message.keys() & set(pulsar_parser.IDENTITY)


def _check_equal(found: tuple[LookupRequest, bytes] | str, expected: tuple[LookupRequest, bytes] | str) -> None:
    """A request that is cut by hand has its id in the client's encoding, which may be longer than need be."""
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert found[0] == expected[0]
    assert decoded(field(1, 0)[:1] + found[1]) == decoded(field(1, 0)[:1] + expected[1])


def _parse(parser: RequestParser, data: bytes) -> tuple[LookupRequest, bytes] | str:
    try:
        return parser.parse_request(data)
    except RequestRefused as refused:
        failure_answer(refused.kind, refused.request_id, refused.code, str(refused)).SerializeToString()
        return f"{refused!r}, {refused.reason}"
    except (CommandCorrupt, KeyError) as error:
        return repr(error)


def _sent(request: LookupRequest) -> bytes:
    """The command of the one frame that goes out."""
    decoder = FrameDecoder(max_frame_bytes=1 << 30)
    decoder.receive_data(request.frame_with_id(varint(PROXY_ID)))
    frame = decoder.next_frame()
    assert frame is not None
    assert decoder.is_empty
    assert not frame.payload
    return frame.command
