"""proto.request_rules: whatever a client writes, a broker is sent nothing that it would close a shared connection upon.

The oracles are protobuf, and a model of Pulsar's own parser and handlers (pulsar_parser).
"""

from __future__ import annotations

import pulsar_parser
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from pulsar_bytes import command, field, fields, varint

from proto.commands import CommandCorrupt
from proto.lookup_kinds import KINDS
from proto.lookup_requests import PROXY_ID_MIN, RequestParser
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.request_rules import NEWER_FIELDS_MAX, PROPERTIES_MAX, RequestRefused

LOOKUP, METADATA, TOPICS, SCHEMA = 23, 21, 32, 34
OURS = PROXY_ID_MIN + 4711
PARSER = RequestParser()
parse_request = PARSER.parse_request
SUBJECT = {LOOKUP: (1, "persistent://t/n/topic"), METADATA: (1, "t"), TOPICS: (2, "t/n"), SCHEMA: (2, "t")}
ID = {LOOKUP: (2, 7), METADATA: (2, 7), TOPICS: (1, 7), SCHEMA: (1, 7)}
SUBJECT_NAME = {LOOKUP: "topic", METADATA: "topic", TOPICS: "namespace", SCHEMA: "topic"}


def request(kind: int, *more: tuple[int, int | bytes | str]) -> bytes:
    return command(kind, fields(*sorted((SUBJECT[kind], ID[kind])), *more))


def group(number: int, inside: bytes = b"") -> bytes:
    return varint(number << 3 | 3) + inside + varint(number << 3 | 4)


def sent(data: bytes) -> bytes:
    """The command that a broker gets. Raises as parse_request does."""
    asked, _ = parse_request(data)
    return asked.frame_with_id(varint(OURS))[8:]


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Each test begins with no trailer that came before."""
    for _, _, trailers in PARSER._fast_paths.values():
        trailers.clear()


# ---- refused requests


def bad_requests() -> dict[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    for kind, subject in SUBJECT.items():
        name = KINDS[kind].name
        plain = fields(*sorted((subject, ID[kind])))
        found |= {
            f"{name} about nothing": (command(kind, fields(ID[kind])), "incomplete"),
            f"{name} in two halves, which protobuf merges": (
                command(kind, fields(subject)) + field(kind, fields(ID[kind], (20, 1))) + field(5, b""),
                "second_message",
            ),
            f"{name} whose topic is a number": (command(kind, fields((subject[0], 5), ID[kind])), "incomplete"),
            f"{name} with a group": (command(kind, plain + group(90)), "unknown_field"),
            f"{name} with a group in a group": (command(kind, plain + group(90, group(91))), "unknown_field"),
            f"{name} with a group for its topic": (command(kind, plain + group(subject[0])), "unknown_field"),
            f"{name} and a group beside it": (command(kind, plain) + group(200), "unknown_field"),
            f"{name} with a number that is too long": (command(kind, plain + b"\xd0\x05\x81\x00"), "unknown_field"),
            f"{name} with a tag that is too long": (command(kind, plain + b"\xd0\x85\x00\x01"), "unknown_field"),
            f"{name} and an empty SEND": (command(kind, plain) + field(6, b""), "second_message"),
            f"{name} and an empty CONNECT": (command(kind, plain) + field(2, b""), "second_message"),
            f"{name} and an empty FLOW": (command(kind, plain) + field(11, b""), "second_message"),
            f"{name} and a command of the future": (command(kind, plain) + field(127, b""), "second_message"),
            f"{name} and another request": (command(kind, plain) + field(55 - kind, b""), "second_message"),
            f"{name} with too much": (command(kind, plain + field(90, 1) * (NEWER_FIELDS_MAX + 1)), "too_large"),
            f"{name} with too much in two places": (
                command(kind, plain + field(90, 1) * NEWER_FIELDS_MAX) + field(200, 1),
                "too_large",
            ),
        }
    broken = [("empty", b""), ("no value", fields((1, "k"))), ("no key", fields((2, "v"))), ("other", fields((3, 1)))]
    for name, key_value in broken:
        found[f"property: {name}"] = request(LOOKUP, (8, fields((1, "k"), (2, "v"))), (8, key_value)), "incomplete"
    group_inside = fields((1, "k"), (2, "v")) + group(3)
    found["property: a group"] = request(LOOKUP, (8, group_inside)), "unknown_field"
    found["properties: too much in all of them"] = (
        request(LOOKUP, *[(8, fields((1, "k"), (2, "v"), (3, 1)))] * (NEWER_FIELDS_MAX + 1)),
        "too_large",
    )
    found["properties: too many"] = (
        request(LOOKUP, *[(8, fields((1, "k"), (2, "v")))] * (PROPERTIES_MAX + 1)),
        "too_large",
    )
    names = ["", "x", "/", "//", "/a/b", "a/", "a//b", "a/b/c/d", "a b/c", "a/b\n", "a/b\0", "ü/é", "a/b%2f", "a*/b"]
    for text in names:
        found[f"namespace {text!r}"] = command(TOPICS, fields((1, 7), (2, text))), "namespace"
    for size in range(1, 8):
        found[f"schema version of {size} bytes"] = request(SCHEMA, (3, bytes(size))), "schema_version"
    return found


BAD = bad_requests()


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_a_request_upon_which_a_broker_would_close_the_connection_is_refused_under_its_id(
    data: bytes, reason: str
) -> None:
    """Each time: a refused request leaves nothing in the parser's cache."""
    for _ in range(3):
        with pytest.raises(RequestRefused) as caught:
            parse_request(data)
        assert (caught.value.reason, caught.value.request_id) == (reason, 7)
        assert caught.value.kind.request_field in pulsar_parser.MESSAGES.values()


