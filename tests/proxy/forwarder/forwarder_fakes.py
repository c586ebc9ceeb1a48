"""A client, a broker and the other workers, as a session sees them: all in memory."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from relay_fakes import new_relays

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import Connected
from proto.frames import Frame, FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected
from proto.rpc_frames import Reply
from proto.rpc_pb2 import (
    AuthenticateRequest,
    AuthenticateResponse,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    OriginalData,
    Principal,
    Status,
    StoredRelay,
)
from proxy.config.types import Config
from proxy.forwarder.client.connection import ClientConnection
from proxy.forwarder.client.phases import Phase
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.listen.eviction import PreAuthConnection
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.workers.authentication import (
    AuthenticationExchange,
    ClientEndpoint,
    ClientIdentity,
    ExchangeSettings,
)
from proxy.forwarder.workers.broker_links import BrokerRequest
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.fairness.byte_budget import ByteBudget
from proxy.runtime.fairness.fair_capacity import FairCapacity
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError
from proxy.runtime.rpc.replies import PendingCall

CLIENT = "192.0.2.7:4000"
CERTIFICATE = b"the client's certificate"

SECRET = b"s3cret-t0ken"
AUTHENTICATED = {"enabled": True, "failure_delay_ms": 200}
"""The table `authentication` of a cluster that authenticates its clients."""

ALICE = Principal(type="User", name="alice", method="token")


def make_config(**tables: dict[str, Any]) -> Config:
    """A configuration with some keys set, as a file would set them."""
    return msgspec.convert(tables, Config)


def connect(target: str = "", **fields: Any) -> BaseCommand:
    """A client's CONNECT."""
    body: dict[str, Any] = {
        "client_version": "test",
        "protocol_version": 21,
        "auth_method_name": "token",
        "auth_data": SECRET,
        **fields,
    }
    if target:
        body["proxy_to_broker_url"] = target
    return BaseCommand(type=BaseCommand.CONNECT, connect=body)


def auth_response(data: bytes, method: str = "token") -> BaseCommand:
    """A client's answer to a challenge."""
    return BaseCommand(
        type=BaseCommand.AUTH_RESPONSE,
        auth_response={"response": {"auth_method_name": method, "auth_data": data}, "protocol_version": 21},
    )


def lookup(topic: str = "t", request_id: int = 7) -> BaseCommand:
    """A client's LOOKUP."""
    return BaseCommand(type=BaseCommand.LOOKUP, lookup_topic={"topic": topic, "request_id": request_id})


def lookup_answer(request_id: int = 7, url: str = "pulsar://b0:6650") -> BaseCommand:
    """A lookup worker's answer."""
    return BaseCommand(
        type=BaseCommand.LOOKUP_RESPONSE,
        lookup_topic_response={"request_id": request_id, "response": 1, "broker_service_url": url},
    )


def denied(reason: str = "bad_token") -> AuthenticateResponse:
    """An auth worker's no."""
    return AuthenticateResponse(denied={"reason": reason})


def authenticated(principal: Principal = ALICE) -> AuthenticateResponse:
    """An auth worker's yes."""
    return AuthenticateResponse(authenticated={"principal": principal, "sealed_principal": b"sealed"})


def challenge(data: bytes) -> AuthenticateResponse:
    """An auth worker's question."""
    return AuthenticateResponse(challenge=data)


class Peer:
    """One end of a connection that speaks Pulsar's frames."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder(max_frame_bytes=1 << 26)

    async def send(self, *what: BaseCommand | bytes) -> None:
        """Send commands (or bytes as they are) in one piece."""
        await self.stream.send_all(b"".join(one if isinstance(one, bytes) else commands.encode(one) for one in what))

    async def receive(self) -> BaseCommand | None:
        """The next command; None at the end of the stream."""
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(65536)
            if not data:
                return None
            self._decoder.receive_data(data)
        return commands.parse_command(frame.command)

    async def expect_command(self, kind: int) -> BaseCommand:
        """The next command, which must be of a kind."""
        command = await self.receive()
        assert command is not None, f"the end of the stream instead of {commands.command_name(kind)}"
        assert command.type == kind, f"{command} instead of {commands.command_name(kind)}"
        return command

    async def expect_error(self) -> tuple[int, str]:
        """The connection's error (request id -1), and that nothing follows it."""
        error = (await self.expect_command(BaseCommand.ERROR)).error
        assert error.request_id == commands.NO_REQUEST_ID
        await self.expect_end()
        return error.error, error.message

    async def expect_end(self) -> None:
        """The end of the stream; then close, as a client does."""
        assert await self.receive() is None
        await self.stream.aclose()

    async def read_exactly(self, size: int) -> bytes:
        """So many bytes, whatever they are."""
        data = self._decoder.take_unread_data()
        while len(data) < size:
            more = await self.stream.receive_some(size - len(data))
            assert more, f"the end of the stream after {data!r}"
            data += more
        return data

    async def read_all(self) -> bytes:
        """Everything up to the end of the stream."""
        data = self._decoder.take_unread_data()
        while more := await self.stream.receive_some(65536):
            data += more
        return data


