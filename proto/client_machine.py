"""The state machine of a client's connection, as data.

Everything that decides what may happen next on a client's connection stands in this file, in one table: state and event
→ next state and the one thing to do. The forwarder's session performs the actions and reports back with events; it
never looks at the state to decide something by itself.

    AWAITING_CONNECT ──CONNECT──▶ AUTHENTICATING ◀───AUTH_RESPONSE─── AWAITING_AUTH_RESPONSE
                                    │  │  └────────CHALLENGED─────────────▶ ▲
                  ACCEPTED_FOR_LOOKUP  ACCEPTED_FOR_TARGET
                                    ▼  ▼
            AUTH_RESPONSE ──▶  LOOKUP  CONNECTING_TO_BROKER ──BROKER_CONNECTED──▶ RELAYING
            (judged there)
    any ──DENIED, BROKER_FAILED, DEADLINE, CLIENT_CLOSED, a command out of turn──▶ CLOSED

An AUTH_RESPONSE in lookup mode renews the session (KIP-368), asked for or not, and moves nothing here: lookups go on
while it is judged. Whether there is anything to renew, when the client is asked and what may still be done past the
session's end is the session clock's to say (proto.session_clock); where it says no, DENIED ends the connection.

Events are of two origins. *Remote* ones are what the client does: every state has a row for each of them, since a
client can do anything at any time. *Local* ones are what our own side decided: where a state has no row for one, to
report it is a defect of the proxy, and raises LocalProtocolError.

Sources: PIP-1 (design, steps 1 to 6), PIP-30 (basic logic, 1 to 3), KIP-368, and for what Pulsar's own proxy does in
these states its ProxyConnection, whose silent drops and closes become answers here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proto.errors import LocalProtocolError
from proto.lookup_kinds import KINDS
from proto.pulsar_pb2 import BaseCommand


class State(enum.Enum):
    """Where a client's connection stands."""

    AWAITING_CONNECT = "awaiting connect"
    AUTHENTICATING = "authenticating"
    """The auth worker has data to judge."""
    AWAITING_AUTH_RESPONSE = "awaiting auth response"
    """The client has a challenge to answer."""
    LOOKUP = "lookup"
    CONNECTING_TO_BROKER = "connecting to broker"
    RELAYING = "relaying"
    """From here on the bytes are nobody's business but the client's and the broker's."""
    CLOSED = "closed"


class Event(enum.Enum):
    """What can happen on a client's connection."""

    # remote: the client's commands
    CONNECT = "connect"
    AUTH_RESPONSE = "auth response"
    PING = "ping"
    PONG = "pong"
    LOOKUP_REQUEST = "lookup request"
    OTHER_COMMAND = "other command"
    # remote: what else the client does, or fails to do
    CLIENT_CLOSED = "client closed"
    CLIENT_CORRUPT = "client corrupt"
    DEADLINE = "deadline"
    # local: what our side decided
    CHALLENGED = "challenged"
    ACCEPTED_FOR_LOOKUP = "accepted for lookup"
    ACCEPTED_FOR_TARGET = "accepted for target"
    DENIED = "denied"
    BROKER_CONNECTED = "broker connected"
    BROKER_FAILED = "broker failed"
    SHUT_DOWN = "shut down"


class Action(enum.Enum):
    """The one thing to do for an event."""

    IGNORE = "ignore"
    AUTHENTICATE = "authenticate"
    """Pass the client's authentication data to the auth worker."""
    SEND_CHALLENGE = "send challenge"
    SEND_CONNECTED = "send connected"
    CONNECT_BROKER = "connect broker"
    START_RELAY = "start relay"
    SEND_PONG = "send pong"
    FORWARD_REQUEST = "forward request"
    """Put the request into an Envelope for the lookup worker."""
    REFUSE_COMMAND = "refuse command"
    """Answer it with an error; the connection goes on."""
    REAUTHENTICATE = "reauthenticate"
    """The client's authentication is to be judged again, while all else goes on."""
    HOLD_COMMAND = "hold command"
    """Keep it, and read no further: it is the relay's first."""
    FAIL = "fail"
    """Answer with an error that ends the connection."""
    CLOSE = "close"
    """Close without a word: nobody listens, or nothing sensible can be said."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What an event leads to."""

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

REMOTE_EVENTS = COMMANDS | {Event.CLIENT_CLOSED, Event.CLIENT_CORRUPT, Event.DEADLINE}

_FAIL = Transition(State.CLOSED, Action.FAIL)
_CLOSE = Transition(State.CLOSED, Action.CLOSE)
_CLOSED_IGNORE = Transition(State.CLOSED, Action.IGNORE)


def _stay(state: State, action: Action) -> Transition:
    return Transition(state, action)


