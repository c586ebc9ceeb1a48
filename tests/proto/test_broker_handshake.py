"""The handshake with a broker as dialogues: what comes in, what must come out."""

from typing import Self

import pytest
from pulsar_bytes import command, field, fields, frame

from proto.broker_handshake import (
    CONNECTED_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    ROUNDS_MAX,
    TRANSITIONS,
    BrokerHandshake,
    BrokerMessage,
    Challenged,
    Connected,
    HandshakeEvent,
    HandshakeState,
    Refused,
    SendData,
)
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.pulsar_pb2 import BaseCommand

LIMIT = 4096

# Flag 7 and field 9 are newer than any schema: the client must get them all the same.
CONNECTED = frame(
    command(3, fields((1, "Pulsar Server"), (2, 21), (3, 5242880), (4, fields((1, 1), (7, 1))), (9, "new")))
)
CHALLENGE = frame(command(36, fields((1, "Pulsar Server"), (2, fields((1, "sasl"), (2, b"\x00nonce"))), (3, 21))))
ERROR = frame(command(14, fields((1, 2**64 - 1), (2, 4), (3, "Invalid roles."))))
PING = frame(command(18))
PONG = frame(command(19))

WORDS = {
    BrokerMessage.CONNECTED: CONNECTED,
    BrokerMessage.CHALLENGE: CHALLENGE,
    BrokerMessage.ERROR: ERROR,
    BrokerMessage.PING: PING,
    BrokerMessage.OTHER: frame(command(9, fields((1, 1)))),
}


class Playbook:
    """A dialogue with a broker; every line is checked."""

    def __init__(self, *, complete: bool = True, max_frame_bytes: int = LIMIT) -> None:
        self.handshake = BrokerHandshake(max_frame_bytes=max_frame_bytes, complete=complete)

    def broker_says(self, *data: bytes) -> Self:
        for chunk in data:
            self.handshake.receive_data(chunk)
        return self

    def event(self) -> HandshakeEvent | None:
        return self.handshake.next_event()

    def challenged(self) -> Self:
        assert self.event() == Challenged("sasl", b"\x00nonce")
        return self

    def answers(self, *, complete: bool = True) -> Self:
        self.handshake.on_answer_sent(complete=complete)
        return self

    def sends(self, data: bytes) -> Self:
        assert self.event() == SendData(data)
        return self

    def connected(self, rest: bytes = b"") -> Self:
        event = self.event()
        assert isinstance(event, Connected)
        assert event.frame.encode() == CONNECTED
        assert (event.message.server_version, event.message.max_message_size) == ("Pulsar Server", 5242880)
        assert event.trailing_data == rest
        return self

    def refused(self, error: int, message: str) -> Self:
        assert self.event() == Refused(error, message)
        return self

    def silent(self) -> Self:
        assert self.event() is None
        return self

    def breaks_off(self, match: str | None = None) -> Self:
        with pytest.raises(RemoteProtocolError, match=match):
            self.event()
        return self


# ---- dialogues


@pytest.mark.conforms("pip-1.11", "pip-30.13")
def test_taken_in_at_once() -> None:
    Playbook().silent().broker_says(CONNECTED).connected().silent()


@pytest.mark.conforms("pip-30.13")
def test_two_rounds() -> None:
    (
        Playbook()
        .broker_says(CHALLENGE)
        .challenged()
        .silent()
        .answers()
        .broker_says(CHALLENGE)
        .challenged()
        .answers()
        .broker_says(CONNECTED)
        .connected()
    )


def test_a_refusal_keeps_code_and_text() -> None:
    Playbook().broker_says(ERROR).refused(4, "Invalid roles.").silent()


def test_a_refusal_in_the_middle_of_the_rounds() -> None:
    Playbook().broker_says(CHALLENGE).challenged().broker_says(ERROR).refused(4, "Invalid roles.")


def test_a_refusal_with_a_code_that_is_newer_than_the_proxy() -> None:
    Playbook().broker_says(frame(command(14, fields((1, 1), (2, 77), (3, "new"))))).refused(77, "new")


def test_pings_are_answered_at_any_point() -> None:
    (
        Playbook()
        .broker_says(PING + PING)
        .sends(PONG)
        .sends(PONG)
        .broker_says(CHALLENGE + PING)
        .challenged()
        .sends(PONG)
        .answers()
        .broker_says(PING + CONNECTED)
        .sends(PONG)
        .connected()
    )


