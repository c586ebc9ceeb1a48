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

    BROKER = "the broker's answer is awaited"
    UNPROVEN = "the broker's proof is awaited"
    CHALLENGED = "the proxy's answer to a challenge is awaited"
    DONE = "over"


class BrokerWord(enum.Enum):
    """What a broker can say in a handshake."""

    CONNECTED = "connected"
    CHALLENGE = "challenge"
    ERROR = "error"
    PING = "ping"
    OTHER = "other"


TRANSITIONS: Mapping[tuple[HandshakeState, BrokerWord], HandshakeState] = MappingProxyType(
    {
        (HandshakeState.BROKER, BrokerWord.CONNECTED): HandshakeState.DONE,
        (HandshakeState.BROKER, BrokerWord.CHALLENGE): HandshakeState.CHALLENGED,
        (HandshakeState.BROKER, BrokerWord.ERROR): HandshakeState.DONE,
        (HandshakeState.BROKER, BrokerWord.PING): HandshakeState.BROKER,
        # A broker that owes the proof of its key must not take us in without it: it may be anybody.
        (HandshakeState.UNPROVEN, BrokerWord.CHALLENGE): HandshakeState.CHALLENGED,
        (HandshakeState.UNPROVEN, BrokerWord.ERROR): HandshakeState.DONE,
        (HandshakeState.UNPROVEN, BrokerWord.PING): HandshakeState.UNPROVEN,
        (HandshakeState.CHALLENGED, BrokerWord.ERROR): HandshakeState.DONE,
        (HandshakeState.CHALLENGED, BrokerWord.PING): HandshakeState.CHALLENGED,
    }
)
"""What the broker may say when. A pair that is not here breaks the protocol."""

_WORDS = {
    BaseCommand.CONNECTED: BrokerWord.CONNECTED,
    BaseCommand.AUTH_CHALLENGE: BrokerWord.CHALLENGE,
    BaseCommand.ERROR: BrokerWord.ERROR,
    BaseCommand.PING: BrokerWord.PING,
}


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker took us in: its CONNECTED as a frame for the client, parsed, and the bytes that came behind it."""

    frame: Frame
    message: CommandConnected
    rest: bytes


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
        word = _WORDS.get(command.type, BrokerWord.OTHER)
        following = TRANSITIONS.get((self.state, word))
        if following is None:
            text = f"the broker sent {command_name(command.type)} during the handshake: {self.state.value}"
            raise RemoteProtocolError(text)
        self.state = following
        return self._event(word, frame, command)

    def _event(self, word: BrokerWord, frame: Frame, command: BaseCommand) -> HandshakeEvent:
        if word is BrokerWord.CONNECTED:
            return Connected(frame, command.connected, self._decoder.take_rest())
        if word is BrokerWord.ERROR:
            return Refused(int(command.error.error), str(command.error.message))
        if word is BrokerWord.PING:
            return SendData(pong())
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise RemoteProtocolError(f"more than {ROUNDS_MAX} authentication rounds")
        challenge = command.auth_challenge.challenge
        return Challenged(str(challenge.auth_method_name), bytes(challenge.auth_data))

    def challenge_answered(self, *, complete: bool = True) -> None:
        """Say that the answer to the last challenge is on its way; ``complete`` as for CONNECT."""
        if self.state is not HandshakeState.CHALLENGED:
            raise LocalProtocolError("an answer without a challenge")
        self.state = _awaiting(complete=complete)


def _awaiting(*, complete: bool) -> HandshakeState:
    return HandshakeState.BROKER if complete else HandshakeState.UNPROVEN
