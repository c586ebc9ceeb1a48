"""The client's state machine, held against a table of its own: written from PIP-1 and PIP-30, not from the module."""

import pulsar_bytes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.client_machine import (
    TRANSITIONS,
    Action,
    ClientMachine,
    Event,
    State,
    Transition,
    event_of,
    is_plainly_lookup,
)
from proto.commands import parse_command
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.lookup_kinds import KINDS
from proto.pulsar_pb2 import BaseCommand

Outcome = tuple[State, Action] | None

DEFECT: Outcome = None
"""Our own side reports what cannot be: LocalProtocolError."""
FAIL: Outcome = (State.CLOSED, Action.FAIL)
CLOSE: Outcome = (State.CLOSED, Action.CLOSE)
OVER: Outcome = (State.CLOSED, Action.IGNORE)

STATES = (
    State.AWAITING_CONNECT,
    State.AUTHENTICATING,
    State.AWAITING_AUTH_RESPONSE,
    State.LOOKUP,
    State.CONNECTING_TO_BROKER,
    State.RELAYING,
    State.CLOSED,
)


def to(state: State, action: Action) -> Outcome:
    return state, action


def stay(action: Action) -> list[Outcome]:
    """In every state of a handshake or of lookup mode, the same answer and no move."""
    return [(state, action) for state in STATES[:5]]


# KIP-368: fresh credentials in the middle of a session. Whether there is anything to renew is the session's to know.
RENEWED: Outcome = (State.LOOKUP, Action.REAUTHENTICATE)

HELD: Outcome = (State.CONNECTING_TO_BROKER, Action.HOLD_COMMAND)

# A command that was read just as the relay began is the relay's first, as one that came a moment before: to drop it
# would lose the client's bytes (PIP-1, step 5: "blindly forward byte buffers").
RELAYED: Outcome = (State.RELAYING, Action.HOLD_COMMAND)
IN_RELAY: Outcome = (State.RELAYING, Action.IGNORE)

UNMOVED = stay(Action.IGNORE)
FINISH = stay(Action.FINISH_REQUESTS)

# fmt: off
TABLE: dict[Event, list[Outcome]] = {
    # -- what the client does: PIP-30's rounds, then lookups (PIP-1) or a relay
    # columns: awaiting connect, authenticating, awaiting auth response, lookup, connecting, relaying, closed
    Event.CONNECT:         [to(State.AUTHENTICATING, Action.AUTHENTICATE), FAIL, FAIL, FAIL, FAIL, RELAYED, OVER],
    Event.AUTH_RESPONSE:   [FAIL, FAIL, to(State.AUTHENTICATING, Action.AUTHENTICATE), RENEWED, FAIL, RELAYED, OVER],
    Event.PING:            [*stay(Action.SEND_PONG), RELAYED, OVER],
    Event.PONG:            [*stay(Action.IGNORE), RELAYED, OVER],
    Event.LOOKUP_REQUEST:  [FAIL, FAIL, FAIL, to(State.LOOKUP, Action.FORWARD_REQUEST), HELD, RELAYED, OVER],
    Event.OTHER_COMMAND:   [FAIL, FAIL, FAIL, to(State.LOOKUP, Action.REFUSE_COMMAND), HELD, RELAYED, OVER],
    # an end that was read just as the relay began is the relay's as well: it may be no more than a half-close
    Event.CLIENT_CLOSED:   [CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, IN_RELAY, OVER],
    Event.CLIENT_CORRUPT:  [FAIL, FAIL, FAIL, FAIL, FAIL, IN_RELAY, OVER],
    # a client that does not read gets no error; in a relay that starts, CONNECTED would follow half a frame
    Event.CLIENT_STALLED:  [CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, OVER],
    # -- what our side decides: a verdict needs a provider, a broker a connector
    Event.CHALLENGED: [
        DEFECT, to(State.AWAITING_AUTH_RESPONSE, Action.SEND_CHALLENGE), DEFECT, DEFECT, DEFECT, DEFECT, OVER,
    ],
    Event.ACCEPTED_FOR_LOOKUP: [
        DEFECT, to(State.LOOKUP, Action.SEND_CONNECTED), DEFECT, DEFECT, DEFECT, DEFECT, OVER,
    ],
    Event.ACCEPTED_FOR_TARGET: [
        DEFECT, to(State.CONNECTING_TO_BROKER, Action.CONNECT_BROKER), DEFECT, DEFECT, DEFECT, DEFECT, OVER,
    ],
    # until the client is in, it may be turned away at any moment; afterwards no verdict is due
    Event.DENIED:          [FAIL, FAIL, FAIL, FAIL, DEFECT, DEFECT, OVER],  # in lookup mode: not renewed (KIP-368)
    Event.BROKER_CONNECTED: [
        DEFECT, DEFECT, DEFECT, DEFECT, to(State.RELAYING, Action.START_RELAY), DEFECT, OVER,
    ],
    Event.BROKER_FAILED:   [DEFECT, DEFECT, DEFECT, DEFECT, FAIL, DEFECT, OVER],
    # the relay's start can fail for as long as it has not started
    Event.RELAY_START_FAILED: [DEFECT, DEFECT, DEFECT, DEFECT, DEFECT, FAIL, OVER],
    # who never spoke may speak no Pulsar; who lets a PING go unanswered is not there to read an error
    Event.HANDSHAKE_TIMEOUT: [CLOSE, FAIL, FAIL, DEFECT, FAIL, IN_RELAY, OVER],
    Event.KEEP_ALIVE_TIMEOUT: [DEFECT, DEFECT, DEFECT, CLOSE, DEFECT, DEFECT, OVER],
    # only lookup mode sends Envelopes
    Event.ENVELOPE_UNSUPPORTED: [DEFECT, DEFECT, DEFECT, FAIL, DEFECT, DEFECT, OVER],
    # who is idle or asks may leave between two requests; a handshake goes on, and so does a relay
    Event.DRAIN:           [FINISH[0], *UNMOVED[1:3], FINISH[3], UNMOVED[4], IN_RELAY, OVER],
    Event.DRAINED:         [CLOSE, *UNMOVED[1:3], CLOSE, UNMOVED[4], IN_RELAY, OVER],
    # only unauthenticated clients are chosen, in any state for all that
    Event.EVICTED:         [CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, OVER],
    Event.SHUT_DOWN:       [CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, OVER],
    Event.INTERNAL_ERROR:  [CLOSE, CLOSE, CLOSE, CLOSE, CLOSE, IN_RELAY, OVER],
}
# fmt: on