@pytest.mark.parametrize("rest", [b"\x01", PING[:6], PING, PING + b"\xff" * 5000])
def test_bytes_after_connected_are_handed_over_unchanged(rest: bytes) -> None:
    Playbook().broker_says(CONNECTED + rest).connected(rest).silent()


def test_a_payload_behind_connected_goes_along_in_its_frame() -> None:
    wire = frame(CONNECTED[8:], b"payload")
    event = Playbook().broker_says(wire).event()
    assert isinstance(event, Connected)
    assert event.frame.encode() == wire


def test_the_whole_dialogue_split_at_every_byte() -> None:
    rest = PING + b"\x00\x00"
    stream = PING + CHALLENGE + PING + CHALLENGE + CONNECTED + rest
    for cut in range(1, len(stream)):
        playbook = Playbook()
        said: list[object] = []
        unread = [stream[:cut], stream[cut:]]
        while unread and not any(isinstance(event, Connected) for event in said):
            playbook.broker_says(unread.pop(0))
            while (event := playbook.event()) is not None:
                said.append(event)
                if isinstance(event, Challenged):
                    playbook.answers()
        *before, connected = said
        assert before == [
            SendData(PONG),
            Challenged("sasl", b"\x00nonce"),
            SendData(PONG),
            Challenged("sasl", b"\x00nonce"),
        ]
        assert isinstance(connected, Connected)
        assert connected.frame.encode() == CONNECTED
        assert connected.trailing_data + b"".join(unread) == rest


# ---- every state and word

BROKER, CHALLENGED, DONE = HandshakeState.AWAITING_BROKER, HandshakeState.AWAITING_ANSWER, HandshakeState.DONE
UNPROVEN = HandshakeState.AWAITING_PROOF

TABLE = {
    (BROKER, BrokerMessage.CONNECTED): DONE,
    (BROKER, BrokerMessage.CHALLENGE): CHALLENGED,
    (BROKER, BrokerMessage.ERROR): DONE,
    (BROKER, BrokerMessage.PING): BROKER,
    (BROKER, BrokerMessage.OTHER): None,
    # it owes a proof: all but to take us in
    (UNPROVEN, BrokerMessage.CONNECTED): None,
    (UNPROVEN, BrokerMessage.CHALLENGE): CHALLENGED,
    (UNPROVEN, BrokerMessage.ERROR): DONE,
    (UNPROVEN, BrokerMessage.PING): UNPROVEN,
    (UNPROVEN, BrokerMessage.OTHER): None,
    # it is our turn: a broker may give up, or ask whether we are there, and nothing else
    (CHALLENGED, BrokerMessage.CONNECTED): None,
    (CHALLENGED, BrokerMessage.CHALLENGE): None,
    (CHALLENGED, BrokerMessage.ERROR): DONE,
    (CHALLENGED, BrokerMessage.PING): CHALLENGED,
    (CHALLENGED, BrokerMessage.OTHER): None,
}


def handshake_in(state: HandshakeState) -> Playbook:
    playbook = Playbook(complete=state is not UNPROVEN)
    if state is CHALLENGED:
        playbook.broker_says(CHALLENGE).challenged()
    if state is DONE:
        playbook.broker_says(CONNECTED).connected()
    assert playbook.handshake.state is state
    return playbook


@pytest.mark.parametrize(("state", "word"), TABLE)
def test_every_state_and_word(state: HandshakeState, word: BrokerMessage) -> None:
    following = TABLE[state, word]
    playbook = handshake_in(state).broker_says(WORDS[word])
    if following is None:
        playbook.breaks_off("during the handshake")
        assert playbook.handshake.state is state
    else:
        assert playbook.event() is not None
        assert playbook.handshake.state is following


@pytest.mark.parametrize("word", BrokerMessage)
def test_once_over_nothing_more_is_read(word: BrokerMessage) -> None:
    playbook = handshake_in(DONE).broker_says(WORDS[word]).silent()
    assert playbook.handshake.state is DONE


def test_the_tables_agree() -> None:
    assert {pair: state for pair, state in TABLE.items() if state is not None} == TRANSITIONS
    assert set(TABLE) == {(state, word) for state in (BROKER, UNPROVEN, CHALLENGED) for word in BrokerMessage}