@pytest.mark.parametrize("kind", SUBJECT)
def test_codes_that_a_client_understands(kind: int) -> None:
    with pytest.raises(RequestRefused, match=f"has no {SUBJECT_NAME[kind]}") as caught:
        parse_request(command(kind, fields(ID[kind])))
    assert caught.value.code == ServerError.InvalidTopicName


@pytest.mark.parametrize("kind", SUBJECT)
def test_a_request_without_a_request_id_is_corrupt(kind: int) -> None:
    """Its client could not match an answer."""
    for data in (command(kind, fields(SUBJECT[kind])), command(kind, b""), command(kind, None), field(1, kind)):
        with pytest.raises(CommandCorrupt):
            parse_request(data)


# ---- requests that pass


GOOD = {
    **{f"{KINDS[kind].name} plain": request(kind) for kind in SUBJECT},
    **{f"{KINDS[kind].name} newer field": request(kind, (90, "new"), (91, 5)) for kind in SUBJECT},
    **{f"{KINDS[kind].name} many": request(kind, *[(90, b"x" * 1000)] * NEWER_FIELDS_MAX) for kind in SUBJECT},
    **{f"{KINDS[kind].name} newer field beside": request(kind) + field(200, "new") for kind in SUBJECT},
    "the first number beside that is no command's": request(LOOKUP) + field(128, "new"),
    "an empty topic": command(LOOKUP, fields((1, ""), (2, 7))),
    "no name": command(LOOKUP, fields((1, "a/b/c/d://"), (2, 7))),
    "properties": request(LOOKUP, *[(8, fields((1, "k"), (2, "v")))] * 20),
    "as many properties as there may be": request(LOOKUP, *[(8, fields((1, "k"), (2, "v")))] * PROPERTIES_MAX),
    "a property that is empty": request(LOOKUP, (8, fields((1, ""), (2, "")))),
    "a property that is no UTF-8": request(LOOKUP, (8, fields((1, b"\xff"), (2, b"\xfe")))),
    "a property with a newer field": request(LOOKUP, (8, fields((1, "k"), (2, "v"), (3, "new")))),
    "a mode that is newer": request(TOPICS, (3, 99), (4, b"\xff("), (5, b"\xff")),
    "old names": command(TOPICS, fields((1, 7), (2, "tenant/cluster/namespace"))),
    "a slash at the end": command(TOPICS, fields((1, 7), (2, "tenant/namespace/"))),
    "every sign": command(TOPICS, fields((1, 7), (2, "a-b=c:d.e_f9/A"))),
    "an empty schema version": request(SCHEMA, (3, b"")),
    "a schema version": request(SCHEMA, (3, bytes(8))),
    "an old one": request(SCHEMA, (3, bytes(64))),
    "four bytes and eight": request(LOOKUP) + varint(150 << 3 | 5) + b"1234" + varint(151 << 3 | 1) + b"12345678",
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_a_valid_request_reaches_the_broker_unchanged_except_for_its_id(data: bytes) -> None:
    for _ in range(2):
        kind, message = pulsar_parser.read(sent(data))
        expected_kind, expected = pulsar_parser.read(data)
        assert (kind, message) == (expected_kind, {**expected, "request_id": OURS})


# ---- whatever comes


numbers = st.integers(1, 9) | st.sampled_from([10, 21, 23, 32, 34, 68, 90, 127, 128, 200])
texts = st.sampled_from(["", "t", "t/n", "tö", "x" * 130]) | st.binary(max_size=12)
key_values = st.builds(
    lambda pairs, behind: fields(*pairs) + behind,
    st.lists(st.tuples(st.integers(1, 3), texts), max_size=3),
    st.sampled_from([b"", group(3), b"\x0b"]),
)
any_field = st.one_of(
    st.builds(field, numbers, st.integers(0, 3) | st.integers(0, 2**64 - 1) | texts | key_values),
    st.builds(group, numbers, st.sampled_from([b"", b"\x08\x01"])),
    st.builds(lambda tag, data: varint(tag) + data, st.integers(0, 1700), st.binary(max_size=9)),
)
bodies = st.lists(any_field, max_size=5).map(b"".join)
requests = st.builds(
    lambda kind, left_out, body, properties, behind: (
        command(
            kind,
            fields(*[pair for index, pair in enumerate(sorted((SUBJECT[kind], ID[kind]))) if index != left_out])
            + b"".join(field(8, one) for one in properties)
            + body,
        )
        + behind
    ),
    st.sampled_from(list(SUBJECT)),
    st.sampled_from([None, None, None, 0, 1]),
    bodies,
    st.lists(key_values, max_size=2),
    st.one_of(st.just(b""), bodies),
)
flipped = st.builds(
    lambda data, at, byte, keep: data[: at % (len(data) + 1)] + bytes([byte]) + data[at % (len(data) + 1) + keep :],
    requests,
    st.integers(0, 200),
    st.integers(0, 255),
    st.integers(0, 2),
)


def passes(data: bytes) -> bool:
    """Whether it passes; then it is what protobuf reads, and a broker reads it so as well."""
    refusal: RequestRefused | None = None
    out = b""
    try:
        out = sent(data)
    except RequestRefused as refused:
        refusal = refused
    except (CommandCorrupt, KeyError):
        return False
    expected = BaseCommand.FromString(data)
    wanted = getattr(expected, KINDS[expected.type].request_field)
    if refusal is not None:
        assert refusal.request_id == wanted.request_id
        return False
    kind, message = pulsar_parser.read(out)
    assert kind == expected.type
    assert message["request_id"] == OURS
    subject = KINDS[kind].subject_field
    assert message[subject] == getattr(wanted, subject).encode()
    assert not set(pulsar_parser.IDENTITY) & message.keys()
    return True


@given(data=requests | flipped | st.binary(max_size=40))
@example(data=command(LOOKUP, fields((1, "t"), (2, 7))) + group(200))
@example(data=command(LOOKUP, fields((1, "t"), (2, 7), (8, b""))))
@example(data=field(1, LOOKUP) + field(LOOKUP, fields((1, "t"))) + field(LOOKUP, fields((2, 7))))
@example(data=command(METADATA, fields((1, "t"), (2, 7))) + b"\x8a\x80\x80\x80\x10\x00")
@settings(max_examples=400)
def test_whatever_passes_is_read_by_a_broker_as_by_us(data: bytes) -> None:
    passes(data)


well_formed = st.builds(
    lambda kind, topic, number, newer, beside: (
        command(
            kind,
            fields(
                *sorted(((SUBJECT[kind][0], "t/n" if kind == TOPICS else topic), (ID[kind][0], number))),
                *[(one + 30, value) for one, value in newer],
            ),
        )
        + fields(*[(one + 200, value) for one, value in beside])
    ),
    st.sampled_from(list(SUBJECT)),
    st.text(max_size=40),
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2**64 - 1) | st.binary(max_size=20)), max_size=4),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2**64 - 1) | st.binary(max_size=20)), max_size=2),
)


