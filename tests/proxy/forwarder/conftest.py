"""Sessions and relays to play with."""

import ssl
from collections.abc import AsyncIterator, Callable

import pytest
import trio
from adoption_fakes import fuse  # noqa: F401 -- a fixture
from e2e.lab.certificates import Authority
from forwarder_fakes import Play
from framed_fakes import FakeCredentials, FakeReauthenticator, Now
from lifetime_fakes import life  # noqa: F401 -- a fixture
from relay_fakes import CopiedRelays, Engine, Lane, Place, open_lane, open_place

from proxy.config.types import BrokerTls, ListenerTls, Relay
from proxy.forwarder.relay import engine as engine_module
from proxy.forwarder.relay import manager
from proxy.forwarder.relay import sockets as relay_sockets
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import broker_context, listener_contexts


@pytest.fixture(autouse=True)
def streams_without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in memory have no socket whose options could be set; all others are tuned as ever."""
    tune = relay_sockets.tune_for_relay

    def tune_sockets(client: object, broker: object, config: Relay) -> None:
        if isinstance(client, TcpStream) and isinstance(broker, TcpStream):
            tune(client, broker, config)

    monkeypatch.setattr(manager, "tune_for_relay", tune_sockets)


@pytest.fixture
def play(nursery: trio.Nursery) -> Callable[..., Play]:
    """Start a session; takes the configuration's tables."""
    return lambda **kwargs: Play(nursery, **kwargs)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with open_place() as place:
        yield place


@pytest.fixture
async def copied(nursery: trio.Nursery) -> AsyncIterator[CopiedRelays]:
    copied = CopiedRelays(nursery)
    yield copied
    copied.close()


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    async with open_lane() as lane:
        yield lane


@pytest.fixture
async def narrow_lane() -> AsyncIterator[Lane]:
    async with open_lane(buffer_bytes=4096) as lane:
        yield lane


@pytest.fixture
def now(place: Place) -> Now:
    """The clock of the forwarders of this place."""
    place.now = Now()
    return place.now


@pytest.fixture
def reauthenticator(place: Place) -> FakeReauthenticator:
    """The reauthenticator of clients of a predecessor's relays."""
    reauthenticator = FakeReauthenticator()
    place.recall = reauthenticator.recall
    return reauthenticator


@pytest.fixture
def credentials(place: Place) -> FakeCredentials:
    """The proxy's own credentials, for brokers that ask within a relay."""
    credentials = FakeCredentials()
    place.broker_credentials = credentials.begin
    return credentials


@pytest.fixture
async def engine(nursery: trio.Nursery) -> Engine:
    engine = Engine()
    nursery.start_soon(engine.real.run)
    return engine


@pytest.fixture
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no edge tells is looked for often."""
    monkeypatch.setattr(engine_module, "RECHECK_INTERVAL_S", 0.02)


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges are all that there is."""
    monkeypatch.setattr(engine_module, "RECHECK_INTERVAL_S", 1000)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context and a client's."""
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    pair = authority.server("server")
    config = ListenerTls(certificate=pair.certificate, key=pair.key)
    return listener_contexts("listener[0].tls", config).value.default, broker_context(
        BrokerTls(trust=authority.file)
    ).value