class FakeAuthentication:
    """An auth worker, which answers rounds from a list; the rounds themselves are led by the product's own code.

    ``nursery``: for answers to calls without a task; None: it takes no such calls.
    """

    def __init__(self, answers: list[Any], nursery: trio.Nursery | None = None) -> None:
        self.answers = answers
        self.nursery = nursery
        self.cancelled: list[int] = []
        self.requests: list[AuthenticateRequest] = []
        self.given_up: list[int] = []
        self._ids = itertools.count(1)

    @property
    def rounds(self) -> list[tuple[str, bytes]]:
        """Method and data of each round."""
        return [(request.method, request.data) for request in self.requests]

    def new_id(self) -> int:
        return next(self._ids)

    def send_notification(self, method: int, request: AuthenticateRequest, *, timeout_s: float) -> None:
        """In place of RpcClient.send_notification."""
        assert (method, request.over) == (Method.AUTHENTICATE, True)
        self.given_up.append(request.authentication_id)

    def start_call(
        self, method: int, body: bytes, on_reply: Callable[[Reply | None], None], *, timeout_ms: int, deadline: float
    ) -> int | None:
        """In place of RpcClient.start_call."""
        assert method == Method.AUTHENTICATE
        assert deadline - timeout_ms / 1000 <= trio.current_time() + 0.001  # however late it is since they were chosen
        if self.nursery is None:
            return None
        number, request = next(self._ids), AuthenticateRequest.FromString(body)
        self.nursery.start_soon(self._answer, number, request, on_reply)
        return number

    async def _answer(
        self, number: int, request: AuthenticateRequest, on_reply: Callable[[Reply | None], None]
    ) -> None:
        try:
            response = await self._respond(request)
        except RpcCallRefused as error:
            reply = Reply(number, error.status, detail=str(error))
        except RpcError:
            reply = None
        else:
            reply = Reply(number, Status.OK, response.SerializeToString())
        if number not in self.cancelled:
            on_reply(reply)

    def cancel_call(self, number: int) -> None:
        """In place of RpcClient.cancel_call."""
        self.cancelled.append(number)

    async def call(
        self,
        method: int,
        request: AuthenticateRequest,
        _type: type[AuthenticateResponse],
        *,
        timeout_s: float,
        retry: bool,
    ) -> AuthenticateResponse:
        """In place of RpcClient.call."""
        assert method == Method.AUTHENTICATE
        assert retry == (request.first_round and request.method == "token"), "what has one round may be asked twice"
        assert timeout_s >= 0
        return await self._respond(request)

    async def _respond(self, request: AuthenticateRequest) -> AuthenticateResponse:
        self.requests.append(request)
        await trio.lowlevel.checkpoint()
        answer = self.answers.pop(0) if self.answers else authenticated()
        if callable(answer):
            answer = await answer()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, AuthenticateResponse)
        return answer


Answerer = Callable[[bytes], Awaitable[BaseCommand]]
"""Answers one request of an Envelope."""


