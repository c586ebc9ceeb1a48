"""The state machine of a client's connection, as data.

Everything that decides what may happen next on a client's connection is in this file, in one table: state and event
→ next state and the one action to perform. The forwarder's connection (proxy.forwarder.client.connection) performs
the actions and reports back with events. It never reads the state to decide anything; it reads it for texts and counts.

    AWAITING_CONNECT ──CONNECT──▶ AUTHENTICATING ◀───AUTH_RESPONSE─── AWAITING_AUTH_RESPONSE
           │                        │  │  └────────CHALLENGED─────────────▶ ▲
           │      ACCEPTED_FOR_LOOKUP  ACCEPTED_FOR_TARGET
           │                        ▼  ▼
           │AUTH_RESPONSE ──▶  LOOKUP  CONNECTING_TO_BROKER ──BROKER_CONNECTED──▶ RELAYING
           │(renews it)          │                                                  │
           └──────DRAINED────────┴──▶ CLOSED ◀──RELAY_START_FAILED, CLIENT_STALLED──┘
    not in RELAYING ──CLIENT_CLOSED, CLIENT_CORRUPT, a command that is not allowed, INTERNAL_ERROR──▶ CLOSED
    handshake ──DENIED, BROKER_FAILED, HANDSHAKE_TIMEOUT, EVICTED──▶ CLOSED
    LOOKUP ──DENIED, KEEP_ALIVE_TIMEOUT, ENVELOPE_UNSUPPORTED──▶ CLOSED
    any ──CLIENT_STALLED, SHUT_DOWN──▶ CLOSED

An AUTH_RESPONSE in LOOKUP renews the session (KIP-368), whether or not the proxy asked for it, and changes no state:
lookups go on while an auth worker verifies it. The session clock (proto.session_clock) decides whether there is
anything to renew, when the client is asked, and what is allowed past the session's end; where it refuses, DENIED ends
the connection.

DRAIN asks a connection to end once no request is under way, since its process stops or the connection has reached its
maximum age. Only a connection that waits for CONNECT or is in lookup mode can do so; DRAINED is reported when no
request is left, and closes it unless a CONNECT has come in between. During a handshake DRAIN is ignored, and reported
again when the connection enters lookup mode. A relay is not drained here: its client decides when it ends.

RELAYING begins when both connections are there. Until the relay has started, its start can still fail.

Events have two origins. *Remote* ones are what the client does: every state has a row for each of them, since a
client can do anything at any time. *Local* ones are what our own side decided: where a state has no row for one, to
report it is a defect of the proxy, and raises LocalProtocolError.

Sources: PIP-1 (design, steps 1 to 6), PIP-30 (basic logic, 1 to 3), KIP-368, and for what Pulsar's own proxy does in
these states its ProxyConnection, whose silent drops and closes are answers here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proto.errors import LocalProtocolError
from proto.lookup_kinds import KINDS
from proto.pulsar_pb2 import BaseCommand


class State(enum.Enum):
    """The state of a client's connection; the values are for logs and metrics."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hashes the name, in Python

    AWAITING_CONNECT = "awaiting connect"
    AUTHENTICATING = "authenticating"
    """An auth worker verifies the client's data; or the brokers' version and flags are asked for, for CONNECTED."""
    AWAITING_AUTH_RESPONSE = "awaiting auth response"
    """The client has been sent a challenge."""
    LOOKUP = "lookup"
    CONNECTING_TO_BROKER = "connecting to broker"
    RELAYING = "relaying"
    """The bytes belong to the client and the broker; the relay starts, or has started."""
    CLOSED = "closed"


