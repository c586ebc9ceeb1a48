"""proxy.runtime.network.broker_link: from an address to a broker that has said Connected, or the reason why not."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import ROUNDS_MAX
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect, ServerError
from proxy.config.types import Brokers
from proxy.runtime.network import dialing
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.network.tls import TlsFailed
from proxy.runtime.rpc.errors import RpcError

BROKER = HostPort("broker", 6650)
CONNECTED = commands.encode(
    BaseCommand(type=BaseCommand.CONNECTED, connected={"server_version": "b", "protocol_version": 21})
)


class FakeBrokers:
    """What can be dialled: address → what happens there."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.at: dict[str, Callable[[Broker], Awaitable[None]] | OSError | None] = {}
        self.dialled: list[tuple[str, int]] = []
        self.streams: list[trio.abc.HalfCloseableStream] = []

    async def connect(self, address: str, port: int, congestion_control: str) -> trio.abc.HalfCloseableStream:
        assert congestion_control == "unpaced"
        self.dialled.append((address, port))
        await trio.lowlevel.checkpoint()
        script = self.at[address]
        if script is None:
            await trio.sleep_forever()
        if isinstance(script, OSError):
            raise script
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(ours)
        self._nursery.start_soon(script, Broker(theirs))  # type: ignore[arg-type]
        return ours


