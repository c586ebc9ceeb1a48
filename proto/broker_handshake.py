"""The proxy's side of a handshake with a broker: CONNECT, challenge rounds, CONNECTED (PIP-1 step 3, PIP-30).

Sans-IO: bytes in, events out. Bytes that the broker sends behind its CONNECTED belong to the connection's next user and
are handed over unchanged.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proto.commands import command_name, parse_command, pong
from proto.errors import LocalProtocolError, RemoteProtocolError
from proto.frames import Frame, FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnected

ROUNDS_MAX = 10
"""Limit of challenges in one handshake (conformance: rounds are capped)."""


class HandshakeState(enum.Enum):
    """State of a handshake: the party that is to send next. The values end a log's sentence."""

    AWAITING_BROKER = "the broker's answer is awaited"
    AWAITING_PROOF = "the broker's proof is awaited"
    AWAITING_ANSWER = "the proxy's answer to a challenge is awaited"
    DONE = "over"


class BrokerMessage(enum.Enum):
    """Kinds of commands that a broker can send during a handshake."""

    CONNECTED = "connected"
    CHALLENGE = "challenge"
    ERROR = "error"
    PING = "ping"
    OTHER = "other"


TRANSITIONS: Mapping[tuple[HandshakeState, BrokerMessage], HandshakeState] = MappingProxyType(
    {
        (HandshakeState.AWAITING_BROKER, BrokerMessage.CONNECTED): HandshakeState.DONE,
        (HandshakeState.AWAITING_BROKER, BrokerMessage.CHALLENGE): HandshakeState.AWAITING_ANSWER,
        (HandshakeState.AWAITING_BROKER, BrokerMessage.ERROR): HandshakeState.DONE,
        (HandshakeState.AWAITING_BROKER, BrokerMessage.PING): HandshakeState.AWAITING_BROKER,
        # A broker that still owes the proof of its key must not accept us without it: it may be an impostor.
        (HandshakeState.AWAITING_PROOF, BrokerMessage.CHALLENGE): HandshakeState.AWAITING_ANSWER,
        (HandshakeState.AWAITING_PROOF, BrokerMessage.ERROR): HandshakeState.DONE,
        (HandshakeState.AWAITING_PROOF, BrokerMessage.PING): HandshakeState.AWAITING_PROOF,
        (HandshakeState.AWAITING_ANSWER, BrokerMessage.ERROR): HandshakeState.DONE,
        (HandshakeState.AWAITING_ANSWER, BrokerMessage.PING): HandshakeState.AWAITING_ANSWER,
    }
)
"""Commands that the broker may send in each state. Any other pair violates the protocol."""

_MESSAGE_BY_COMMAND = {
    BaseCommand.CONNECTED: BrokerMessage.CONNECTED,
    BaseCommand.AUTH_CHALLENGE: BrokerMessage.CHALLENGE,
    BaseCommand.ERROR: BrokerMessage.ERROR,
    BaseCommand.PING: BrokerMessage.PING,
}


HANDSHAKE_FRAME_BYTES_MAX = 256 * 1024
"""Bound of a broker's frame in a handshake, which asks for nothing: many at once must not take a worker's memory."""

CONNECTED_BYTES_MAX = 4 * 1024
"""Bound of a broker's CONNECTED, which every client gets; Pulsar's have less than 200 bytes."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the proxy: its CONNECTED as a frame for the client and parsed, and the bytes behind it."""

    frame: Frame
    message: CommandConnected
    trailing_data: bytes


@dataclass(frozen=True, slots=True)
class Challenged:
    """The broker sent a challenge: the data for the authentication mechanism."""

    method: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused the connection, with its code and text."""

    error: int
    message: str


@dataclass(frozen=True, slots=True)
class SendData:
    """Bytes to send to the broker."""

    data: bytes


HandshakeEvent = Connected | Challenged | Refused | SendData


class BrokerHandshake:
    """State machine of one handshake: call ``receive_data``, then ``next_event`` until it returns None.

    Both raise RemoteProtocolError, after which the connection is unusable. ``complete``: the broker may answer CONNECT
    with CONNECTED; False where it still owes a proof of its own.
    """

    def __init__(self, *, max_frame_bytes: int, complete: bool = True) -> None:
        self.state = _awaiting_state(complete=complete)
        self._decoder = FrameDecoder(max_frame_bytes=min(max_frame_bytes, HANDSHAKE_FRAME_BYTES_MAX))
        self._rounds = 0

    def receive_data(self, data: bytes | bytearray) -> None:
        """Append bytes from the broker. Raises RemoteProtocolError if there are none: the broker has closed."""
        if not data:
            raise RemoteProtocolError("the broker closed the connection during the handshake")
        self._decoder.receive_data(data)

    def next_event(self) -> HandshakeEvent | None:
        """Return the next event, or None until more bytes arrive. Raises RemoteProtocolError."""
        if self.state is HandshakeState.DONE:
            return None
        frame = self._decoder.next_frame()
        if frame is None:
            return None
        command = parse_command(frame.command)
        message = _MESSAGE_BY_COMMAND.get(command.type, BrokerMessage.OTHER)
        next_state = TRANSITIONS.get((self.state, message))
        if next_state is None:
            text = f"the broker sent {command_name(command.type)} during the handshake: {self.state.value}"
            raise RemoteProtocolError(text)
        self.state = next_state
        return self._event(message, frame, command)

    def _event(self, message: BrokerMessage, frame: Frame, command: BaseCommand) -> HandshakeEvent:
        if message is BrokerMessage.CONNECTED:
            if (size_bytes := len(frame.encode())) > CONNECTED_BYTES_MAX:
                text = f"the broker's CONNECTED has {size_bytes} bytes; the limit is {CONNECTED_BYTES_MAX}"
                raise RemoteProtocolError(text)
            return Connected(frame, command.connected, self._decoder.take_unread_data())
        if message is BrokerMessage.ERROR:
            return Refused(int(command.error.error), str(command.error.message))
        if message is BrokerMessage.PING:
            return SendData(pong())
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise RemoteProtocolError(f"more than {ROUNDS_MAX} authentication rounds")
        challenge = command.auth_challenge.challenge
        return Challenged(str(challenge.auth_method_name), bytes(challenge.auth_data))

    def on_answer_sent(self, *, complete: bool = True) -> None:
        """Record that the answer to the last challenge was sent; ``complete`` as for CONNECT.

        Raises LocalProtocolError without a challenge.
        """
        if self.state is not HandshakeState.AWAITING_ANSWER:
            raise LocalProtocolError("an answer without a challenge")
        self.state = _awaiting_state(complete=complete)


def _awaiting_state(*, complete: bool) -> HandshakeState:
    return HandshakeState.AWAITING_BROKER if complete else HandshakeState.AWAITING_PROOF
