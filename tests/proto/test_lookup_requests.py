"""proto.lookup_requests: what is cut by hand is just what protobuf would have made of it, whatever a client writes."""

from __future__ import annotations

import struct
from itertools import islice

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from pulsar_bytes import command, decoded, field, fields, varint

from proto.commands import CommandCorrupt
from proto.lookup_kinds import KINDS
from proto.lookup_requests import (
    PROXY_ID_MAX,
    PROXY_ID_MIN,
    TRAILERS_MAX,
    LookupRequest,
    RequestParser,
    encode_proxy_id,
    proxy_request_ids,
)
from proto.pulsar_pb2 import BaseCommand
from proto.request_rules import RequestRefused

LOOKUP, METADATA, TOPICS, SCHEMA = 23, 21, 32, 34
FIELDS = {
    LOOKUP: "lookup_topic",
    METADATA: "partition_metadata",
    TOPICS: "get_topics_of_namespace",
    SCHEMA: "get_schema",
}
ID_FIELD = {LOOKUP: 2, METADATA: 2, TOPICS: 1, SCHEMA: 1}
IDENTITY = {LOOKUP: (4, 5, 6), METADATA: (3, 4, 5), TOPICS: (), SCHEMA: ()}
IDENTITY_NAMES = ("original_principal", "original_auth_data", "original_auth_method")
OURS = varint(PROXY_ID_MIN + 4711)
PARSER = RequestParser()
parse_request = PARSER.parse_request
TOPIC = (1, "persistent://t/n/topic")