PAIRS = [
    pytest.param(state, event, outcome, id=f"{state.name}-{event.name}")
    for event, outcomes in TABLE.items()
    for state, outcome in zip(STATES, outcomes, strict=True)
]

REMOTE = {
    Event.CONNECT,
    Event.AUTH_RESPONSE,
    Event.PING,
    Event.PONG,
    Event.LOOKUP_REQUEST,
    Event.OTHER_COMMAND,
    Event.CLIENT_CLOSED,
    Event.CLIENT_STALLED,
    Event.CLIENT_CORRUPT,
}
NOT_YET_IN = (State.AWAITING_CONNECT, State.AUTHENTICATING, State.AWAITING_AUTH_RESPONSE)


def machine_in(state: State) -> ClientMachine:
    return ClientMachine(state)


def every_transition() -> list[tuple[State, Event, Transition]]:
    return [(state, event, following) for state, row in TRANSITIONS.items() for event, following in row.items()]


def test_the_table_of_this_test_is_complete() -> None:
    assert set(TABLE) == set(Event)
    assert set(STATES) == set(State)


@pytest.mark.parametrize(("state", "event", "outcome"), PAIRS)
def test_every_pair(state: State, event: Event, outcome: Outcome) -> None:
    machine = machine_in(state)
    if outcome is None:
        with pytest.raises(LocalProtocolError, match=f"^{event.value} while {state.value}$"):
            machine.handle(event)
        assert machine.state is state
    else:
        assert machine.handle(event) is outcome[1]
        assert machine.state is outcome[0]
    assert machine.serves_lookups is (machine.state is State.LOOKUP)


def test_a_connection_begins_with_the_wait_for_connect() -> None:
    assert ClientMachine().state is State.AWAITING_CONNECT


@pytest.mark.parametrize("state", State)
def test_the_client_can_do_anything_at_any_time(state: State) -> None:
    assert set(TRANSITIONS[state]) >= REMOTE


# ---- invariants


@pytest.mark.conforms("pip-1.13")
def test_the_only_way_into_the_relay() -> None:
    into = {
        (state, event)
        for state, event, following in every_transition()
        if following.state is State.RELAYING and state is not State.RELAYING
    }
    assert into == {(State.CONNECTING_TO_BROKER, Event.BROKER_CONNECTED)}


