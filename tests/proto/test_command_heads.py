"""proto.command_heads, and the follower above it, against the parsers that a command's type is not to depend on.

Two oracles: protobuf, and a model of LightProto, the parser of Pulsar's broker (4.0.8; that of 5.0.0-M1 differs in no
more than the commands that it knows), as its byte code reads: a
message ends where a field has *begun* beyond its end, so a field may reach out of it; numbers are cut to 32 bits; of a
field that stands twice the last counts; what is required and missing throws, and so does what it cannot skip. The model
was compared with the real parser over 1.1 million inputs of ``hostile_frame``: of what that reads to its end both find
the same type, but for 3 in 100,000, AUTH_RESPONSEs whose own fields the model does not know.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from light_proto import VALUES, VALUES_OF_BROKERS, LightProto

from proto import commands
from proto.command_heads import (
    HEAD_BYTES_MAX,
    INCOMPLETE,
    KEEP_ALIVE_FRAMES,
    PLAIN_HEADS,
    CommandHeadInvalid,
    FrameInvalid,
    check_type_is_first,
    command_type_at,
    command_type_of,
    keep_alive_at,
)
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_STOP, ClientFrameScanner, FrameCutter
from proto.varints import varint

MAX = 5000
ANSWER = int(BaseCommand.AUTH_RESPONSE)
PING, PONG = commands.ping(), commands.pong()
SEND = b"\x08\x06\x32\x04\x08\x01\x10\x05"


# ---- oracles


def protobuf_type(command: bytes) -> int | None:
    """What protobuf says; None where it cannot be parsed."""
    try:
        return int(BaseCommand.FromString(command).type)
    except DecodeError:
        return None


def light_proto_type(frame: bytes, values: frozenset[int] = VALUES) -> int | None:
    """What the broker says of a whole frame."""
    return LightProto(frame[8:], values).command_type(int.from_bytes(frame[4:8], "big"))


def known_type(frame: bytes) -> int | None:
    """What the head says; None where it is wrong, or its size is."""
    if int.from_bytes(frame[:4], "big") < 6:
        return None
    try:
        found = command_type_at(frame, 0, len(frame))
    except CommandHeadInvalid:
        return None
    assert found != INCOMPLETE, "all of it is there"
    return found


def assert_all_parsers_agree(frame: bytes) -> None:
    """Whatever the head says, no parser finds another type. (One that throws closes, or refuses, the connection.)"""
    found = known_type(frame)
    if found is not None:
        size = int.from_bytes(frame[4:8], "big")
        command = frame[8 : 8 + size]
        assert len(command) == size
        for values in VALUES_OF_BROKERS:
            assert light_proto_type(frame, values) in {found, None}, frame.hex()
        assert protobuf_type(command) in {found, None}, frame.hex()


# ---- inputs: commands made of what parsers read differently


def hostile_varint(chance: random.Random, number: int) -> bytes:
    """A number in no usual encoding: with bytes too many, or bits that a parser of 32 drops."""
    out = bytearray(varint(number))
    for _ in range(chance.randrange(4)):
        out[-1] |= 0x80
        out.append(0)
    if chance.random() < 0.2:
        out = bytearray(byte | 0x80 for byte in (*out, *bytes(max(0, 5 - len(out)))))
        out.append(chance.choice([0, 1, 0x10, 0x7F]))
    return bytes(out)


def hostile_command(chance: random.Random) -> bytes:
    """Mostly fields, in any form and order."""
    parts: list[bytes] = []
    for _ in range(chance.randrange(1, 5)):
        number = chance.choice([0, 1, 1, 1, 2, 6, 6, 9, 15, 16, 18, 18, 19, 23, 37, 69, 75, 127, 128, 1 << 28])
        wire_type = chance.choice([0, 0, 2, 2, 2, 1, 3, 4, 5, 7])
        write: Callable[[int], bytes] = varint if chance.random() < 0.7 else lambda n: hostile_varint(chance, n)
        parts.append(write(number << 3 | wire_type))
        if wire_type == 0:
            parts.append(write(chance.choice([0, 6, 9, 18, 19, 37, 70, 75, 82, 127, 128, 262, 1 << 32 | 6])))
        else:
            body = chance.randbytes(chance.choice([0, 1, 2, 5, 130])) if chance.random() < 0.5 else b"\x08\x06"
            parts.extend((write(max(0, len(body) + chance.choice([0, 0, 0, 0, 1, 2, -1, 200, 1 << 31]))), body))
    return b"".join(parts)


def readable_command(chance: random.Random, most: int = 5) -> bytes:
    """One that Pulsar's parser often reads to its end: types, unknown fields, messages in which nothing is required,
    some of which reach out of the one that they are in.
    """
    parts: list[bytes] = []
    for _ in range(chance.randrange(1, most)):
        write: Callable[[int], bytes] = varint if chance.random() < 0.7 else lambda n: hostile_varint(chance, n)
        number, wire_type = chance.choice(
            [(1, 0), (1, 0), (18, 2), (19, 2), (69, 2), (70, 0), (71, 5), (75, 2), (82, 2), (1, 2), (1, 5)]
        )
        parts.append(write(number << 3 | wire_type))
        if wire_type == 0:
            parts.append(write(chance.choice([6, 6, 9, 18, 19, 37, 70, 82])))
        elif wire_type == 2:
            body = readable_command(chance, 3) if most > 2 and chance.random() < 0.6 else bytes(chance.randrange(3))
            parts.extend((write(max(0, len(body) - chance.choice([0, 0, 0, 1, 2]))), body))
        else:
            parts.append(b"\x08\x06\x08\x06")
    return b"".join(parts)


def hostile_frame(chance: random.Random) -> bytes:
    """Around any command sizes that fit it or do not; the whole frame."""
    kind = chance.randrange(10)
    if kind == 0:
        command = bytes((8, chance.choice([6, 18, 37]))) + hostile_command(chance)
    elif kind == 1:
        command = b"\x08\x12\x92\x01\x00" + chance.choice([b"", b"\x08\x06", b"\x88\x00\x06", b"\x0a\x02\x08\x06"])
    elif kind == 2:
        body = hostile_command(chance)
        field = chance.choice([2, 6, 10, 18, 37, 69, 75])
        command = bytes((8, field)) + varint(field << 3 | 2) + varint(len(body)) + body
    elif kind == 3:
        command = bytearray(chance.choice([PING, PONG, encode_frame(SEND)])[8:])
        command[chance.randrange(len(command))] = chance.randrange(256)
    elif kind == 4:
        command = chance.randbytes(chance.randrange(20))
    elif kind == 5:
        command = hostile_command(chance)
    else:
        command = chance.choice([b"", b"\x08\x12", b"\x08\x12\x92\x01\x00", b"\x08\x13"]) + readable_command(chance)
    payload = chance.choice([b"", b"", b"\x08\x06", b"payload" * 3])
    size = max(0, len(command) + chance.choice([0, 0, 0, 0, 0, 1, -1, 2, len(payload)]))
    return (4 + len(command) + len(payload)).to_bytes(4, "big") + size.to_bytes(4, "big") + bytes(command) + payload


# ---- commands that brokers read in another way


@pytest.mark.parametrize(
    ("command", "broker_sees"),
    [
        (b"\x08\x12" + SEND, 6),
        (b"\x08\x12\x92\x01\x00\x08\x06", 6),
        (b"\x08\x12\x92\x01\x00\x88\x00\x06", 6),
        (b"\x08\x12\x92\x01\x00\x88\x80\x80\x80\x10\x06", 6),
        (b"\x08\x12\x32\x04\x08\x01\x10\x05\x08\x06", 6),
        # A field of the message in front reaches out of it: to protobuf all is one unknown field, and the type is PING.
        (b"\x08\x12\x92\x01\x01\x0a\x04" + b"\x00" * 4 + b"\x08\x06", 6),
        # Of a length only 32 bits count.
        (b"\x08\x12\x92\x01\x80\x80\x80\x80\x10\x08\x06", 6),
        (b"\x32\x04\x08\x01\x10\x05\x08\x06", 6),
        (b"\x08\x86\x00\x32\x04\x08\x01\x10\x05", 6),
        (b"\x88\x00\x06\x32\x04\x08\x01\x10\x05", 6),
        (b"\x08\x12\x0d\x00\x00\x00\x00\x08\x06", 6),
    ],
)
def test_an_ambiguous_frame_that_a_broker_reads_as_a_send_is_invalid(command: bytes, broker_sees: int) -> None:
    frame = encode_frame(command)
    assert light_proto_type(frame) == broker_sees
    assert known_type(frame) is None
    with pytest.raises(CommandHeadInvalid):
        ClientFrameScanner(frame_bytes_max=MAX).scan_frames(frame, len(frame))


@pytest.mark.parametrize("command_bytes", [0, 1, 8, 0x7FFFFFFF, 0x80000007, 0xFFFFFFFF])
def test_a_command_of_a_size_that_does_not_fit(command_bytes: int) -> None:
    frame = (11).to_bytes(4, "big") + command_bytes.to_bytes(4, "big") + b"\x08\x06\x32\x03\x08\x01\x10"
    with pytest.raises(CommandHeadInvalid):
        command_type_at(frame, 0, len(frame))
    for there in range(10):
        assert command_type_at(frame, 0, there) == INCOMPLETE


@pytest.mark.parametrize("command_type", [*sorted(VALUES), 82, 127])
@pytest.mark.parametrize("body", [b"", b"\x08\x01", b"\x0a" * 127, b"\x0a" * 128, b"\x0a" * 3000])
def test_the_type_of_a_command_as_clients_encode_it_is_known(command_type: int, body: bytes) -> None:
    """The command is its type and its message; HEAD_BYTES_MAX bytes suffice."""
    command = bytes((8, command_type)) + varint(max(2, command_type) << 3 | 2) + varint(len(body)) + body
    frame = encode_frame(command, b"payload")
    assert known_type(frame) == command_type
    head = min(len(frame), HEAD_BYTES_MAX)
    assert command_type_at(frame, 0, head) == command_type
    found = [command_type_at(frame, 0, there) for there in range(head)]
    assert found == sorted(found, key=lambda one: one != INCOMPLETE), "known once, it stays"
    assert ClientFrameScanner(frame_bytes_max=MAX).scan_frames(frame, head) == (len(frame), NO_STOP)
    assert command_type_of(command[:HEAD_BYTES_MAX], len(command)) == command_type


@pytest.mark.conforms("kip-368.20")
@pytest.mark.parametrize("command_type", [*range(70, 83), 127])
def test_pulsar_5s_commands_are_use_past_the_end(command_type: int) -> None:
    """A stop, as all commands; only before the end they pass."""
    frame = encode_frame(bytes((8, command_type)) + varint(command_type << 3 | 2) + b"\x02\x08\x01")
    assert ClientFrameScanner(frame_bytes_max=MAX).scan_frames(frame * 5, 5 * len(frame)) == (5 * len(frame), NO_STOP)
    assert past_the_end().scan_frames(PING + frame, len(PING + frame)) == (len(PING), command_type)


def test_a_command_of_a_type_alone() -> None:
    assert known_type(encode_frame(b"\x08\x12")) == 18
    assert known_type(encode_frame(b"\x08\x12", b"payload")) == 18


def test_plain_heads_are_those_that_are_known() -> None:
    for head, known in PLAIN_HEADS.items():
        least, command_type = divmod(known, 256)
        frame = least.to_bytes(4, "big") + head.to_bytes(8, "big") + bytes(least)
        assert command_type_at(frame, 0, 12) == command_type
        short = (least - 1).to_bytes(4, "big") + frame[4:]
        with pytest.raises(CommandHeadInvalid):
            command_type_at(short, 0, len(short))


# ---- whatever it is


@settings(max_examples=500)
@given(st.randoms(use_true_random=False))
def test_no_parser_says_otherwise(chance: random.Random) -> None:
    for _ in range(20):
        assert_all_parsers_agree(hostile_frame(chance))


@settings(max_examples=300)
@given(st.binary(max_size=30), st.binary(max_size=10))
@example(b"\x08\x12\x92\x01\x00", b"")
def test_nor_of_any_bytes(command: bytes, payload: bytes) -> None:
    assert_all_parsers_agree(encode_frame(command, payload))
    assert_all_parsers_agree(encode_frame(b"\x08\x12" + command, payload))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_a_command_that_passes_the_check_has_its_type_first_and_once(chance: random.Random) -> None:
    """In lookup mode, such a command has one type to a reader of its beginning, and to protobuf."""
    command = hostile_frame(chance)[8:]
    parsed = protobuf_type(command)
    if parsed is None:
        return
    try:
        check_type_is_first(BaseCommand.FromString(command), command)
    except CommandHeadInvalid:
        return
    assert command[:2] == bytes((8, parsed))
    fields = BaseCommand.FromString(command)
    fields.ClearField("type")
    rest = fields.SerializePartialToString()
    assert len(rest) == len(command) - 2, "there is no second one"


@pytest.mark.parametrize("command_type", [128, 255, 256, 20_000, -1])
def test_a_type_of_more_than_one_byte_is_refused(command_type: int) -> None:
    command = b"\x08" + varint(command_type & (1 << 64) - 1)
    assert protobuf_type(command) == command_type
    with pytest.raises(CommandHeadInvalid):
        check_type_is_first(BaseCommand.FromString(command), command)


# ---- PING and PONG past the end


def past_the_end() -> ClientFrameScanner:
    return ClientFrameScanner(frame_bytes_max=MAX, stop_types=ALL_TYPES)


def test_as_clients_were_seen_to_write_them() -> None:
    """Java's LightProto, Go's and C++'s protobuf (under Python and Node, too): the same bytes."""
    seen = {bytes.fromhex("0000000900000005 0812920100"), bytes.fromhex("0000000900000005 08139a0100")}
    assert seen == KEEP_ALIVE_FRAMES == {PING, PONG}


