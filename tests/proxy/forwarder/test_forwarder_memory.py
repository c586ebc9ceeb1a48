"""proxy.forwarder: what belongs to a connection is freed with its last reference, and leaves the collector nothing.

No byte is relayed while garbage is collected, which in a flood of TLS handshakes took up to 20 ms.
"""

from __future__ import annotations

import gc
import socket
import ssl
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import trio
import trio.testing
from e2e.lab.certificates import Authority
from e2e.lab.streams import client_hello
from forwarder_fakes import Peer, connect
from relay_fakes import tcp_pair, until
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture

from proto import commands
from proto.client_machine import State
from proto.pulsar_pb2 import BaseCommand, CommandConnected
from proto.rpc_pb2 import ResolveTargetResponse
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.workers import broker_opening
from proxy.forwarder.workers.broker_links import BrokerLinks
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream

OPEN: list[socket.socket] = []


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def tls(authority: Authority) -> dict[str, Any]:
    pair = authority.server("server")
    return {"listener": [{"tls": {"certificate": pair.certificate, "key": pair.key}}]}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(autouse=True)
def fresh_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.is_profile_fresh", property(lambda _: True))
    monkeypatch.setattr("proxy.forwarder.workers.clients.WorkerClients.profile", None, raising=False)


async def come(served: Served) -> TcpStream:
    """A client, before its first byte."""
    ours, theirs = tcp_pair()
    OPEN.append(theirs.socket)
    transport = served.service._transports[0]
    if transport.uses_tls:
        await transport.check_files()  # in a thread, which nothing waits for here
    served.listener._send.send_nowait((ours, ("192.0.2.1", 4000)))
    await until(lambda: served.value("pulsar_proxy_active_connections"))
    return theirs


async def come_with_tls(served: Served, authority: Authority) -> TlsStream:
    context = ssl.create_default_context(cafile=authority.file)
    stream = TlsStream(await come(served), context, server_side=False, host="localhost")
    await stream.handshake()
    return stream


def watch(found: Iterable[Any]) -> list[weakref.ref[Any]]:
    refs = [weakref.ref(one) for one in found]
    assert refs
    return refs


async def assert_freed(served: Served, refs: list[weakref.ref[Any]]) -> None:
    await until(lambda: not served.value("pulsar_proxy_active_connections"))
    await trio.testing.wait_all_tasks_blocked()
    kinds = [type(ref()).__name__ for ref in refs if ref() is not None]
    assert kinds == [], f"{kinds} {garbage()}"
    assert garbage() == set()


def garbage() -> set[str]:
    """The proxy's types of which objects are in reference cycles that nothing else refers to."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    types = {type(one) for one in gc.garbage}
    gc.garbage.clear()
    return {one.__qualname__ for one in types if one.__module__.startswith(("proxy.", "proto."))}


# ---- TLS handshakes


async def test_a_tls_handshake_that_fails(serve: Serve, tls: dict[str, Any]) -> None:  # noqa: F811
    served = await serve(**tls)
    client = await come(served)
    refs = watch(served.service._openings)
    await client.send_all(b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: not served.service._openings)
    client.close_now()
    await assert_freed(served, refs)


async def test_a_tls_handshake_whose_client_leaves(serve: Serve, tls: dict[str, Any]) -> None:  # noqa: F811
    served = await serve(**tls)
    client = await come(served)
    refs = watch(served.service._openings)
    await client.send_all(client_hello("localhost"))
    client.close_now()
    await assert_freed(served, refs)


async def test_a_tls_handshake_that_is_ended(serve: Serve, tls: dict[str, Any]) -> None:  # noqa: F811
    served = await serve(**tls)
    await come(served)
    refs = watch(served.service._openings)
    for opening in list(served.service._openings):
        opening.end(DisconnectCause.SHUT_DOWN)
    del opening
    await assert_freed(served, refs)


async def test_a_client_that_leaves_behind_its_tls_handshake(
    serve: Serve,  # noqa: F811
    tls: dict[str, Any],
    authority: Authority,
) -> None:
    served = await serve(**tls)
    client = await come_with_tls(served, authority)
    await until(lambda: served.service._client_connections)
    refs = watch(served.service._client_connections)
    await client.aclose()
    await assert_freed(served, refs)


# ---- clients


@pytest.mark.parametrize("says", ["nothing", "CONNECT", "nonsense"])
async def test_a_client_in_lookup_mode_that_leaves(serve: Serve, says: str) -> None:  # noqa: F811
    served = await serve()
    client = await come(served)
    refs = watch(served.service._client_connections)
    if says == "CONNECT":
        peer = Peer(client)
        await peer.send(connect())
        await peer.expect_command(BaseCommand.CONNECTED)
    elif says == "nonsense":
        await client.send_all(b"\xff" * 100)
        await until(lambda: served.value("pulsar_proxy_ended_connections_total", cause="frame_too_large"))
    client.close_now()
    await assert_freed(served, refs)


async def test_a_client_that_leaves_while_its_credentials_are_verified(serve: Serve) -> None:  # noqa: F811
    """The auth worker never answers."""
    served = await serve(authentication={"enabled": True})
    client = await come(served)
    refs = watch(served.service._client_connections)
    await client.send_all(commands.encode(connect()))
    await until(lambda: [one for one in served.service._client_connections if one.state is State.AUTHENTICATING])
    client.close_now()
    await assert_freed(served, refs)


# ---- a broker's side, and relays


class Broker:
    """Listens, and is what each client gets; openings of it are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        OPEN.append(self.listener)
        self.port = self.listener.getsockname()[1]
        self.url = f"127.0.0.1:{self.port}"
        self.refs: list[weakref.ref[Any]] = []
        target = ResolveTargetResponse(host="127.0.0.1", port=self.port, addresses=["127.0.0.1"])
        monkeypatch.setattr(BrokerLinks, "known_target", lambda *_: target)
        for kind in (broker_opening.BrokerOpening, broker_opening.NamedOpening):
            monkeypatch.setattr(broker_opening, kind.__name__, self._watched(kind))

    def _watched(self, kind: type[Any]) -> type[Any]:
        refs = self.refs

        class Watched(kind):  # type: ignore[misc]
            def start(self) -> None:
                refs.append(weakref.ref(self))
                super().start()

        return Watched

    async def accept(self) -> socket.socket:
        await trio.lowlevel.wait_readable(self.listener)
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        OPEN.append(sock)
        return sock


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