class SentEnvelope:
    """An Envelope under way, as the lookup worker at its other end sees it."""

    def __init__(self, envelope: bytes, take: Callable[[Reply | None], None], deadline: float) -> None:
        self.envelope = EnvelopeRequest.FromString(envelope)
        self.deadline = deadline
        self._take = take

    @property
    def requests(self) -> list[bytes]:
        return list(self.envelope.requests)

    @property
    def topics(self) -> list[str]:
        """What its lookups ask for."""
        return [commands.parse_command(request).lookup_topic.topic for request in self.envelope.requests]

    def send(self, response: EnvelopeResponse | bytes, *, more: bool = False) -> None:
        """A part of the reply."""
        body = response if isinstance(response, bytes) else response.SerializeToString()
        self._take(Reply(0, Status.OK, body, has_more=more))

    def answer(self, *indices: int, more: bool = False, padding: int = 0) -> None:
        """Answer requests of it, by their numbers."""
        frames = b"".join(self.frame(index, padding) for index in indices)
        self.send(EnvelopeResponse(frames=frames, answered=indices), more=more)

    def frame(self, index: int, padding: int = 0) -> bytes:
        """The frame that answers one of its requests."""
        request_id = commands.parse_command(self.envelope.requests[index]).lookup_topic.request_id
        return commands.encode(lookup_answer(request_id, "pulsar://b0:6650" + "/" * padding))

    def refuse(self, status: int) -> None:
        """Refuse the call."""
        self._take(Reply(0, status, detail="internal words"))

    def lose(self) -> None:
        """The worker goes, or the time is over."""
        self._take(None)


class FakeWorkerClients:
    """proxy.forwarder.workers.clients.WorkerClients, and its BrokerLinks, without workers.

    ``answer_by`` answers each request; where it is None, the test answers what it finds in ``sent``. ``fast_path``:
    whether an Envelope can go out at once.
    """

    def __init__(self, config: Config, nursery: trio.Nursery) -> None:
        self.config = config
        self.nursery = nursery
        self.broker_links = self
        self.room = FairCapacity(config.limits.max_topic_lists_bytes, config.limits.max_broker_frame_bytes)
        self.budget = ByteBudget(config.limits.max_lookup_bytes)
        self.fast_path = True
        self.sent: list[SentEnvelope] = []
        self.answer_by: Answerer | None = self.answer_at_once
        self.authentication = FakeAuthentication([], nursery)
        self.authentication_clients: list[ClientEndpoint] = []
        self.profile: CommandConnected | None = None
        self.is_profile_fresh = False
        self.profile_asked = 0
        self.profile_gate: trio.Event | None = None
        self.forwarded: list[tuple[bytes, ClientIdentity, str]] = []
        self.opened: list[tuple[CommandConnect, ClientIdentity, str]] = []
        self.announcements: list[bytes] = []
        self.broker_gate = trio.Event()
        self.broker_gate.set()
        self.broker_failure: Exception | None = None
        self.broker_connected = CommandConnected(server_version="the broker", protocol_version=21)
        self.broker_rest = b""
        self.answers_challenges = False
        self.original_data = OriginalData.ORIGINAL_DATA_UNKNOWN
        self.broker_stream: trio.abc.HalfCloseableStream
        self.broker: Peer
        self.connect_broker(*trio.testing.memory_stream_pair())

    def connect_broker(self, ours: trio.abc.HalfCloseableStream, theirs: trio.abc.HalfCloseableStream) -> None:
        """Put a broker at the other side of a connection."""
        self.broker_stream, self.broker = ours, Peer(theirs)

    def new_authentication_exchange(self, client: ClientEndpoint, connect: CommandConnect) -> AuthenticationExchange:
        assert (client.address, client.certificate) == (CLIENT, CERTIFICATE)
        self.authentication_clients.append(client)
        return AuthenticationExchange(
            self.authentication,  # type: ignore[arg-type]
            client,
            connect,
            ExchangeSettings(
                timeout_s=seconds(self.config.limits.handshake_timeout_ms),
                forwards_credentials=self.config.brokers.forward_authorization_credentials,
                one_round_methods=frozenset({"token"}),
            ),
        )

    async def broker_profile(self) -> CommandConnected | None:
        self.profile_asked += 1
        if self.profile_gate is not None:
            await self.profile_gate.wait()
        await trio.lowlevel.checkpoint()
        return self.profile

    def envelope_head(self, identity: ClientIdentity, client_address: str) -> bytes:
        self._identity = identity
        return WorkerClients.envelope_head(identity, client_address)

    answer_timeout_s = property(lambda self: seconds(self.config.limits.lookup_timeout_ms) + 1.0)

    def forward_envelope_now(self, envelope: bytes, deadline: float, on_reply: Callable[[Reply | None], None]) -> bool:
        if self.fast_path:
            self._send(SentEnvelope(envelope, on_reply, deadline))
        return self.fast_path

    @asynccontextmanager
    async def forward_envelope(self, envelope: bytes, deadline: float) -> AsyncIterator[PendingCall]:
        call = PendingCall()
        self._send(
            SentEnvelope(envelope, lambda reply: call.on_lost() if reply is None else call.on_part(reply), deadline)
        )
        yield call

    def _send(self, sent: SentEnvelope) -> None:
        self.sent.append(sent)
        self.forwarded += [(request, self._identity, sent.envelope.client_address) for request in sent.requests]
        if self.answer_by is not None:
            self.nursery.start_soon(self._answer, sent, self.answer_by)

    async def _answer(self, sent: SentEnvelope, answer_by: Answerer) -> None:
        left = len(sent.requests)

        async def one(index: int) -> None:
            nonlocal left
            frame = commands.encode(await answer_by(sent.requests[index]))
            left -= 1
            sent.send(EnvelopeResponse(frames=frame, answered=[index]), more=left > 0)

        async with trio.open_nursery() as nursery:
            for index in range(left):
                nursery.start_soon(one, index)

    @staticmethod
    async def answer_at_once(request: bytes) -> BaseCommand:
        await trio.lowlevel.checkpoint()
        return lookup_answer(commands.parse_command(request).lookup_topic.request_id)

    @staticmethod
    def known_target(_asked: BrokerRequest) -> None:
        return None  # a task opens it

    async def open_link(self, asked: BrokerRequest) -> BrokerLink:
        self.opened.append((asked.connect, asked.identity, asked.client_address))
        self.announcements.append(asked.announcement)
        await self.broker_gate.wait()
        if self.broker_failure is not None:
            raise self.broker_failure
        greeting = BaseCommand(type=BaseCommand.CONNECTED, connected=self.broker_connected)
        frame = Frame(greeting.SerializeToString())
        return BrokerLink(
            HostPort("b0", 6650),
            self.broker_stream,
            Connected(frame, self.broker_connected, self.broker_rest),
            self.answers_challenges,
            self.original_data,
        )


