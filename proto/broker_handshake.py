"""The proxy's side of a handshake with a broker: CONNECT, challenge rounds, CONNECTED (PIP-1 step 3, PIP-30).

Sans-IO: feed bytes in, take events out. Whatever the broker sends behind its CONNECTED belongs to whoever uses the
connection next and is handed over untouched.
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
"""Challenges that one handshake may take (conformance: rounds are capped)."""


class HandshakeState(enum.Enum):
    """Whose turn it is."""

    AWAITING_BROKER = "the broker's answer is awaited"
    AWAITING_PROOF = "the broker's proof is awaited"
    AWAITING_ANSWER = "the proxy's answer to a challenge is awaited"
    DONE = "over"


class BrokerMessage(enum.Enum):
    """What a broker can say in a handshake."""

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
        # A broker that owes the proof of its key must not take us in without it: it may be anybody.
        (HandshakeState.AWAITING_PROOF, BrokerMessage.CHALLENGE): HandshakeState.AWAITING_ANSWER,
        (HandshakeState.AWAITING_PROOF, BrokerMessage.ERROR): HandshakeState.DONE,
        (HandshakeState.AWAITING_PROOF, BrokerMessage.PING): HandshakeState.AWAITING_PROOF,
        (HandshakeState.AWAITING_ANSWER, BrokerMessage.ERROR): HandshakeState.DONE,
        (HandshakeState.AWAITING_ANSWER, BrokerMessage.PING): HandshakeState.AWAITING_ANSWER,
    }
)
"""What the broker may say when. A pair that is not here breaks the protocol."""

_WORDS = {
    BaseCommand.CONNECTED: BrokerMessage.CONNECTED,
    BaseCommand.AUTH_CHALLENGE: BrokerMessage.CHALLENGE,
    BaseCommand.ERROR: BrokerMessage.ERROR,
    BaseCommand.PING: BrokerMessage.PING,
}


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker took us in: its CONNECTED as a frame for the client, parsed, and the bytes that came behind it."""

    frame: Frame
    message: CommandConnected
    trailing_data: bytes


@dataclass(frozen=True, slots=True)
class Challenged:
    """The broker wants an answer: the data that the mechanism must see."""

    method: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker said no, with its own code and text."""

    error: int
    message: str


@dataclass(frozen=True, slots=True)
class SendData:
    """Bytes that must go to the broker."""

    data: bytes


HandshakeEvent = Connected | Challenged | Refused | SendData


class BrokerHandshake:
    """One handshake. ``receive_data`` then ``next_event`` until it gives None; never raises into IO but for
    RemoteProtocolError, after which the connection is of no use.

    ``complete``: whether the broker may answer CONNECT by CONNECTED; not where it owes a proof of its own.
    """

    def __init__(self, *, max_frame_bytes: int, complete: bool = True) -> None:
        self.state = _awaiting(complete=complete)
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._rounds = 0

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes from the broker; none at all means that it closed."""
        if not data:
            raise RemoteProtocolError("the broker closed the connection during the handshake")
        self._decoder.receive_data(data)

    def next_event(self) -> HandshakeEvent | None:
        """The next thing that the broker said, or None until more bytes are there."""
        if self.state is HandshakeState.DONE:
            return None
        frame = self._decoder.next_frame()
        if frame is None:
            return None
        command = parse_command(frame.command)
        word = _WORDS.get(command.type, BrokerMessage.OTHER)
        following = TRANSITIONS.get((self.state, word))
        if following is None:
            text = f"the broker sent {command_name(command.type)} during the handshake: {self.state.value}"
            raise RemoteProtocolError(text)
        self.state = following
        return self._event(word, frame, command)

    def _event(self, word: BrokerMessage, frame: Frame, command: BaseCommand) -> HandshakeEvent:
        if word is BrokerMessage.CONNECTED:
            return Connected(frame, command.connected, self._decoder.take_unread_data())
        if word is BrokerMessage.ERROR:
            return Refused(int(command.error.error), str(command.error.message))
        if word is BrokerMessage.PING:
            return SendData(pong())
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise RemoteProtocolError(f"more than {ROUNDS_MAX} authentication rounds")
        challenge = command.auth_challenge.challenge
        return Challenged(str(challenge.auth_method_name), bytes(challenge.auth_data))

    def on_answer_sent(self, *, complete: bool = True) -> None:
        """Say that the answer to the last challenge is on its way; ``complete`` as for CONNECT."""
        if self.state is not HandshakeState.AWAITING_ANSWER:
            raise LocalProtocolError("an answer without a challenge")
        self.state = _awaiting(complete=complete)


def _awaiting(*, complete: bool) -> HandshakeState:
    return HandshakeState.AWAITING_BROKER if complete else HandshakeState.AWAITING_PROOF