TRANSITIONS: Mapping[State, Mapping[Event, Transition]] = MappingProxyType(
    {
        State.AWAITING_CONNECT: {
            Event.CONNECT: Transition(State.AUTHENTICATING, Action.AUTHENTICATE),
            Event.AUTH_RESPONSE: _FAIL,
            # A PING says nothing about who is there; answering it costs nothing and reveals nothing.
            Event.PING: _stay(State.AWAITING_CONNECT, Action.SEND_PONG),
            Event.PONG: _stay(State.AWAITING_CONNECT, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            # Whoever has said nothing so far may speak no Pulsar at all.
            Event.DEADLINE: _CLOSE,
            Event.DENIED: _FAIL,
            Event.SHUT_DOWN: _CLOSE,
        },
        State.AUTHENTICATING: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: _FAIL,  # a round answered twice
            Event.PING: _stay(State.AUTHENTICATING, Action.SEND_PONG),
            Event.PONG: _stay(State.AUTHENTICATING, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DEADLINE: _FAIL,
            Event.CHALLENGED: Transition(State.AWAITING_AUTH_RESPONSE, Action.SEND_CHALLENGE),
            Event.ACCEPTED_FOR_LOOKUP: Transition(State.LOOKUP, Action.SEND_CONNECTED),
            Event.ACCEPTED_FOR_TARGET: Transition(State.CONNECTING_TO_BROKER, Action.CONNECT_BROKER),
            Event.DENIED: _FAIL,
            Event.SHUT_DOWN: _CLOSE,
        },
        State.AWAITING_AUTH_RESPONSE: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: Transition(State.AUTHENTICATING, Action.AUTHENTICATE),
            Event.PING: _stay(State.AWAITING_AUTH_RESPONSE, Action.SEND_PONG),
            Event.PONG: _stay(State.AWAITING_AUTH_RESPONSE, Action.IGNORE),
            Event.LOOKUP_REQUEST: _FAIL,
            Event.OTHER_COMMAND: _FAIL,
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DEADLINE: _FAIL,
            Event.DENIED: _FAIL,
            Event.SHUT_DOWN: _CLOSE,
        },
        State.LOOKUP: {
            Event.CONNECT: _FAIL,
            # Only where the session can expire; elsewhere it is one too many.
            Event.AUTH_RESPONSE: _stay(State.LOOKUP, Action.REAUTHENTICATE),
            Event.PING: _stay(State.LOOKUP, Action.SEND_PONG),
            Event.PONG: _stay(State.LOOKUP, Action.IGNORE),
            Event.LOOKUP_REQUEST: _stay(State.LOOKUP, Action.FORWARD_REQUEST),
            Event.OTHER_COMMAND: _stay(State.LOOKUP, Action.REFUSE_COMMAND),
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DEADLINE: _CLOSE,  # keep-alive: a PING went unanswered
            Event.DENIED: _FAIL,  # it has expired, or was not renewed
            Event.SHUT_DOWN: _CLOSE,
        },
        State.CONNECTING_TO_BROKER: {
            Event.CONNECT: _FAIL,
            Event.AUTH_RESPONSE: _FAIL,
            Event.PING: _stay(State.CONNECTING_TO_BROKER, Action.SEND_PONG),
            Event.PONG: _stay(State.CONNECTING_TO_BROKER, Action.IGNORE),
            # A client in a hurry: nothing goes to the broker before Connected, and nothing is lost.
            Event.LOOKUP_REQUEST: _stay(State.CONNECTING_TO_BROKER, Action.HOLD_COMMAND),
            Event.OTHER_COMMAND: _stay(State.CONNECTING_TO_BROKER, Action.HOLD_COMMAND),
            Event.CLIENT_CLOSED: _CLOSE,
            Event.CLIENT_CORRUPT: _FAIL,
            Event.DEADLINE: _FAIL,
            Event.BROKER_CONNECTED: Transition(State.RELAYING, Action.START_RELAY),
            Event.BROKER_FAILED: _FAIL,
            Event.SHUT_DOWN: _CLOSE,
        },
        # The relay sees no commands, and how it ends is its own matter. A frame can still come out of the decoder in
        # the instant in which the broker's side becomes ready: it is the relay's, like whatever stands behind it.
        State.RELAYING: {
            **{event: _stay(State.RELAYING, Action.HOLD_COMMAND) for event in COMMANDS},
            Event.CLIENT_CLOSED: _stay(State.RELAYING, Action.IGNORE),
            Event.CLIENT_CORRUPT: _stay(State.RELAYING, Action.IGNORE),
            Event.DEADLINE: _stay(State.RELAYING, Action.IGNORE),
            Event.SHUT_DOWN: _CLOSE,
        },
        # Closing takes a moment, in which the client and the workers may still have something to say.
        State.CLOSED: dict.fromkeys(Event, _CLOSED_IGNORE),
    }
)


_ONE_BYTE_MAX = (1 << 7) - 1
_TWO_BYTES_MAX = (1 << 14) - 1


def _tag(field_number: int) -> bytes:
    """Of a field that holds a message; its number takes two bytes."""
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
    """Whether a serialized command is written as every client writes a request of lookup mode: the type, then its
    message, which ends with the command, so that no other type can follow (proto.command_heads).

    One that is not may still be one: to parse it says so.
    """
    if command[:4] not in _PLAIN_LOOKUPS:
        return False
    size = len(command) - 5
    if size <= _ONE_BYTE_MAX:
        return size >= 0 and command[4] == size
    size -= 1
    return _ONE_BYTE_MAX < size <= _TWO_BYTES_MAX and command[4:6] == bytes((size & _ONE_BYTE_MAX | 0x80, size >> 7))


def event_of(command: BaseCommand) -> Event:
    """The event that a client's command is."""
    return _EVENT_BY_COMMAND.get(command.type, Event.OTHER_COMMAND)


class ClientMachine:
    """One client's connection: the current state, and the way through TRANSITIONS."""

    def __init__(self) -> None:
        self.state = State.AWAITING_CONNECT

    def handle(self, event: Event) -> Action:
        """Move on; returns what to do. Raises LocalProtocolError for a local event that has no place here."""
        transition = TRANSITIONS[self.state].get(event)
        if transition is None:
            raise LocalProtocolError(f"{event.value} while {self.state.value}")
        self.state = transition.state
        return transition.action