class Event(enum.Enum):
    """What can happen on a client's connection."""

    __hash__ = object.__hash__  # as State

    # remote: the client's commands
    CONNECT = "connect"
    AUTH_RESPONSE = "auth response"
    PING = "ping"
    PONG = "pong"
    LOOKUP_REQUEST = "lookup request"
    OTHER_COMMAND = "other command"
    # remote: what else the client does, or fails to do
    CLIENT_CLOSED = "client closed"
    CLIENT_STALLED = "client stalled"
    """It does not read what is sent to it."""
    CLIENT_CORRUPT = "client corrupt"
    """It has sent bytes that are no frame or no command, or a frame that there is no memory for."""
    # local: what our side decided
    CHALLENGED = "challenged"
    ACCEPTED_FOR_LOOKUP = "accepted for lookup"
    ACCEPTED_FOR_TARGET = "accepted for target"
    DENIED = "denied"
    BROKER_CONNECTED = "broker connected"
    BROKER_FAILED = "broker failed"
    RELAY_START_FAILED = "relay start failed"
    HANDSHAKE_TIMEOUT = "handshake timeout"
    KEEP_ALIVE_TIMEOUT = "keep-alive timeout"
    """A PING of lookup mode was not answered."""
    ENVELOPE_UNSUPPORTED = "envelope unsupported"
    """The lookup worker does not know the version of our Envelopes: the client has to connect again."""
    DRAIN = "drain"
    """End the connection once no request is under way."""
    DRAINED = "drained"
    """No request is under way any more, or the time for them is over."""
    EVICTED = "evicted"
    """The client, which has been silent before it authenticated or has more than its share, is closed for another."""
    SHUT_DOWN = "shut down"
    INTERNAL_ERROR = "internal error"
    """Code of the proxy raised what it does not handle."""


class Action(enum.Enum):
    """The one thing to do for an event."""

    IGNORE = "ignore"
    AUTHENTICATE = "authenticate"
    """Check CONNECT, and pass the client's authentication data to the auth worker."""
    SEND_CHALLENGE = "send challenge"
    SEND_CONNECTED = "send connected"
    CONNECT_BROKER = "connect broker"
    START_RELAY = "start relay"
    SEND_PONG = "send pong"
    FORWARD_REQUEST = "forward request"
    """Send the request to a lookup worker, in an Envelope."""
    REFUSE_COMMAND = "refuse command"
    """Answer it with an error; the connection goes on."""
    REAUTHENTICATE = "reauthenticate"
    """Have an auth worker verify the client's new credentials, while all else goes on."""
    HOLD_COMMAND = "hold command"
    """Keep it, and read no further: these are the first bytes of the relay."""
    FINISH_REQUESTS = "finish requests"
    """Wait until no request is under way, then report DRAINED."""
    FAIL = "fail"
    """Answer with an error that ends the connection."""
    CLOSE = "close"
    """Close without an error: the client does not listen, or has done nothing wrong."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of an event: the next state, and the action to perform."""

    state: State
    action: Action


COMMANDS = frozenset(
    {
        Event.CONNECT,
        Event.AUTH_RESPONSE,
        Event.PING,
        Event.PONG,
        Event.LOOKUP_REQUEST,
        Event.OTHER_COMMAND,
    }
)

_FAIL = Transition(State.CLOSED, Action.FAIL)
_CLOSE = Transition(State.CLOSED, Action.CLOSE)
_CLOSED_IGNORE = Transition(State.CLOSED, Action.IGNORE)


def _stay(state: State, action: Action) -> Transition:
    return Transition(state, action)


def _handshake_rows(state: State) -> dict[Event, Transition]:
    """Return what ends a handshake from outside, from the moment when CONNECT has come until it is decided."""
    return {
        Event.HANDSHAKE_TIMEOUT: _FAIL,
        # It is drained once it is in lookup mode; DRAINED is of a drain that began before CONNECT came.
        Event.DRAIN: _stay(state, Action.IGNORE),
        Event.DRAINED: _stay(state, Action.IGNORE),
        Event.EVICTED: _CLOSE,
        Event.SHUT_DOWN: _CLOSE,
        Event.INTERNAL_ERROR: _CLOSE,
    }