@pytest.mark.parametrize("kind", [kind for kind in [*BaseCommand.Type.values(), 1, 999] if kind not in {3, 14, 18, 36}])
def test_every_other_command_breaks_the_handshake(kind: int) -> None:
    name = BaseCommand.Type.Name(kind) if kind in BaseCommand.Type.values() else f"command type {kind}"
    Playbook().broker_says(frame(field(1, kind))).breaks_off(
        f"^the broker sent {name} during the handshake: the broker's answer is awaited$"
    )


@pytest.mark.conforms("pip-30.14")
def test_a_broker_must_prove_itself_in_every_round_that_says_so() -> None:
    playbook = Playbook(complete=False).broker_says(CHALLENGE).challenged().answers(complete=False)
    playbook.broker_says(CONNECTED).breaks_off("the broker's proof is awaited")
    playbook = Playbook(complete=False).broker_says(CHALLENGE).challenged().answers(complete=True)
    playbook.broker_says(CONNECTED).connected()


# ---- limits and rubbish


@pytest.mark.conforms("pip-30.45")
def test_ten_rounds_and_not_one_more() -> None:
    assert ROUNDS_MAX == 10
    playbook = Playbook()
    for _ in range(10):
        playbook.broker_says(CHALLENGE).challenged().answers()
    playbook.broker_says(CHALLENGE).breaks_off("more than 10 authentication rounds")


def test_ten_rounds_may_end_well() -> None:
    playbook = Playbook()
    for _ in range(10):
        playbook.broker_says(CHALLENGE).challenged().answers()
    playbook.broker_says(CONNECTED).connected()


@pytest.mark.parametrize("before", [b"", CONNECTED[:3], CONNECTED[:-1], CHALLENGE])
def test_a_broker_that_closes(before: bytes) -> None:
    playbook = Playbook()
    if before:
        playbook.broker_says(before)
        playbook.event()
    with pytest.raises(RemoteProtocolError, match="closed the connection"):
        playbook.broker_says(b"")


def connected_of(size_bytes: int) -> bytes:
    """A CONNECTED whose frame has so many bytes; a newer field takes what its own fields do not need."""
    rest = size_bytes - len(frame(command(3, fields((1, "Pulsar Server"), (2, 21), (9, b"x" * 1000)))))
    return frame(command(3, fields((1, "Pulsar Server"), (2, 21), (9, b"x" * (1000 + rest)))))


def test_a_connected_that_is_larger_than_any_brokers_is_refused() -> None:
    """Every client would get it."""
    book = Playbook(max_frame_bytes=1 << 20)
    assert len(connected_of(CONNECTED_BYTES_MAX)) == CONNECTED_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match=f"CONNECTED has {CONNECTED_BYTES_MAX + 1} bytes"):
        book.broker_says(connected_of(CONNECTED_BYTES_MAX + 1)).event()
    book = Playbook(max_frame_bytes=1 << 20)
    assert isinstance(book.broker_says(connected_of(CONNECTED_BYTES_MAX)).event(), Connected)


def test_a_frame_of_a_handshake_is_bounded_whatever_the_limit_of_lookups() -> None:
    book = Playbook(max_frame_bytes=1 << 30)
    with pytest.raises(RemoteProtocolError, match=f"the limit is {HANDSHAKE_FRAME_BYTES_MAX}"):
        book.broker_says((HANDSHAKE_FRAME_BYTES_MAX + 1).to_bytes(4, "big")).event()


def test_a_frame_above_the_limit() -> None:
    Playbook().broker_says((LIMIT + 1).to_bytes(4, "big")).breaks_off("the limit is 4096")


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(4),
        frame(b"\xff\xff\xff"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(command(14, fields((1, 1), (2, 4), (3, b"\xff\xfe")))),
    ],
    ids=["no room", "no protobuf", "http", "no utf-8"],
)
def test_garbage(garbage: bytes) -> None:
    Playbook().broker_says(garbage).breaks_off()


@pytest.mark.parametrize("state", [BROKER, UNPROVEN, DONE])
def test_an_answer_without_a_challenge_is_our_defect(state: HandshakeState) -> None:
    playbook = handshake_in(state)
    with pytest.raises(LocalProtocolError):
        playbook.answers()


def test_a_second_answer_to_a_challenge_is_an_error() -> None:
    playbook = handshake_in(CHALLENGED).answers()
    with pytest.raises(LocalProtocolError):
        playbook.answers()