class Play:
    """A session under test: the client at one side, fakes at the others."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        lockstep: bool = False,
        pre_auth: PreAuthConnection | None = None,
        streams: tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream] | None = None,
        **tables: dict[str, Any],
    ) -> None:
        self.nursery = nursery
        self.registry = CollectorRegistry()
        self.metrics = ForwarderMetrics(self.registry)
        self.ended_relays: list[StoredRelay] = []
        self._a_relay_ended = trio.Event()
        self.relays = new_relays(nursery, self._relay_ended)
        self.registry.register(self.relays)
        self.handshakes = InFlightCounter()
        self.workers = FakeWorkerClients(make_config(**tables), nursery)
        pair = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
        ours, theirs = pair() if streams is None else streams
        self.stream = ours
        self.client = Peer(theirs)
        self.ended = trio.Event()
        deadlines = Deadlines()
        nursery.start_soon(deadlines.run)
        self.session = ClientConnection(
            ours,
            ClientEndpoint(CLIENT, trio.current_time(), CERTIFICATE),
            ConnectionServices(self.workers, self.relays, self.metrics, self.handshakes, nursery, deadlines),  # type: ignore[arg-type]
            lambda _session: self.ended.set(),
            pre_auth,
        )
        self.session.start_serving()

    async def end(self) -> str:
        """Wait for the session's end; its cause."""
        await self.ended.wait()
        assert not self.handshakes.count, "however it ended, it is decided"
        return self.session.cause.value

    def _relay_ended(self, about: StoredRelay) -> None:
        self.ended_relays.append(about)
        self._a_relay_ended.set()

    async def relay_ended(self) -> StoredRelay:
        """Wait for the end of the relay that the session became; what was known about it."""
        await self.ended.wait()
        assert self.session.phase is Phase.RELAYED
        await self._a_relay_ended.wait()
        return self.ended_relays[0]

    async def in_lookup_mode(self) -> Play:
        """Go through CONNECT."""
        await self.client.send(connect())
        await self.client.expect_command(BaseCommand.CONNECTED)
        return self

    def value(self, name: str, **labels: str) -> float | None:
        """A metric's value."""
        return self.registry.get_sample_value(name, labels)