TRANSITIONS: Mapping[State, Mapping[Event, Transition]] = MappingProxyType(
    {
        State.AWAITING_CONNECT: {
            Event.CONNECT: Transition(State.AUTHENTICATING, Action.AUTHENTICATE),
            Event.AUTH_RESPONSE: _FAIL,
            # A PING says nothing about its sender; answering it costs nothing and reveals nothing.
            Event.PING: _stay(State.AWAITING_CONNECT, Action.SEND_PONG),
            Event.PONG: _stay(State.AWAITING_CONNECT, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DENIED: _FAIL,
            # A peer that has sent nothing so far may speak no Pulsar at all.
            Event.HANDSHAKE_TIMEOUT: _CLOSE,
            Event.DRAIN: _stay(State.AWAITING_CONNECT, Action.FINISH_REQUESTS),
            Event.DRAINED: _CLOSE,
            Event.EVICTED: _CLOSE,
            Event.SHUT_DOWN: _CLOSE,
            Event.INTERNAL_ERROR: _CLOSE,
        },
        State.AUTHENTICATING: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: _FAIL,  # a round answered twice
            Event.PING: _stay(State.AUTHENTICATING, Action.SEND_PONG),
            Event.PONG: _stay(State.AUTHENTICATING, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.CHALLENGED: Transition(State.AWAITING_AUTH_RESPONSE, Action.SEND_CHALLENGE),
            Event.ACCEPTED_FOR_LOOKUP: Transition(State.LOOKUP, Action.SEND_CONNECTED),
            Event.ACCEPTED_FOR_TARGET: Transition(State.CONNECTING_TO_BROKER, Action.CONNECT_BROKER),
            Event.DENIED: _FAIL,
            **_handshake_rows(State.AUTHENTICATING),
        },
        State.AWAITING_AUTH_RESPONSE: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: Transition(State.AUTHENTICATING, Action.AUTHENTICATE),
            Event.PING: _stay(State.AWAITING_AUTH_RESPONSE, Action.SEND_PONG),
            Event.PONG: _stay(State.AWAITING_AUTH_RESPONSE, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DENIED: _FAIL,
            **_handshake_rows(State.AWAITING_AUTH_RESPONSE),
        },
        State.LOOKUP: {
            Event.CONNECT: _FAIL,
            # Allowed only where the session can expire; elsewhere the session reports DENIED.
            Event.AUTH_RESPONSE: _stay(State.LOOKUP, Action.REAUTHENTICATE),
            Event.PING: _stay(State.LOOKUP, Action.SEND_PONG),
            Event.PONG: _stay(State.LOOKUP, Action.IGNORE),
            Event.LOOKUP_REQUEST: _stay(State.LOOKUP, Action.FORWARD_REQUEST),
            Event.OTHER_COMMAND: _stay(State.LOOKUP, Action.REFUSE_COMMAND),
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DENIED: _FAIL,  # the session has expired, or was not renewed
            Event.KEEP_ALIVE_TIMEOUT: _CLOSE,
            Event.ENVELOPE_UNSUPPORTED: _FAIL,
            Event.DRAIN: _stay(State.LOOKUP, Action.FINISH_REQUESTS),
            Event.DRAINED: _CLOSE,
            Event.EVICTED: _CLOSE,
            Event.SHUT_DOWN: _CLOSE,
            Event.INTERNAL_ERROR: _CLOSE,
        },
        State.CONNECTING_TO_BROKER: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: _FAIL,
            Event.PING: _stay(State.CONNECTING_TO_BROKER, Action.SEND_PONG),
            Event.PONG: _stay(State.CONNECTING_TO_BROKER, Action.IGNORE),
            # A client that does not wait for CONNECTED: nothing goes to the broker before it, and nothing is lost.
            Event.LOOKUP_REQUEST: _stay(State.CONNECTING_TO_BROKER, Action.HOLD_COMMAND),
            Event.OTHER_COMMAND: _stay(State.CONNECTING_TO_BROKER, Action.HOLD_COMMAND),
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.BROKER_CONNECTED: Transition(State.RELAYING, Action.START_RELAY),
            Event.BROKER_FAILED: _FAIL,
            **_handshake_rows(State.CONNECTING_TO_BROKER),
        },
        # The relay sees no commands, and how it ends is its own matter. A frame can still come out of the decoder in
        # the instant in which the broker's side becomes ready: its bytes go to the relay, like those behind it. Until
        # the relay has started, only its start can fail: an end of the client may be no more than a half-close.
        State.RELAYING: {
            **{event: _stay(State.RELAYING, Action.HOLD_COMMAND) for event in COMMANDS},
            Event.CLIENT_CLOSED: _stay(State.RELAYING, Action.IGNORE),
            # What it was sent before may be half a frame, and CONNECTED would be read as the other half.
            Event.CLIENT_STALLED: _CLOSE,
            Event.CLIENT_CORRUPT: _stay(State.RELAYING, Action.IGNORE),
            Event.RELAY_START_FAILED: _FAIL,
            Event.HANDSHAKE_TIMEOUT: _stay(State.RELAYING, Action.IGNORE),
            Event.DRAIN: _stay(State.RELAYING, Action.IGNORE),
            Event.DRAINED: _stay(State.RELAYING, Action.IGNORE),
            Event.EVICTED: _CLOSE,
            Event.SHUT_DOWN: _CLOSE,
            Event.INTERNAL_ERROR: _stay(State.RELAYING, Action.IGNORE),
        },
        # Closing takes a moment, in which events of the client and of the workers may still come.
        State.CLOSED: dict.fromkeys(Event, _CLOSED_IGNORE),
    }
)


