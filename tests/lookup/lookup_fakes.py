"""Brokers, a network between them, and an auth worker: all in memory, all in this process."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio
import trio.testing

from proto import commands
from proto.addresses import HostPort
from proto.frames import FrameDecoder
from proto.lookup_kinds import kind_of
from proto.lookup_requests import LookupRequest, request_from_command
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, CommandLookupTopicResponse
from proto.rpc_pb2 import BrokerCredentialsResponse, Status
from proxy.config.types import Config
from proxy.runtime.dns.answers import Addresses, ResolutionFailed
from proxy.runtime.dns.resolver import DEFAULT_TTL_S, UNKNOWN
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError

Answer = BaseCommand | bytes | None
Script = Callable[[BaseCommand], Answer]

REDIRECT = CommandLookupTopicResponse.Redirect
CONNECT = CommandLookupTopicResponse.Connect
FAILED = CommandLookupTopicResponse.Failed


def make_config(**tables: dict[str, Any]) -> Config:
    """A configuration with some keys set, as a file would set them."""
    return msgspec.convert(tables, Config)


def lookup(topic: str = "t", request_id: int = 7, **fields: Any) -> BaseCommand:
    """A client's LOOKUP."""
    return BaseCommand(
        type=BaseCommand.LOOKUP,
        lookup_topic={"topic": topic, "request_id": request_id, "authoritative": False, **fields},
    )


def asked(command: BaseCommand | None = None) -> LookupRequest:
    """What a request asks a broker."""
    copy = BaseCommand()
    copy.CopyFrom(command or lookup())
    return request_from_command(copy, kind_of(copy))[0]


def lookup_response(request: BaseCommand, response: int, url: str = "", **fields: Any) -> BaseCommand:
    """A broker's answer to a LOOKUP."""
    body: dict[str, Any] = {"response": response, "request_id": request.lookup_topic.request_id, **fields}
    if url:
        body["broker_service_url"] = url
    return BaseCommand(type=BaseCommand.LOOKUP_RESPONSE, lookup_topic_response=body)


def connect_to(url: str, **fields: Any) -> Script:
    """A broker that sends every lookup to a URL."""
    return lambda request: lookup_response(request, CONNECT, url, **fields)


def redirect_to(url: str, **fields: Any) -> Script:
    """A broker that redirects every lookup."""
    return lambda request: lookup_response(request, REDIRECT, url, **fields)


class BrokerEnd:
    """The broker's end of one connection."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder(max_frame_bytes=1 << 24)

    async def read(self) -> BaseCommand | None:
        """The next command; None at the end."""
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(65536)
            if not data:
                return None
            self._decoder.receive_data(data)
        return commands.parse_command(frame.command)

    async def send(self, answer: Answer) -> None:
        """Send a command, or bytes as they are."""
        if isinstance(answer, BaseCommand):
            answer = commands.encode(answer)
        if answer:
            await self.stream.send_all(answer)


class FakeBroker:
    """Takes connections in, answers requests by a script, and remembers who asked what over which connection."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or (lambda _request: None)
        self.greeting: Answer = BaseCommand(
            type=BaseCommand.CONNECTED, connected={"server_version": "fake", "protocol_version": 21}
        )
        self.connects: list[CommandConnect] = []
        self.requests: list[tuple[str, BaseCommand]] = []
        """Original principal of the connection, and the request."""
        self.ends: list[BrokerEnd] = []
        self.end_of: dict[str, BrokerEnd] = {}
        """By original principal, the last one."""
        self.open = 0
        self.answers_pings = True
        self.hang_up_after_requests = 0
        """How many connections to close at their first request, instead of answering it."""

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        """One connection."""
        end = BrokerEnd(stream)
        self.ends.append(end)
        self.open += 1
        try:
            await self._serve(end)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open -= 1
            await trio.aclose_forcefully(stream)

    def greeting_for(self, connect: CommandConnect) -> Answer:
        """What it answers a CONNECT with."""
        return self.greeting

    def freeze(self) -> None:
        """Say nothing any more, neither to those who are here nor to those who come."""
        self.greeting, self.script, self.answers_pings = None, lambda _request: None, False

    async def _serve(self, end: BrokerEnd) -> None:
        principal = ""
        while (command := await end.read()) is not None:
            if command.type == BaseCommand.CONNECT:
                principal = command.connect.original_principal
                self.connects.append(command.connect)
                self.end_of[principal] = end
                await end.send(self.greeting_for(command.connect))
            elif command.type == BaseCommand.PING:
                if self.answers_pings:
                    await end.send(commands.pong())
            elif command.type not in {BaseCommand.PONG, BaseCommand.AUTH_RESPONSE}:
                self.requests.append((principal, command))
                if self.hang_up_after_requests:
                    self.hang_up_after_requests -= 1
                    return
                await end.send(self.script(command))