@pytest.mark.conforms("kip-368.22")
@pytest.mark.parametrize("frame", [PING, PONG])
def test_they_pass_past_the_end_byte_for_byte(frame: bytes) -> None:
    for there in range(1, len(frame)):
        assert past_the_end().scan_frames(frame, there) == (0, INCOMPLETE)
        assert keep_alive_at(frame, 0, there) == INCOMPLETE
    assert past_the_end().scan_frames(frame * 5, 5 * len(frame)) == (5 * len(frame), NO_STOP)


@pytest.mark.parametrize(
    "other",
    [
        encode_frame(PING[8:], b"x"),
        encode_frame(b"\x08\x12"),
        encode_frame(b"\x08\x12\x92\x01\x02\x08\x01"),
        encode_frame(b"\x08\x12\x92\x01\x80\x00"),
        encode_frame(b"\x08\x12\x32\x00"),
        encode_frame(b"\x08\x13\x92\x01\x00"),
    ],
    ids=["payload", "no message", "a message with something in it", "a longer length", "another message", "mixed"],
)
def test_a_frame_that_only_resembles_a_keep_alive_stops_the_scanner(other: bytes) -> None:
    passed, stop = past_the_end().scan_frames(PING + other, len(PING + other))
    assert (passed, stop) == (len(PING), other[9])