def subject(kind: int, size: int = 1) -> str:
    """What a request is about, in so many characters."""
    return "n/" + "x" * (size - 2) if kind == TOPICS else "x" * size


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Each test begins with no trailer that came before."""
    for _, _, trailers in PARSER._fast_paths.values():
        trailers.clear()


def as_protobuf_sees_it(data: bytes) -> BaseCommand:
    """What a broker may get of a request, by protobuf alone: without identities, under our id."""
    message = BaseCommand.FromString(data)
    body = getattr(message, FIELDS[message.type])
    body.request_id = PROXY_ID_MIN + 4711
    for name in IDENTITY_NAMES:
        if name in body.DESCRIPTOR.fields_by_name:
            body.ClearField(name)
    return message


def to_broker(request: LookupRequest) -> bytes:
    """The command in the one frame that goes out."""
    frame = request.frame_with_id(OURS)
    total, size = struct.unpack(">II", frame[:8])
    assert (total, size) == (len(frame) - 4, len(frame) - 8)
    return frame[8:]


def check(data: bytes) -> tuple[LookupRequest, bytes]:
    """A request, first and again, is what protobuf says it is."""
    first, again = parse_request(data), parse_request(data)
    assert first[0] == again[0]
    for request, request_id in (first, again):
        sent = BaseCommand.FromString(to_broker(request))
        assert sent.SerializeToString() == as_protobuf_sees_it(data).SerializeToString()
        plain = BaseCommand.FromString(data)
        expected = getattr(plain, FIELDS[plain.type]).request_id
        assert decoded(b"\x08" + request_id) == [(1, expected)]
        assert request.kind is KINDS[plain.type]
    return again


# ---- as real clients write them


JAVA = [
    ("Java, C++, Python", LOOKUP, fields(TOPIC, (2, 7), (3, 0))),
    ("Java, authoritative", LOOKUP, fields(TOPIC, (2, 2**32), (3, 1))),
    ("Go", LOOKUP, fields(TOPIC, (2, 300))),
    ("a listener", LOOKUP, fields(TOPIC, (2, 7), (3, 0), (7, "inside"))),
    (
        "properties",
        LOOKUP,
        fields(TOPIC, (2, 7), (3, 0), (8, fields((1, "k"), (2, "v"))), (8, fields((1, "l"), (2, "")))),
    ),
    ("metadata", METADATA, fields(TOPIC, (2, 7))),
    ("metadata, no creation", METADATA, fields(TOPIC, (2, 7), (6, 0))),
    ("a field that is newer than this proxy", LOOKUP, fields(TOPIC, (2, 7), (3, 0), (31, "new"))),
]


@pytest.mark.parametrize(("kind", "body"), [one[1:] for one in JAVA], ids=[one[0] for one in JAVA])
def test_a_request_as_clients_encode_it_is_parsed_only_once(
    kind: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(command(kind, body))
    other = command(kind, body.replace(b"topic", b"other"))
    expected = as_protobuf_sees_it(other).SerializeToString()

    def never(_data: bytes) -> BaseCommand:
        pytest.fail("parsed again")

    monkeypatch.setattr("proto.lookup_requests.parse_command", never)
    request, _ = parse_request(other)
    assert BaseCommand.FromString(to_broker(request)).SerializeToString() == expected


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("request_id", [0, 1, 127, 128, 2**32, 2**63, 2**64 - 1])
def test_ids_of_every_size(kind: int, request_id: int) -> None:
    body = sorted([(ID_FIELD[kind], request_id), (3 - ID_FIELD[kind], subject(kind, 3))])
    _, found = check(command(kind, fields(*body)))
    assert found == varint(request_id)


@pytest.mark.parametrize(
    "size", [0, 1, 90, 115, 116, 117, 118, 119, 120, 126, 127, 128, 200, 251, 252, 253, 254, 20_000]
)
@pytest.mark.parametrize("kind", FIELDS)
def test_topics_of_every_size(kind: int, size: int) -> None:
    if kind == TOPICS and size < len("t/n"):
        return  # no namespace is that short
    body = sorted([(ID_FIELD[kind], 7), (3 - ID_FIELD[kind], subject(kind, size))])
    check(command(kind, fields(*body)))


def test_a_topic_that_is_not_ascii() -> None:
    request, _ = check(command(LOOKUP, fields((1, "persistent://t/n/tüpic"), (2, 7))))
    assert request.to_command().lookup_topic.topic == "persistent://t/n/tüpic"


def test_a_topic_that_is_not_utf8_is_what_protobuf_says_of_it() -> None:
    """Twice, after other requests were taken: nothing that was kept makes it another thing."""
    check(command(LOOKUP, fields(TOPIC, (2, 7))))
    data = command(LOOKUP, fields((1, b"t\xff"), (2, 7)))
    for _ in range(2):
        try:
            BaseCommand.FromString(data)
        except DecodeError:
            with pytest.raises(CommandCorrupt):
                parse_request(data)
        else:
            check(data)


@pytest.mark.parametrize("kind", FIELDS)
def test_the_message_of_a_request_is_whole_again(kind: int) -> None:
    body = sorted([(ID_FIELD[kind], 7), (3 - ID_FIELD[kind], subject(kind, 3)), (20, "new")])
    data = command(kind, fields(*body)) + field(200, "x")
    request, _ = parse_request(data)
    expected = BaseCommand.FromString(data)
    getattr(expected, FIELDS[kind]).request_id = 0
    assert request.to_command().SerializeToString() == expected.SerializeToString()


def test_equal_requests_are_equal_in_any_encoding() -> None:
    plain, _ = parse_request(command(LOOKUP, fields(TOPIC, (2, 7), (3, 0))))
    for body in (
        fields((3, 0), (2, 8), TOPIC),
        fields(TOPIC, (2, 9), (3, 0), (4, "admin")),
        fields((1, "another"), TOPIC, (3, 1), (3, 0), (2, 1), (2, 2)),
    ):
        assert parse_request(command(LOOKUP, body))[0] == plain
    assert parse_request(command(LOOKUP, fields(TOPIC, (2, 7), (3, 1))))[0] != plain
    assert parse_request(command(LOOKUP, fields(TOPIC, (2, 7))))[0] != plain
    assert parse_request(command(METADATA, fields(TOPIC, (2, 7), (3, 0))))[0] != plain


# ---- as one would write them who wants to be taken for another


def identity(kind: int) -> bytes:
    return fields(*((number, "admin") for number in IDENTITY[kind]))


PLAIN = fields(TOPIC, (2, 7), (3, 0))
ADVERSARIES: list[tuple[str, bytes]] = [
    ("behind the rest", command(LOOKUP, PLAIN + identity(LOOKUP))),
    ("before the topic", command(LOOKUP, identity(LOOKUP) + PLAIN)),
    ("between", command(LOOKUP, fields(TOPIC) + identity(LOOKUP) + fields((2, 7)))),
    ("twice", command(LOOKUP, PLAIN + identity(LOOKUP) * 2)),
    ("in a second message, which merges", command(LOOKUP, PLAIN) + field(LOOKUP, identity(LOOKUP))),
    ("in a message before", field(1, LOOKUP) + field(LOOKUP, identity(LOOKUP)) + field(LOOKUP, PLAIN)),
    ("behind a second topic", command(LOOKUP, PLAIN + fields(TOPIC) + identity(LOOKUP))),
    ("in a tag that is written longer", command(LOOKUP, PLAIN + b"\xa2\x00" + b"\x05admin")),
    ("a size that is written longer", field(1, LOOKUP) + b"\xba\x01" + b"\xa7\x80\x00" + PLAIN + identity(LOOKUP)),
    ("under another type first", field(1, METADATA) + field(LOOKUP, PLAIN + identity(LOOKUP)) + field(1, LOOKUP)),
    ("as metadata's fields", command(METADATA, fields(TOPIC, (2, 7)) + identity(METADATA))),
    ("as metadata's, under the numbers of a lookup", command(METADATA, fields(TOPIC, (2, 7), (3, "admin"), (6, 1)))),
]


@pytest.mark.conforms("kip-590.3")
@pytest.mark.parametrize("data", [one[1] for one in ADVERSARIES], ids=[one[0] for one in ADVERSARIES])
def test_no_clients_own_identity_reaches_a_broker(data: bytes) -> None:
    """Security: only the connection's handshake, which is the proxy's, says who asks."""
    for kind in (LOOKUP, METADATA):  # what others wrote is known by then
        check(command(kind, fields(TOPIC, (2, 7))))
    check(command(LOOKUP, PLAIN))
    for _ in range(3):
        try:
            request, _ = check(data)
        except (CommandCorrupt, RequestRefused, DecodeError):
            continue
        assert b"admin" not in to_broker(request)


def test_a_rest_that_is_known_for_one_kind_is_none_of_another() -> None:
    """Security: field 3 is a lookup's flag, and metadata's original principal."""
    check(command(LOOKUP, fields(TOPIC, (2, 7), (7, "admin"))))
    request, _ = check(command(METADATA, fields(TOPIC, (2, 7), (3, "admin"))))
    assert b"admin" not in to_broker(request)
    check(command(METADATA, fields(TOPIC, (2, 7), (7, "x"), (8, "admin"))))
    check(command(METADATA, fields(TOPIC, (2, 7), (6, "admin"))))
    request, _ = check(command(LOOKUP, fields(TOPIC, (2, 7), (6, "admin"))))
    assert b"admin" not in to_broker(request)


def test_the_cached_trailers_of_requests_are_bounded() -> None:
    [lookups] = [trailers for kind, _, trailers in PARSER._fast_paths.values() if kind is KINDS[BaseCommand.LOOKUP]]
    for number in range(TRAILERS_MAX + 10):
        check(command(LOOKUP, fields((1, "t"), (2, 7), (7, str(number)))))
        assert len(lookups) <= TRAILERS_MAX
    for data in (
        command(LOOKUP, fields((1, "t"), (2, 7), (7, "x" * 1000))),
        command(LOOKUP, fields((1, "t"), (2, 7))) + field(200, "x" * 1000),
    ):
        before = len(lookups)
        check(data)
        assert len(lookups) == before


# ---- whatever comes


RESTS = (b"", fields((3, 0)), fields((3, 1)), fields((7, "x" * 70)))


def teach() -> None:
    """Have known what most clients write."""
    for kind in (LOOKUP, METADATA):
        for rest in RESTS:
            parse_request(command(kind, fields(TOPIC, (2, 7)) + rest))


def check_whatever(data: bytes) -> None:
    """It is what protobuf makes of it, and has no identity in it."""
    try:
        plain = BaseCommand.FromString(data)
    except DecodeError:
        with pytest.raises(CommandCorrupt):
            parse_request(data)
        return
    if plain.type not in FIELDS:
        with pytest.raises(KeyError):
            parse_request(data)
    elif not plain.HasField(FIELDS[plain.type]) or not getattr(plain, FIELDS[plain.type]).HasField("request_id"):
        with pytest.raises(CommandCorrupt):
            parse_request(data)
    else:
        try:
            request, _ = check(data)
        except RequestRefused:  # see test_request_rules
            return
        sent = getattr(BaseCommand.FromString(to_broker(request)), FIELDS[plain.type])
        for name in IDENTITY_NAMES:
            assert name not in sent.DESCRIPTOR.fields_by_name or not sent.HasField(name)


@pytest.mark.parametrize("kind", [LOOKUP, METADATA])
@pytest.mark.parametrize(
    "body", [fields((1, "pt"), (2, 7)), fields((1, "pt"), (2, 300), (3, 0))], ids=["short", "usual"]
)
def test_every_other_byte_in_every_place_is_what_protobuf_makes_of_it(kind: int, body: bytes) -> None:
    teach()
    data = command(kind, body)
    for at in range(len(data)):
        for byte in range(256):
            check_whatever(data[:at] + bytes([byte]) + data[at + 1 :])


@pytest.mark.parametrize("kind", [LOOKUP, METADATA])
@pytest.mark.parametrize("rest", RESTS)
def test_sizes_that_are_not_what_follows(kind: int, rest: bytes) -> None:
    """Every size of the message and of the topic, in front of every length of what is there; also such as would need a
    second byte.
    """
    teach()
    prefix = command(kind, b"")[:4]
    for topic_bytes in (0, 1, 2, 50, 112, 113, 114, 120, 121, 122, 126, 127, 128, 129, 190, 250, 251):
        body = b"\x0a" + bytes([topic_bytes]) + b"t" * topic_bytes + b"\x10\x07" + rest
        for size in {len(body) - 1, len(body), len(body) + 1, 127, 128, 255}:
            if size < 256:
                check_whatever(prefix + bytes([size]) + body)
                check_whatever(prefix + bytes([size]) + body + b"\x18\x00")
                check_whatever(prefix + bytes([size]) + body[:-1])


@pytest.mark.parametrize("size", range(1, 13))
@pytest.mark.parametrize("last", [0, 1, 2, 0x7F])
def test_ids_that_are_written_longer_than_they_are_or_too_long(size: int, last: int) -> None:
    teach()
    for filling in (0x80, 0xFF):
        check_whatever(command(LOOKUP, b"\x0a\x01t\x10" + bytes([filling]) * (size - 1) + bytes([last])))


def any_field(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    texts = st.sampled_from(["", "t", "admin", "tö", "\x10\x07", "x" * 130])
    return st.builds(
        field,
        numbers,
        st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1), texts, st.binary(max_size=12)),
    )


bodies = st.lists(any_field(st.integers(1, 9) | st.integers(10, 40)), max_size=6).map(b"".join)
usual = st.builds(
    lambda topic, request_id, rest: fields((1, topic), (2, request_id)) + rest,
    st.sampled_from(["t", "persistent://t/n/topic", "x" * 110, "ü"]),
    st.integers(0, 2**64 - 1),
    st.one_of(st.sampled_from([b"", b"\x18\x00", b"\x18\x01", b"\x22\x05admin", b"\x22\x80"]), bodies),
)
kinds = st.sampled_from([LOOKUP, METADATA, TOPICS, SCHEMA, 2])
commands = st.one_of(
    st.builds(command, kinds, st.one_of(usual, bodies)),
    st.builds(
        b"".join,
        st.lists(
            st.one_of(
                kinds.map(lambda kind: field(1, kind)),
                st.builds(field, kinds, st.one_of(usual, bodies)),
                any_field(st.integers(1, 210)),
            ),
            max_size=5,
        ),
    ),
)
cut_or_flipped = st.builds(
    lambda data, at, byte, keep: data[: at % (len(data) + 1)] + bytes([byte]) + data[at % (len(data) + 1) + keep :],
    commands,
    st.integers(0, 200),
    st.integers(0, 255),
    st.integers(0, 2),
)


def test_nothing_but_these_kinds() -> None:
    for kind in set(BaseCommand.Type.values()) - set(FIELDS):
        with pytest.raises(KeyError):
            parse_request(command(kind, None))


@given(data=st.one_of(commands, cut_or_flipped))
@example(data=b"")
@example(data=command(LOOKUP, b""))
@example(data=command(LOOKUP, b"\x0a\x7f"))
@example(data=command(LOOKUP, b"\x0a\x01t\x10" + b"\x80" * 9 + b"\x02"))
@example(data=command(LOOKUP, b"\x0a\x01t\x10" + b"\xff" * 12))
@example(data=command(LOOKUP, b"\x0a\x01t\x10\x80\x00"))
@example(data=field(1, LOOKUP) + b"\xba\x01\x85" + b"\x0a\x01t\x10\x07")
def test_whatever_comes_is_what_protobuf_makes_of_it(data: bytes) -> None:
    """Nothing is forgotten from one example to the next: what is known of others' requests changes nothing."""
    teach()
    check_whatever(data)