@pytest.mark.conforms("pip-30.11")
def test_the_only_way_into_lookup_mode() -> None:
    into = {
        (state, event)
        for state, event, following in every_transition()
        if following.state is State.LOOKUP and state is not State.LOOKUP
    }
    assert into == {(State.AUTHENTICATING, Event.ACCEPTED_FOR_LOOKUP)}


@pytest.mark.parametrize(
    ("start", "reachable"),
    [
        (State.LOOKUP, {State.LOOKUP, State.CLOSED}),
        (State.RELAYING, {State.RELAYING, State.CLOSED}),
        (State.CONNECTING_TO_BROKER, {State.CONNECTING_TO_BROKER, State.RELAYING, State.CLOSED}),
        (State.CLOSED, {State.CLOSED}),
        (State.AWAITING_CONNECT, set(State)),
    ],
)
def test_each_state_reaches_only_its_expected_successors(start: State, reachable: set[State]) -> None:
    found = {start}
    while more := {following.state for state in found for following in TRANSITIONS[state].values()} - found:
        found |= more
    assert found == reachable


@pytest.mark.parametrize(
    ("action", "states"),
    [
        (Action.AUTHENTICATE, {State.AWAITING_CONNECT, State.AWAITING_AUTH_RESPONSE}),
        (Action.SEND_CHALLENGE, {State.AUTHENTICATING}),
        (Action.SEND_CONNECTED, {State.AUTHENTICATING}),
        (Action.CONNECT_BROKER, {State.AUTHENTICATING}),
        (Action.FORWARD_REQUEST, {State.LOOKUP}),
        (Action.REFUSE_COMMAND, {State.LOOKUP}),
        (Action.REAUTHENTICATE, {State.LOOKUP}),
        (Action.START_RELAY, {State.CONNECTING_TO_BROKER}),
        (Action.FINISH_REQUESTS, {State.AWAITING_CONNECT, State.LOOKUP}),
    ],
)
def test_an_action_happens_only_where_it_belongs(action: Action, states: set[State]) -> None:
    assert {state for state, _, following in every_transition() if following.action is action} == states


@pytest.mark.conforms("kip-590.5", "kip-368.55")
@pytest.mark.parametrize("state", NOT_YET_IN)
@pytest.mark.parametrize("event", [Event.LOOKUP_REQUEST, Event.OTHER_COMMAND])
def test_no_command_passes_before_authentication(state: State, event: Event) -> None:
    assert TRANSITIONS[state][event] == Transition(State.CLOSED, Action.FAIL)


def test_only_fail_and_close_end_a_connection_and_they_always_do() -> None:
    for state, _, following in every_transition():
        if state is not State.CLOSED:
            ends = following.action in {Action.FAIL, Action.CLOSE}
            assert ends == (following.state is State.CLOSED)


def test_after_the_end_nothing_is_done_whatever_is_still_reported() -> None:
    assert TRANSITIONS[State.CLOSED] == {event: Transition(State.CLOSED, Action.IGNORE) for event in Event}


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_along_every_way_each_step_was_earned(events: list[Event]) -> None:
    """Whatever happens: no lookup, no broker and no relay without a verdict, no verdict without data to verify."""
    machine = ClientMachine()
    verifying = accepted = dialled = False
    for event in events:
        try:
            action = machine.handle(event)
        except LocalProtocolError:
            assert event not in REMOTE
            continue
        match action:
            case Action.AUTHENTICATE:
                assert not accepted
                verifying = True
            case Action.SEND_CHALLENGE:
                assert verifying
                verifying = False
            case Action.SEND_CONNECTED | Action.CONNECT_BROKER:
                assert verifying
                verifying, accepted, dialled = False, True, action is Action.CONNECT_BROKER
            case Action.FORWARD_REQUEST | Action.REFUSE_COMMAND | Action.REAUTHENTICATE:
                assert accepted
                assert not dialled
            case Action.HOLD_COMMAND | Action.START_RELAY:
                assert accepted
                assert dialled


# ---- the way of PIP-1 and of PIP-30, told as stories


@pytest.mark.conforms("pip-30.16")
def test_a_lookup_after_two_rounds() -> None:
    machine = ClientMachine()
    story = [
        (Event.CONNECT, Action.AUTHENTICATE),
        (Event.PING, Action.SEND_PONG),
        (Event.CHALLENGED, Action.SEND_CHALLENGE),
        (Event.AUTH_RESPONSE, Action.AUTHENTICATE),
        (Event.CHALLENGED, Action.SEND_CHALLENGE),
        (Event.AUTH_RESPONSE, Action.AUTHENTICATE),
        (Event.ACCEPTED_FOR_LOOKUP, Action.SEND_CONNECTED),
        (Event.LOOKUP_REQUEST, Action.FORWARD_REQUEST),
        (Event.OTHER_COMMAND, Action.REFUSE_COMMAND),
        (Event.LOOKUP_REQUEST, Action.FORWARD_REQUEST),
        (Event.CLIENT_CLOSED, Action.CLOSE),
    ]
    assert [machine.handle(event) for event, _ in story] == [action for _, action in story]