class Network:
    """What ``dial`` and the resolver reach. An address without a broker refuses; ``silent`` ones never answer."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.brokers: dict[tuple[str, int], FakeBroker] = {}
        self.silent: set[str] = set()
        self.dialled: list[tuple[str, int]] = []
        self.names: dict[str, list[list[str]]] = {}
        """A name's answers, one after the other; the last one stays."""
        self.resolved: list[str] = []
        self.resolvers: dict[str, set[object]] = {}
        """The resolvers by which a name was queried."""
        self.dial_delay_s = 0.0

    def add(self, host: str, address: str, broker: FakeBroker, port: int = 6650) -> FakeBroker:
        """A broker under a name and an address."""
        self.names[host] = [[address]]
        self.brokers[address, port] = broker
        return broker

    async def dial(self, address: str, port: int, _congestion_control: str) -> trio.abc.HalfCloseableStream:
        """In place of proxy.runtime.network.dialing._connect."""
        self.dialled.append((address, port))
        await trio.sleep(self.dial_delay_s)
        if address in self.silent:
            await trio.sleep_forever()
        broker = self.brokers.get((address, port))
        if broker is None:
            raise OSError(errno.ECONNREFUSED, "Connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(broker.serve, theirs)
        return ours

    async def query_addresses(self, servers: object, name: str, _timeout_s: float, ttl_max_s: float) -> Addresses:
        """In place of proxy.runtime.dns.resolver._query_addresses; ``servers`` are one resolver's own."""
        await trio.lowlevel.checkpoint()
        self.resolved.append(name)
        self.resolvers.setdefault(name, set()).add(servers)
        answers = self.names.get(name, [[]])
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if not addresses:
            raise ResolutionFailed(UNKNOWN)
        return Addresses(tuple(dict.fromkeys(addresses)), trio.current_time() + min(DEFAULT_TTL_S, ttl_max_s))


EXCHANGE_LIFETIME_S = 10.0
"""For how long an auth worker keeps an exchange that is not continued: by default limits.handshake_timeout_ms."""


class FakeAuth:
    """An auth worker's client and pool in one: gives credentials that are new each time, and forgets exchanges as the
    real one does.
    """

    def __init__(self, *, broken: bool = False) -> None:
        self.calls: list[Any] = []
        self.broken = broken
        self._ids = itertools.count(1)
        self._under_way: dict[int, float] = {}
        """Exchange → until when it is kept."""
        self.lifetime_s = 0.0
        """Of the credentials; 0: they do not end."""
        self.takes_s = 0.0
        self.has_rounds = False
        """Whether the broker owes a proof after the first round of an exchange."""

    def pick_client(self) -> Any:
        return self

    def new_id(self) -> int:
        return next(self._ids)

    async def call(
        self, _method: int, request: Any, _type: Any, *, timeout_s: float, retry: bool
    ) -> BrokerCredentialsResponse:
        await trio.lowlevel.checkpoint()
        self.calls.append(request)
        if self.broken:
            raise RpcError("no auth worker")
        until = self._under_way.pop(request.exchange_id, 0.0)
        if request.HasField("challenge") and until <= trio.current_time():
            raise RpcCallRefused(Status.INVALID_REQUEST, "a round of an exchange that is not under way")
        self._under_way[request.exchange_id] = trio.current_time() + EXCHANGE_LIFETIME_S
        if self.takes_s:
            await trio.sleep(self.takes_s)
        ends = int((time.time() + self.lifetime_s) * 1000) if self.lifetime_s else 0
        return BrokerCredentialsResponse(
            method="token",
            data=b"proxy-%d" % len(self.calls),
            incomplete=self.has_rounds and not request.HasField("challenge"),
            expires_at_unix_ms=ends,
        )


def host_port(host: str, port: int = 6650) -> HostPort:
    """Short for tests."""
    return HostPort(host, port)


async def gather(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run calls at the same time; their results, or the exceptions that they raised, in order."""
    results: list[Any] = [None] * len(calls)

    async def one(index: int) -> None:
        try:
            results[index] = await calls[index]()
        except Exception as error:  # noqa: BLE001 -- handed to the test
            results[index] = error

    async with trio.open_nursery() as nursery:
        for index in range(len(calls)):
            nursery.start_soon(one, index)
    return results


def connected(message: CommandConnected | None = None) -> BaseCommand:
    """A CONNECTED."""
    return BaseCommand(
        type=BaseCommand.CONNECTED, connected=message or CommandConnected(server_version="fake", protocol_version=21)
    )