# ---- our own ids


def test_our_ids_are_different_and_have_one_size() -> None:
    numbers = list(islice(proxy_request_ids(), 20_000))
    assert numbers == [varint(number) for number in range(PROXY_ID_MIN, PROXY_ID_MIN + 20_000)]
    assert {len(number) for number in numbers} == {5}


@pytest.mark.parametrize("number", [0, 7, PROXY_ID_MIN - 1, PROXY_ID_MAX + 1, 2**64 - 1])
def test_a_number_outside_of_the_range_of_proxy_ids_is_not_encoded(number: int) -> None:
    assert encode_proxy_id(number) is None


@pytest.mark.parametrize("number", [PROXY_ID_MIN, PROXY_ID_MIN + 4711, PROXY_ID_MAX])
def test_a_proxy_id_is_encoded_as_a_varint(number: int) -> None:
    assert encode_proxy_id(number) == varint(number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 100, 128, 20_000])
def test_the_subject(kind: int, size: int) -> None:
    """Whether it was cut by hand or parsed, also where fields that are newer stand around it."""
    name = {TOPICS: "namespace"}.get(kind, "topic")
    text = subject(kind, size)
    message = BaseCommand(type=kind, **{FIELDS[kind]: {"request_id": 7, name: text}})  # type: ignore[arg-type]
    if kind == LOOKUP:
        message.lookup_topic.authoritative = True
    getattr(message, FIELDS[kind]).MergeFromString(field(99, b"newer"))
    for _ in range(2):
        request, _ = parse_request(message.SerializeToString())
        assert request.subject == text
        odd = LookupRequest(request.kind, request.prefix, field(99, b"newer") + request.body)
        assert odd.subject == text