def test_a_session_that_is_renewed_and_later_is_not() -> None:
    """KIP-368: requests go on in the middle of it; a failure ends the connection with a word, whenever it comes."""
    machine = ClientMachine()
    story = [
        (Event.CONNECT, Action.AUTHENTICATE),
        (Event.ACCEPTED_FOR_LOOKUP, Action.SEND_CONNECTED),
        (Event.AUTH_RESPONSE, Action.REAUTHENTICATE),
        (Event.LOOKUP_REQUEST, Action.FORWARD_REQUEST),
        (Event.AUTH_RESPONSE, Action.REAUTHENTICATE),
        (Event.DENIED, Action.FAIL),
        (Event.AUTH_RESPONSE, Action.IGNORE),
    ]
    assert [machine.handle(event) for event, _ in story] == [action for _, action in story]


def test_a_relay_with_a_client_in_a_hurry() -> None:
    machine = ClientMachine()
    story = [
        (Event.CONNECT, Action.AUTHENTICATE),
        (Event.ACCEPTED_FOR_TARGET, Action.CONNECT_BROKER),
        (Event.OTHER_COMMAND, Action.HOLD_COMMAND),
        (Event.BROKER_CONNECTED, Action.START_RELAY),
        (Event.OTHER_COMMAND, Action.HOLD_COMMAND),
        (Event.CLIENT_CLOSED, Action.IGNORE),
        (Event.SHUT_DOWN, Action.CLOSE),
    ]
    assert [machine.handle(event) for event, _ in story] == [action for _, action in story]


def test_a_relay_that_does_not_start() -> None:
    machine = ClientMachine()
    story = [
        (Event.CONNECT, Action.AUTHENTICATE),
        (Event.ACCEPTED_FOR_TARGET, Action.CONNECT_BROKER),
        (Event.BROKER_CONNECTED, Action.START_RELAY),
        (Event.DRAIN, Action.IGNORE),
        (Event.RELAY_START_FAILED, Action.FAIL),
        (Event.SHUT_DOWN, Action.IGNORE),
    ]
    assert [machine.handle(event) for event, _ in story] == [action for _, action in story]


def test_a_drain_that_finds_a_handshake_waits_for_lookup_mode() -> None:
    """One that began before CONNECT came may find it: then it is no longer idle, and is asked again."""
    machine = ClientMachine()
    story = [
        (Event.DRAIN, Action.FINISH_REQUESTS),
        (Event.CONNECT, Action.AUTHENTICATE),
        (Event.DRAINED, Action.IGNORE),
        (Event.DRAIN, Action.IGNORE),
        (Event.ACCEPTED_FOR_LOOKUP, Action.SEND_CONNECTED),
        (Event.DRAIN, Action.FINISH_REQUESTS),
        (Event.LOOKUP_REQUEST, Action.FORWARD_REQUEST),
        (Event.DRAINED, Action.CLOSE),
    ]
    assert [machine.handle(event) for event, _ in story] == [action for _, action in story]


def test_a_round_answered_twice_ends_it() -> None:
    machine = ClientMachine()
    for event in (Event.CONNECT, Event.CHALLENGED, Event.AUTH_RESPONSE):
        machine.handle(event)
    assert machine.handle(Event.AUTH_RESPONSE) is Action.FAIL
    # the auth worker's verdict on the first answer comes too late
    assert machine.handle(Event.ACCEPTED_FOR_TARGET) is Action.IGNORE


# ---- which event a command is

EVENTS = {2: Event.CONNECT, 37: Event.AUTH_RESPONSE, 18: Event.PING, 19: Event.PONG} | dict.fromkeys(
    (21, 23, 32, 34),  # PARTITIONED_METADATA, LOOKUP, GET_TOPICS_OF_NAMESPACE, GET_SCHEMA
    Event.LOOKUP_REQUEST,
)