async def ask_for_relay(served: Served, broker: Broker) -> tuple[TcpStream, list[weakref.ref[Any]]]:
    """A client whose broker is dialled and has said nothing, and its connection."""
    client = await come(served)
    refs = watch(served.service._client_connections)
    await client.send_all(commands.encode(connect(broker.url)))
    await until(lambda: broker.refs)
    return client, refs


async def test_a_client_that_leaves_before_its_broker_has_answered(serve: Serve, broker: Broker) -> None:  # noqa: F811
    served = await serve(brokers={"service_url": f"pulsar://{broker.url}"})
    client, refs = await ask_for_relay(served, broker)
    client.close_now()
    await assert_freed(served, refs + broker.refs)


async def test_a_client_whose_broker_refuses(serve: Serve, broker: Broker) -> None:  # noqa: F811
    served = await serve(brokers={"service_url": f"pulsar://{broker.url}"})
    broker.listener.close()
    client, refs = await ask_for_relay(served, broker)
    await Peer(client).expect_error()
    client.close_now()
    await assert_freed(served, refs + broker.refs)


async def test_a_client_that_becomes_a_relay(serve: Serve, broker: Broker) -> None:  # noqa: F811
    served = await serve(brokers={"service_url": f"pulsar://{broker.url}"})
    client, refs = await ask_for_relay(served, broker)
    end = await broker.accept()
    end.send(commands.connected(CommandConnected(server_version="a broker")))
    await Peer(client).expect_command(BaseCommand.CONNECTED)
    await trio.testing.wait_all_tasks_blocked()
    assert [ref() for ref in refs + broker.refs if ref() is not None] == [], "the relay needs none of them"
    client.close_now()
    end.close()
    await until(lambda: not served.value("pulsar_proxy_active_connections"))


# ---- SNI routing


async def come_with_sni(served: Served, hello: bytes) -> tuple[TcpStream, list[weakref.ref[Any]]]:
    client = await come(served)
    refs = watch(served.service._sni_connections)
    await client.send_all(hello)
    return client, refs


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n"], ids=["silent", "no hello"])
async def test_a_client_that_names_no_broker_and_leaves(serve: Serve, hello: bytes) -> None:  # noqa: F811
    served = await serve(listener=[{"routing": "sni"}])
    client, refs = await come_with_sni(served, hello)
    if hello:
        assert await client.receive_some()
    client.close_now()
    await assert_freed(served, refs)


async def test_a_client_whose_named_broker_refuses(serve: Serve, broker: Broker) -> None:  # noqa: F811
    served = await serve(listener=[{"routing": "sni"}])
    broker.listener.close()
    client, refs = await come_with_sni(served, client_hello("localhost"))
    assert await client.receive_some()
    client.close_now()
    await assert_freed(served, refs + broker.refs)


async def test_a_client_that_becomes_a_relay_to_the_broker_that_it_names(serve: Serve, broker: Broker) -> None:  # noqa: F811
    served = await serve(listener=[{"routing": "sni"}])
    client, refs = await come_with_sni(served, client_hello("localhost"))
    end = TcpStream(await broker.accept())
    assert (await end.receive_some())[0] == 22
    await trio.testing.wait_all_tasks_blocked()
    assert [ref() for ref in refs + broker.refs if ref() is not None] == [], "the relay needs none of them"
    client.close_now()
    end.close_now()
    await until(lambda: not served.value("pulsar_proxy_active_connections"))