@given(data=well_formed)
def test_no_client_that_is_newer_than_this_proxy_is_refused(data: bytes) -> None:
    assert passes(data)


class OneWorker(RuleBasedStateMachine):
    """Requests of many clients, one after the other: what was learnt from one must not let another one pass."""

    def __init__(self) -> None:
        super().__init__()
        for _, _, trailers in PARSER._fast_paths.values():
            trailers.clear()
        self.rests: list[bytes] = []

    @rule(data=requests | flipped)
    def anything(self, data: bytes) -> None:
        """A request, twice."""
        assert passes(data) is passes(data)

    @rule(kind=st.sampled_from([LOOKUP, METADATA]), topic=texts, number=st.integers(0, 2**64 - 1), rest=bodies)
    def as_clients_write(self, kind: int, topic: str | bytes, number: int, rest: bytes) -> None:
        """Topic, id and a rest, which is what is cut by hand."""
        self.rests.append(rest)
        passes(command(kind, fields((1, topic), (2, number)) + rest))

    @rule(
        kind=st.sampled_from([LOOKUP, METADATA]),
        topic=texts,
        number=st.integers(0, 2**64 - 1),
        index=st.integers(0, 1000),
        cut=st.integers(-3, 0),
    )
    def with_a_rest_that_came_before(self, kind: int, topic: str | bytes, number: int, index: int, cut: int) -> None:
        """Under another kind perhaps, and perhaps not all of it."""
        if self.rests:
            rest = self.rests[index % len(self.rests)]
            passes(command(kind, fields((1, topic), (2, number)) + rest[: len(rest) + cut]))


TestOneWorker = OneWorker.TestCase
TestOneWorker.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_model_throws_where_pulsar_does() -> None:
    """Each of these closed a connection of Pulsar 4.0.8's; the model must not be kinder than that."""
    thrown = 0
    for name, (data, reason) in BAD.items():
        try:
            BaseCommand.FromString(data)
            pulsar_parser.read(data)
        except (pulsar_parser.Throws, DecodeError):
            thrown += 1
        else:
            assert reason in {"too_large", "second_message", "unknown_field"}, name
    assert thrown > len(BAD) // 2