@pytest.mark.parametrize("kind", [*BaseCommand.Type.values(), 1, 41, 69, 1000, 2**31 - 1])
def test_the_event_of_every_type_of_command(kind: int) -> None:
    assert event_of(BaseCommand(type=kind)) is EVENTS.get(kind, Event.OTHER_COMMAND)


def test_a_command_without_a_type_is_not_served() -> None:
    assert event_of(BaseCommand()) is Event.OTHER_COMMAND


# ---- commands that are known without parsing

TOPIC_OR_NAMESPACE = pulsar_bytes.fields((1, "t"), (2, 7))


@pytest.mark.parametrize("kind", [21, 23])  # PARTITIONED_METADATA, LOOKUP
def test_a_lookup_as_clients_encode_it_is_plainly_a_lookup(kind: int) -> None:
    """The type, then its message, as both LightProto (Java) and protobuf (C++ and all that stands on it) write it."""
    command = pulsar_bytes.command(kind, TOPIC_OR_NAMESPACE)
    assert is_plainly_lookup(command)
    assert event_of(BaseCommand(type=kind)) is Event.LOOKUP_REQUEST
    assert command[:2] == bytes((8, kind))


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 129, 255, 256, 16_382, 16_383])
def test_only_what_ends_with_its_message_is(size: int) -> None:
    command = pulsar_bytes.command(23, b"\x0a" * size)
    assert is_plainly_lookup(command)
    for wrong in (command + b"\x08", command + b"\x08\x12", command[:-1]):
        assert not is_plainly_lookup(wrong)


def test_a_message_of_a_longer_length_is_left_to_who_parses() -> None:
    assert not is_plainly_lookup(pulsar_bytes.command(23, b"\x0a" * 16_384))


@pytest.mark.parametrize("kind", [32, 34])  # GET_TOPICS_OF_NAMESPACE, GET_SCHEMA
def test_a_request_with_a_large_answer_is_never_plainly_a_lookup(kind: int) -> None:
    """Room for the answer has to be reserved first."""
    assert not is_plainly_lookup(pulsar_bytes.command(kind, TOPIC_OR_NAMESPACE))


def test_as_a_client_was_seen_to_write_it() -> None:
    assert is_plainly_lookup(bytes.fromhex("0817 ba0105 0a0174 1007"))


@pytest.mark.parametrize("kind", [*BaseCommand.Type.values(), 1, 41, 69, 127])
def test_no_other_command_is(kind: int) -> None:
    """Topic lists and schemas neither: their answers may be large, and that wants care."""
    command = pulsar_bytes.command(kind, TOPIC_OR_NAMESPACE)
    assert is_plainly_lookup(command) is (kind in {21, 23})


@pytest.mark.parametrize("kind", [21, 23])
@pytest.mark.parametrize("other", [*BaseCommand.Type.values()])
def test_a_type_and_another_ones_message_is_none(kind: int, other: int) -> None:
    command = pulsar_bytes.field(1, kind) + pulsar_bytes.field(other, TOPIC_OR_NAMESPACE)
    assert is_plainly_lookup(command) is (kind == other)


@pytest.mark.parametrize("kind", [21, 23])
def test_a_part_of_its_beginning_is_none(kind: int) -> None:
    command = pulsar_bytes.command(kind, TOPIC_OR_NAMESPACE)
    assert not any(is_plainly_lookup(command[:size]) for size in range(len(command)))
    assert not is_plainly_lookup(command[2:] + command[:2]), "in another order it must be parsed"
    assert not is_plainly_lookup(b"")


_MESSAGES = [one for one in BaseCommand.DESCRIPTOR.fields if one.message_type is not None]


@given(
    kind=st.sampled_from(BaseCommand.Type.values()),
    field=st.sampled_from(_MESSAGES),
    body=st.binary(max_size=20),
    ids=st.tuples(st.text(max_size=300), st.integers(0, 2**64 - 1)),
)
def test_is_plainly_lookup_agrees_with_parsing_for_all_commands(
    kind: int, field: object, body: bytes, ids: tuple[str, int]
) -> None:
    """Each command has a type and one message, that of the type or another one."""
    for message in (body, pulsar_bytes.fields((1, ids[0]), (2, ids[1]))):
        data = pulsar_bytes.field(1, kind) + pulsar_bytes.field(field.number, message)  # type: ignore[attr-defined]
        try:
            command = parse_command(data)
        except RemoteProtocolError:
            continue
        served = event_of(command) is Event.LOOKUP_REQUEST and not KINDS[kind].may_be_large
        assert is_plainly_lookup(data) is (served and kind == field.number)  # type: ignore[attr-defined]