_SERVES_LOOKUPS = frozenset(
    state for state, row in TRANSITIONS.items() if row[Event.LOOKUP_REQUEST].action is Action.FORWARD_REQUEST
)

_ONE_BYTE_MAX = (1 << 7) - 1
_TWO_BYTES_MAX = (1 << 14) - 1


def _tag(field_number: int) -> bytes:
    """Return the tag of a field that holds a message, and has a number that takes two bytes."""
    tag = field_number << 3 | 2
    return bytes((tag & 0x7F | 0x80, tag >> 7))


_EVENT_BY_COMMAND = {
    BaseCommand.CONNECT: Event.CONNECT,
    BaseCommand.AUTH_RESPONSE: Event.AUTH_RESPONSE,
    BaseCommand.PING: Event.PING,
    BaseCommand.PONG: Event.PONG,
    **dict.fromkeys(KINDS, Event.LOOKUP_REQUEST),
}


_PLAIN_LOOKUPS = frozenset(
    bytes((BaseCommand.DESCRIPTOR.fields_by_name["type"].number << 3, request_type))
    + _tag(BaseCommand.DESCRIPTOR.fields_by_name[kind.request_field].number)
    for request_type, kind in KINDS.items()
    if not kind.may_be_large  # that wants care
)


def is_plainly_lookup(command: bytes) -> bool:
    """Return whether a serialized command is written as all clients write a request of lookup mode.

    That is the type, then its message, which ends with the command, so that no other type can follow
    (proto.command_heads). A command that is written differently may still be such a request: parse it to know.
    """
    if command[:4] not in _PLAIN_LOOKUPS:
        return False
    size = len(command) - 5
    if size <= _ONE_BYTE_MAX:
        return size >= 0 and command[4] == size
    size -= 1
    return _ONE_BYTE_MAX < size <= _TWO_BYTES_MAX and command[4:6] == bytes((size & _ONE_BYTE_MAX | 0x80, size >> 7))


def event_of(command: BaseCommand) -> Event:
    """Return the event that a client's command is."""
    return _EVENT_BY_COMMAND.get(command.type, Event.OTHER_COMMAND)


class ClientMachine:
    """The state of one client's connection, which moves through TRANSITIONS.

    ``serves_lookups``: whether the table has requests forwarded in this state. The session reads it for each frame, so
    it is an attribute: frames of requests need neither parsing nor an event then, since those change no state.
    """

    __slots__ = ("serves_lookups", "state")

    def __init__(self, state: State = State.AWAITING_CONNECT) -> None:
        self.state = state
        self.serves_lookups = state in _SERVES_LOOKUPS

    def handle(self, event: Event) -> Action:
        """Change the state and return the action to perform. Raises LocalProtocolError for a defect of the proxy."""
        transition = TRANSITIONS[self.state].get(event)
        if transition is None:
            raise LocalProtocolError(f"{event.value} while {self.state.value}")
        if transition.state is not self.state:
            self.state = transition.state
            self.serves_lookups = self.state in _SERVES_LOOKUPS
        return transition.action