# ---- the follower, in any pieces


class Following(RuleBasedStateMachine):
    """A client's stream, in any pieces, before and past its end, with or without its messages being counted: what has
    passed is a stream of frames of which all parsers say what was known of them.
    """

    @initialize(seed=st.integers(0, 1 << 32), counts=st.sampled_from([0, 6]))
    def begin(self, seed: int, counts: int) -> None:
        self.chance = random.Random(seed)
        self.counts = counts
        self.walk = ClientFrameScanner(frame_bytes_max=MAX, stop_types=frozenset({ANSWER}), counted_type=counts)
        self.cutter = FrameCutter(self.walk)
        self.sent = self.passed = b""
        self.end_at: int | None = None
        """From here on what passes had been looked at past the end."""
        self.over = False

    @rule(rows=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 150)), max_size=4))
    def send_what_clients_send(self, rows: list[tuple[int, int]]) -> None:
        frames = [PING, PONG, encode_frame(SEND, bytes(50)), encode_frame(SEND, bytes(200))]
        frames += [encode_frame(b"\x08\x0b\x5a\x04\x08\x01\x10\x0a"), encode_frame(b"\x08\x14\xa2\x01\x02\x08\x01")]
        frames += [encode_frame(b"\x08\x49\xca\x04\x02\x08\x01"), encode_frame(b"\x08\x4f\xfa\x04\x02\x08\x01")]
        self.send(b"".join(frames[kind] * count for kind, count in rows))

    @rule()
    def send_something_hostile(self) -> None:
        self.send(hostile_frame(self.chance))

    @rule(count=st.integers(1, 200), at=st.integers(0, 200), column=st.integers(0, 20), value=st.integers(0, 255))
    def send_a_row_with_one_odd_byte(self, count: int, at: int, column: int, value: int) -> None:
        row = bytearray(encode_frame(SEND, bytes(60)) * count)
        row[at % count * (len(row) // count) + column] = value
        self.send(bytes(row))

    @rule()
    def expire(self) -> None:
        self.walk.stop_types = ALL_TYPES
        if self.end_at is None:
            self.end_at = len(self.passed) + self.cutter._bytes_to_boundary

    def send(self, data: bytes) -> None:
        self.sent += data
        while data and not self.over:
            size = self.chance.choice([1, 3, 12, 50, 5000])
            self.cutter.receive_data(data[:size])
            data = data[size:]
            self._pass_on()

    def _pass_on(self) -> None:
        try:
            while some := self.cutter.take_passable():
                self.passed += some
        except FrameInvalid:
            self.over = True
        else:
            self.over = self.cutter.stopped_at not in {NO_STOP, INCOMPLETE}

    @invariant()
    def all_parsers_agree(self) -> None:
        if not hasattr(self, "passed"):
            return
        assert self.sent.startswith(self.passed)
        at = messages = 0
        while at < len(self.passed):
            frame = self.sent[at : at + 4 + int.from_bytes(self.sent[at : at + 4], "big")]
            whole = len(frame) == 4 + int.from_bytes(frame[:4], "big")
            if self.end_at is not None and at >= self.end_at:
                assert frame in KEEP_ALIVE_FRAMES, frame.hex()
            elif whole:
                assert known_type(frame) not in {None, ANSWER}
                assert_all_parsers_agree(frame)
            messages += frame[9] == self.counts
            at += len(frame)
        if self.counts:
            assert self.walk.message_count >= messages


Following.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
TestFollowing = Following.TestCase