class Broker:
    """The broker's end."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.heard: list[BaseCommand] = []
        self._decoder = FrameDecoder(max_frame_bytes=1 << 20)

    async def receive(self) -> BaseCommand | None:
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(4096)
            if not data:
                return None
            self._decoder.receive_data(data)
        self.heard.append(commands.parse_command(frame.command))
        return self.heard[-1]

    async def send(self, *data: bytes) -> None:
        await self.stream.send_all(b"".join(data))


class FakeCredentials:
    def __init__(self, *, broken_from: int = 1000, delay_s: float = 0.0, proof_after: int = 0) -> None:
        self.challenges: list[bytes | None] = []
        self._proof_after = proof_after
        self._broken_from = broken_from
        self._delay_s = delay_s

    @property
    def complete(self) -> bool:
        return len(self.challenges) > self._proof_after

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        await trio.sleep(self._delay_s)
        if len(self.challenges) >= self._broken_from:
            raise RpcError("no auth worker")
        self.challenges.append(challenge)
        return "token", b"answer-%d" % (len(self.challenges) - 1)


@pytest.fixture
def brokers(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> FakeBrokers:
    fake = FakeBrokers(nursery)
    monkeypatch.setattr(dialing, "_connect", fake.connect)
    return fake


def make_connect(method: str, data: bytes) -> CommandConnect:
    return CommandConnect(client_version="test", auth_method_name=method, auth_data=data, original_principal="alice")


async def open_link(*addresses: str, credentials: Any = None, **limits: Any) -> BrokerLink:
    link_factory = BrokerLinkFactory(Dialer(msgspec.convert(limits, Brokers)), 4096, "pulsar-trio-proxy-test")
    return await link_factory.open_link(BROKER, addresses, credentials or FakeCredentials(), make_connect)


async def failure(*addresses: str, **how: Any) -> BrokerLinkFailed:
    with pytest.raises(BrokerLinkFailed) as caught:
        await open_link(*addresses, **how)
    return caught.value


@pytest.mark.conforms("pip-1.11")
async def test_connected(brokers: FakeBrokers) -> None:
    ends: list[Broker] = []

    async def script(broker: Broker) -> None:
        ends.append(broker)
        await broker.receive()
        await broker.send(CONNECTED)

    brokers.at["10.0.0.1"] = script
    link = await open_link("10.0.0.1")
    assert link.connected.message.server_version == "b"
    assert link.connected.frame.encode() == CONNECTED
    assert link.connected.trailing_data == b""
    [command] = ends[0].heard
    assert (command.connect.auth_method_name, command.connect.auth_data) == ("token", b"answer-0")
    assert command.connect.original_principal == "alice"


async def test_nothing_but_connect_is_sent_before_connected(
    brokers: FakeBrokers, autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[bytes] = []

    async def script(broker: Broker) -> None:
        await broker.receive()
        with trio.move_on_after(2):
            seen.append(bytes(await broker.stream.receive_some(100)))
        await broker.send(CONNECTED)

    brokers.at["10.0.0.1"] = script
    await open_link("10.0.0.1")
    assert seen == []


@pytest.mark.parametrize("rest", [b"x", b"\x00\x00\x00\x05half", commands.ping() * 3])
async def test_bytes_behind_connected_are_kept(brokers: FakeBrokers, rest: bytes) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(CONNECTED, rest)

    brokers.at["10.0.0.1"] = script
    assert (await open_link("10.0.0.1")).connected.trailing_data == rest


async def test_connected_split_at_every_byte(brokers: FakeBrokers) -> None:
    for cut in range(1, len(CONNECTED)):

        async def script(broker: Broker, cut: int = cut) -> None:
            await broker.receive()
            await broker.send(CONNECTED[:cut])
            await trio.testing.wait_all_tasks_blocked()
            await broker.send(CONNECTED[cut:])

        brokers.at["10.0.0.1"] = script
        assert (await open_link("10.0.0.1")).connected.frame.encode() == CONNECTED


# ---- dialling


async def test_unreachable(brokers: FakeBrokers, autojump_clock: trio.testing.MockClock) -> None:
    brokers.at = {"10.0.0.1": OSError(errno.ECONNREFUSED, "Connection refused"), "10.0.0.2": None}
    failed = await failure("10.0.0.1", "10.0.0.2", connect_timeout_ms=2000)
    assert (failed.reason, failed.code) == ("unreachable", ServerError.ServiceNotReady)
    assert failed.message == "The proxy cannot connect to the broker"
    assert str(failed).startswith("cannot connect to broker:6650: 10.0.0.1: Connection refused; 10.0.0.2: no answer")
    assert "10.0.0" not in failed.message


async def test_no_tls_with_a_broker(brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_tls(*_: object) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        raise TlsFailed("the peer's certificate is not accepted: certificate has expired")

    monkeypatch.setattr(dialing, "_connect", no_tls)
    failed = await failure("10.0.0.1")
    assert (failed.reason, failed.code) == ("tls", ServerError.ServiceNotReady)
    assert failed.message == "The proxy cannot connect to the broker"
    assert "10.0.0.1: the peer's certificate is not accepted: certificate has expired" in str(failed)


async def test_no_address(brokers: FakeBrokers) -> None:
    assert (await failure()).reason == "unreachable"


# ---- handshakes that fail


async def silent(broker: Broker) -> None:
    await broker.receive()


@pytest.mark.parametrize("script", [silent, None])
async def test_silent(brokers: FakeBrokers, script: Any, autojump_clock: trio.testing.MockClock) -> None:
    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1", connect_timeout_ms=60_000, handshake_timeout_ms=3000)
    assert (failed.reason, failed.code) == ("timeout", ServerError.ServiceNotReady)
    assert trio.current_time() == pytest.approx(3)


async def test_the_timeout_covers_the_credentials(brokers: FakeBrokers, autojump_clock: trio.testing.MockClock) -> None:
    failed = await failure("10.0.0.1", credentials=FakeCredentials(delay_s=60), handshake_timeout_ms=3000)
    assert failed.reason == "timeout"
    assert brokers.dialled == []


async def test_refused_with_code_and_text(brokers: FakeBrokers) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(commands.error(commands.NO_REQUEST_ID, ServerError.AuthorizationError, "Invalid roles."))

    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1")
    assert (failed.reason, failed.code, failed.message) == (
        "refused",
        ServerError.AuthorizationError,
        "Invalid roles.",
    )
    assert "AuthorizationError" in str(failed)


async def test_refused_with_a_code_that_is_newer_than_this_proxy(brokers: FakeBrokers) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(commands.error(commands.NO_REQUEST_ID, 99, "new"))

    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1")
    assert (failed.code, failed.message) == (99, "new")


async def test_the_proxys_own_credentials_are_not_the_clients(brokers: FakeBrokers) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(commands.error(commands.NO_REQUEST_ID, ServerError.AuthenticationError, "token of proxy bad"))

    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1")
    assert failed.code == ServerError.ServiceNotReady
    assert failed.message == "The broker does not accept the proxy's own credentials"
    assert "token of proxy bad" in str(failed)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff",
        b"\x00\x00\x10\x01",  # one more than the limit
        commands.encode(BaseCommand(type=BaseCommand.SUCCESS)),
        commands.encode(BaseCommand(type=BaseCommand.CONNECT, connect={"client_version": "x"})),
        b"",
    ],
)
async def test_a_handshake_that_is_none(brokers: FakeBrokers, data: bytes) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        if data:
            await broker.send(data)
        else:
            await broker.stream.aclose()

    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1")
    assert (failed.reason, failed.code) == ("handshake", ServerError.ServiceNotReady)


async def test_closed_before_connect(brokers: FakeBrokers) -> None:
    async def script(broker: Broker) -> None:
        await broker.stream.aclose()

    brokers.at["10.0.0.1"] = script
    assert (await failure("10.0.0.1")).reason == "handshake"


@pytest.mark.parametrize("story", ["refused", "silent", "garbage", "cancelled"])
async def test_a_connection_is_closed_if_the_broker_handshake_fails_in_any_way(
    brokers: FakeBrokers, story: str, autojump_clock: trio.testing.MockClock
) -> None:
    closed = trio.Event()

    async def script(broker: Broker) -> None:
        await broker.receive()
        if story == "refused":
            await broker.send(commands.error(commands.NO_REQUEST_ID, 4, "no"))
        elif story == "garbage":
            await broker.send(b"\xff" * 8)
        assert await broker.receive() is None
        closed.set()

    brokers.at["10.0.0.1"] = script
    if story == "cancelled":
        with trio.move_on_after(1):
            await open_link("10.0.0.1")
    else:
        await failure("10.0.0.1")
    await closed.wait()


# ---- challenges


@pytest.mark.conforms("pip-30.15")
async def test_challenge_rounds(brokers: FakeBrokers) -> None:
    answers: list[bytes] = []

    async def script(broker: Broker) -> None:
        await broker.receive()
        for number in range(3):
            await broker.send(commands.auth_challenge("b", 21, "token", b"challenge-%d" % number))
            command = await broker.receive()
            assert command is not None
            answers.append(command.auth_response.response.auth_data)
            assert command.auth_response.client_version == "pulsar-trio-proxy-test"
        await broker.send(CONNECTED)

    brokers.at["10.0.0.1"] = script
    credentials = FakeCredentials()
    await open_link("10.0.0.1", credentials=credentials)
    assert credentials.challenges == [None, b"challenge-0", b"challenge-1", b"challenge-2"]
    assert answers == [b"answer-1", b"answer-2", b"answer-3"]


@pytest.mark.conforms("pip-30.14")
@pytest.mark.parametrize("challenges", [0, 1, 2])
async def test_a_broker_that_has_not_proved_itself_does_not_take_us_in(brokers: FakeBrokers, challenges: int) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        for _ in range(challenges):
            await broker.send(commands.auth_challenge("b", 21, "token", b"challenge"))
            await broker.receive()
        await broker.send(CONNECTED)

    brokers.at["10.0.0.1"] = script
    if challenges == 2:
        await open_link("10.0.0.1", credentials=FakeCredentials(proof_after=2))
    else:
        failed = await failure("10.0.0.1", credentials=FakeCredentials(proof_after=2))
        assert failed.reason == "handshake"
        assert "the broker's proof is awaited" in str(failed)


async def test_rounds_are_capped(brokers: FakeBrokers) -> None:
    async def script(broker: Broker) -> None:
        while await broker.receive() is not None:
            await broker.send(commands.auth_challenge("b", 21, "token", b"more"))

    brokers.at["10.0.0.1"] = script
    credentials = FakeCredentials()
    assert (await failure("10.0.0.1", credentials=credentials)).reason == "handshake"
    assert len(credentials.challenges) == 1 + ROUNDS_MAX


@pytest.mark.parametrize("broken_from", [0, 1])
async def test_no_credentials_to_be_had(brokers: FakeBrokers, broken_from: int) -> None:
    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(commands.auth_challenge("b", 21, "token", b"q"))

    brokers.at["10.0.0.1"] = script
    failed = await failure("10.0.0.1", credentials=FakeCredentials(broken_from=broken_from))
    assert (failed.reason, failed.message) == ("credentials", "The proxy cannot connect to the broker")


async def test_ping_in_the_handshake_is_answered(brokers: FakeBrokers) -> None:
    kinds: list[int] = []

    async def script(broker: Broker) -> None:
        await broker.receive()
        await broker.send(commands.ping())
        command = await broker.receive()
        assert command is not None
        kinds.append(command.type)
        await broker.send(CONNECTED)

    brokers.at["10.0.0.1"] = script
    await open_link("10.0.0.1")
    assert kinds == [BaseCommand.PONG]
