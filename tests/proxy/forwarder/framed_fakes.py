"""Sessions that expire: a clock in the test's hand, frames, and a reauthenticator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from pulsar_bytes import varint

from proto import commands
from proto.commands import parse_command
from proto.connect_rules import refusal_for_denial
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand
from proto.rpc_pb2 import Principal, StoredRelay
from proto.session_clock import SessionClock
from proxy import SERVER_VERSION
from proxy.forwarder.lifetime.terms import SessionTerms
from proxy.forwarder.workers.authentication import ClientIdentity, Denial, Verdict
from proxy.runtime.network.credentials import Credentials, NoCredentials
from proxy.runtime.rpc.errors import RpcError

UNIX_MS = 1_700_000_000_000.0
CHALLENGE = commands.auth_challenge("proxy", 21, "token", commands.AUTH_REFRESH)
FRAME_BYTES_MAX = 200_000
ANSWER_BYTES_MAX = 8_000


class Now:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def alice(**fields: Any) -> Principal:
    return Principal(**({"type": "User", "name": "alice", "method": "token"} | fields))


def send_frame(payload: bytes = b"", sequence: int = 1, messages: int = 1) -> bytes:
    """A SEND with a payload."""
    command = BaseCommand(type=BaseCommand.SEND, send={"producer_id": 1, "sequence_id": sequence}).SerializeToString()
    if messages != 1:
        inner = BaseCommand.FromString(command).send.SerializeToString() + b"\x18" + varint(messages)
        command = b"\x08\x06\x32" + varint(len(inner)) + inner
    return encode_frame(command, payload)


def message_frame(payload: bytes = b"") -> bytes:
    """A MESSAGE with a payload; its fields do not matter here."""
    return encode_frame(b"\x08\x09\x4a\x04\x08\x01\x12\x00", payload)


def producer_frame() -> bytes:
    return encode_frame(b"\x08\x05\x2a\x02\x18\x07")


def answer(data: bytes = b"fresh", method: str = "token") -> bytes:
    return commands.auth_response("Pulsar-Java-v4", 21, method, data)


@dataclass
class FakeReauthenticator:
    """Decides on answers as it is told to; knows what it was given."""

    verdict: Callable[[bytes], Verdict] = lambda data: identity(data)  # noqa: PLW0108
    given: list[bytes] = field(default_factory=list)
    gate: trio.Event | None = None

    async def __call__(self, command: BaseCommand) -> Verdict:
        data = bytes(command.auth_response.response.auth_data)
        self.given.append(data)
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        return self.verdict(data)

    def recall(self, _relay: StoredRelay) -> Callable[[BaseCommand], Awaitable[Verdict]]:
        return self


BROKER_ASKS = commands.auth_challenge("broker", 21, "token", commands.AUTH_REFRESH)
"""What a broker says that wants fresh credentials of the proxy's."""

SERVER_FIRST = commands.auth_challenge("broker", 21, "token", b"server first")
"""The broker's challenge of a further round."""

BROKER_HOST = "b0"


def proxys_answer(data: bytes, method: str = "token") -> bytes:
    """What the proxy must say to it."""
    return commands.auth_response(SERVER_VERSION, commands.PROTOCOL_VERSION, method, data)


@dataclass
class FakeCredentials:
    """The proxy's credentials: each exchange answers b"1", b"2", … in its first round, and counts its further ones.

    ``rounds``: of each exchange; ``failing``: how many calls fail from now on; ``gate``: answers wait for it.
    """

    rounds: int = 1
    padding: bytes = b""
    failing: int = 0
    gate: trio.Event | None = None
    configured: bool = True
    begun: int = 0
    hosts: list[str] = field(default_factory=list)
    challenges: list[bytes | None] = field(default_factory=list)

    def begin(self, host: str) -> Credentials:
        self.hosts.append(host)
        self.begun += 1
        return FakeExchange(self, b"%d" % self.begun) if self.configured else NoCredentials()  # type: ignore[return-value]


class FakeExchange:
    """One exchange, in order: a challenge before its beginning, or behind its end, is refused."""

    expires_at_unix_ms = 0

    def __init__(self, shared: FakeCredentials, name: bytes) -> None:
        self._shared = shared
        self._name = name
        self._answered = 0
        self.complete = False

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        shared = self._shared
        shared.challenges.append(challenge)
        await trio.lowlevel.checkpoint()
        if shared.gate is not None:
            await shared.gate.wait()
        if shared.failing:
            shared.failing -= 1
            raise RpcError("no auth worker")
        if (challenge is None) != (self._answered == 0) or self._answered == shared.rounds:
            raise RpcError("a round of an exchange that is not under way")
        self._answered += 1
        self.complete = self._answered == shared.rounds
        return "token", self._name + b"." * (self._answered - 1) + shared.padding


def identity(_data: bytes = b"", **fields: Any) -> ClientIdentity:
    return ClientIdentity(alice(**fields))


def denied(_data: bytes = b"") -> Denial:
    return Denial(refusal_for_denial("bad_token"), "bad_token")


def session(
    now: Now, reauthenticator: FakeReauthenticator, *, lifetime_ms: int = 100_000, **fields: Any
) -> SessionTerms:
    """A session that lives so long, and is challenged after 85 % of it."""
    clock = SessionClock(alice(), lifetime_ms_max=lifetime_ms, now_s=now(), now_unix_ms=UNIX_MS, fraction=0.0)
    known: dict[str, Any] = {
        "principal": alice(),
        "clock": clock,
        "reauthenticate": reauthenticator,
        "frame_bytes_max": FRAME_BYTES_MAX,
        "answer_bytes_max": ANSWER_BYTES_MAX,
        "lifetime_ms_max": lifetime_ms,
        "challenge": CHALLENGE,
    }
    return SessionTerms(**(known | fields))


def error_in(frame: bytes) -> BaseCommand:
    """The command of a frame of the proxy's own."""
    return parse_command(frame[8:])


def disguised(frame: bytes) -> bytes:
    """What begins as a PING, and is this to a reader of the rest."""
    size = int.from_bytes(frame[4:8], "big")
    return encode_frame(b"\x08\x12" + frame[8 : 8 + size], frame[8 + size :])


NEARLY_PINGS = [
    encode_frame(b"\x08\x12\x92\x01\x00", b"a passenger"),
    encode_frame(b"\x08\x12\x92\x01\x80\x00"),
    encode_frame(b"\x08\x13\x92\x01\x00"),
    encode_frame(b"\x08\x12"),
]
"""Commands of type PING or PONG, but none that a client writes."""
