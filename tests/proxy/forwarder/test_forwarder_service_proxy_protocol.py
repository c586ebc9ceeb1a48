"""proxy.forwarder.service: clients that a load balancer announces by a PROXY header."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from e2e.lab.certificates import Authority
from forwarder_fakes import Peer, connect, make_config
from relay_fakes import unblocked_pair, until
from test_forwarder_service import Serve, Served, serve  # noqa: F401 -- a fixture
from test_forwarder_service_tls import client_of

from proto.addresses import HostPort
from proto.frames import encode_frame
from proto.proxy_protocol import HEADER_BYTES_MAX, ProxyHeader, ProxyHeaderParser, encode_header
from proto.pulsar_pb2 import BaseCommand
from proxy.forwarder.service import ForwarderService
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.proxy_header import ProxyHeaderReading

OPEN: list[TcpStream] = []
BALANCER, ALICE, PROXY = "10.0.0.1", "192.0.2.7", "127.0.0.5"
V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 4000 6650\r\n"
V2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c" + bytes([192, 0, 2, 7, 198, 51, 100, 1, 15, 160, 25, 250])
V2_IPV6 = (
    b"\r\n\r\n\0\r\nQUIT\n\x21\x21\x00\x24"
    + socket.inet_pton(socket.AF_INET6, "2001:db8::7")
    + bytes(16)
    + b"\x0f\xa0\0\1"
)
LOCAL = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00"


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


def listener(mode: str = "required", **keys: Any) -> dict[str, Any]:
    return {"proxy_protocol": mode, "proxy_protocol_sources": ["10.0.0.0/8"], **keys}


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((PROXY, 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for sock in (ours, theirs):
        sock.setblocking(False)
    return ours, theirs


async def come(served: Served, ip: str = BALANCER, sent: bytes = b"", *, tcp: bool = False) -> TcpStream:
    """A connection, of which the first bytes are there already."""
    ours, theirs = (TcpStream(end) for end in (tcp_pair() if tcp else unblocked_pair()))
    OPEN.extend((ours, theirs))
    if sent:
        await theirs.send_all(sent)
    served.listener._send.send_nowait((ours, (ip, 50_000)))  # type: ignore[arg-type]
    await trio.testing.wait_all_tasks_blocked()
    return theirs


def clients(service: ForwarderService) -> list[str]:
    return sorted(connection.address for connection in service._client_connections)


async def is_served(stream: TcpStream) -> bool:
    peer = Peer(stream)
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    return True


async def is_closed(stream: TcpStream) -> bool:
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


def rejected(served: Served, reason: str = "proxy_protocol") -> float | None:
    return served.value("pulsar_proxy_rejected_connections_total", reason=reason)


@pytest.mark.parametrize("mode", ["optional", "required"])
@pytest.mark.parametrize(
    ("header", "client"),
    [(V1, "192.0.2.7:4000"), (V2, "192.0.2.7:4000"), (V2_IPV6, "[2001:db8::7]:4000"), (LOCAL, "10.0.0.1:50000")],
)
async def test_the_announced_client_counts(serve: Serve, mode: str, header: bytes, client: str) -> None:  # noqa: F811
    served = await serve(listener=[listener(mode)])
    for sent in (header, b""):  # there at once, or later, in two parts
        stream = await come(served, sent=sent)
        if not sent:
            assert served.value("pulsar_proxy_active_connections") == 1
            await stream.send_all(header[:9])
            await trio.testing.wait_all_tasks_blocked(0.01)
            await stream.send_all(header[9:])
        assert await is_served(stream)
        assert clients(served.service) == [client]
        await stream.aclose()
        await until(lambda: not clients(served.service))
    assert served.value("pulsar_proxy_active_connections") == 0


async def test_what_comes_with_the_header_is_the_clients(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener()])
    stream = await come(served, sent=V2 + connect_bytes())
    await Peer(stream).expect_command(BaseCommand.CONNECTED)
    assert clients(served.service) == ["192.0.2.7:4000"]


def connect_bytes() -> bytes:
    return encode_frame(connect().SerializeToString())


async def test_optional_is_without_a_header_too(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener("optional")])
    assert await is_served(await come(served))
    assert await is_served(await come(served, ip=ALICE))
    assert clients(served.service) == ["10.0.0.1:50000", "192.0.2.7:50000"]


async def test_a_stranger_cannot_announce_a_client(serve: Serve) -> None:  # noqa: F811
    """Security: neither with a header, where it counts as a frame of no use, nor where one is required."""
    served = await serve(listener=[listener("optional"), listener()])

    def come_to(number: int) -> TcpStream:
        ours, theirs = (TcpStream(end) for end in unblocked_pair())
        OPEN.extend((ours, theirs))
        served.listener.take_in_of[served.real_listeners[number].getsockname()](ours, ("192.0.2.66", 4000))
        return theirs

    for header in (V1, V2):
        with structlog.testing.capture_logs() as logs:
            stream = come_to(0)
            await stream.send_all(header)
            peer = Peer(stream)
            await peer.expect_command(BaseCommand.ERROR)
            assert await is_closed(stream)
            await until(lambda: not clients(served.service))
        assert [(entry["client"], entry["cause"]) for entry in logs] == [("192.0.2.66:4000", "frame_too_large")]
        assert "this is the PROXY protocol" in logs[0]["reason"]
    assert rejected(served) is None
    with structlog.testing.capture_logs() as logs:
        assert await is_closed(come_to(1))
    assert rejected(served) == 1
    assert [(entry["client"], entry["key"]) for entry in logs] == [
        ("192.0.2.66:4000", "listener[1].proxy_protocol_sources")
    ]


@pytest.mark.parametrize("mode", ["optional", "required"])
@pytest.mark.parametrize("sent", [b"PROXY TCP4 x\r\n", b"PROXX", V2[:12] + b"\x99\x99\x99\x99"])
async def test_what_is_broken_is_refused(serve: Serve, mode: str, sent: bytes) -> None:  # noqa: F811
    served = await serve(listener=[listener(mode)])
    with structlog.testing.capture_logs() as logs:
        stream = await come(served, sent=sent[:3])
        await stream.send_all(sent[3:])
        assert await is_closed(stream)
    assert rejected(served) == 1
    assert [entry["sender"] for entry in logs] == ["10.0.0.1:50000"]
    assert served.value("pulsar_proxy_active_connections") == 0


async def test_a_header_that_is_required(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener()])
    assert await is_closed(await come(served, sent=connect_bytes()))
    assert rejected(served) == 1


async def test_a_health_check_is_no_news(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener()])
    with structlog.testing.capture_logs() as logs:
        stream = await come(served)
        await stream.aclose()
        await until(lambda: served.value("pulsar_proxy_active_connections") == 0)
    assert (logs, rejected(served)) == ([], None)


async def test_the_header_has_the_time_of_the_handshake(
    serve: Serve,  # noqa: F811
    autojump_clock: trio.testing.MockClock,
) -> None:
    served = await serve(listener=[listener()], limits={"handshake_timeout_ms": 5_000})
    stream = await come(served, sent=V1[:8])
    await trio.sleep(5.2)
    assert rejected(served) == 1
    assert await is_closed(stream)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_the_handshake_has_no_time_of_its_own(
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    with_tls: bool,
) -> None:
    """Security: a header that comes late gives a client no more time."""
    pair = Authority(tmp_path, "ours").server("server")
    tls = {"tls": {"certificate": pair.certificate, "key": pair.key}} if with_tls else {}
    served = await serve(listener=[listener(**tls)], limits={"handshake_timeout_ms": 5_000})
    if with_tls:
        await served.service._transports[0].check_files()  # in a thread, which nothing waits for here
    stream = await come(served)
    [reading] = served.service._announced.readings
    await trio.sleep(4)
    await stream.send_all(V1)
    reading._on_ready()  # the reactor's own clock is real
    assert served.value("pulsar_proxy_new_connections_total") == 1
    await trio.sleep(1.2)
    cause = "tls_failed" if with_tls else "handshake_timeout"
    assert served.value("pulsar_proxy_ended_connections_total", cause=cause) == 1


async def test_networks_are_the_clients(serve: Serve) -> None:  # noqa: F811
    """Security: those of announced addresses; the balancer's own is in none of the allowed ones."""
    served = await serve(listener=[listener(allowed_networks=["192.0.2.0/24", "2001:db8::/32"])])
    assert await is_served(await come(served, sent=V2))
    assert await is_closed(await come(served, sent=V1.replace(b"192.0.2.7", b"203.0.113.7")))
    assert await is_closed(await come(served, sent=LOCAL))
    assert rejected(served, "network") == 2
    await served.service.configure(make_config(listener=[listener(denied_networks=["192.0.2.7/32"])]))
    assert await is_closed(await come(served, sent=V2))


async def test_the_limit_per_address_is_the_clients(serve: Serve) -> None:  # noqa: F811
    """Security: it is checked behind the header. The balancer's own address has its own."""
    served = await serve(listener=[listener()], limits={"max_connections_per_address": 1})
    waiting = [await come(served) for _ in range(3)]
    assert served.value("pulsar_proxy_active_connections") == 3
    assert await is_served(await come(served, sent=V2))
    with structlog.testing.capture_logs() as logs:
        await waiting[0].send_all(V1)
        await until(lambda: rejected(served, "max_connections_per_address") == 1)
    assert [entry["client"] for entry in logs] == ["192.0.2.7:4000"]
    await waiting[1].send_all(V2_IPV6)
    assert await is_served(waiting[1])
    await waiting[2].send_all(LOCAL)
    assert await is_served(waiting[2])
    assert len(clients(served.service)) == 3


async def test_connections_without_their_header_are_bounded(serve: Serve) -> None:  # noqa: F811
    """Security: the one that has waited longest gives way, and none of an authenticated client's."""
    served = await serve(listener=[listener()], limits={"max_unauthenticated_connections": 4})
    assert await is_served(await come(served, sent=V2))
    first = await come(served)
    for _ in range(3):
        await come(served)
    assert await is_closed(first)
    assert rejected(served, "max_unauthenticated_connections") is not None
    assert served.value("pulsar_proxy_active_connections") <= 3  # type: ignore[operator]
    assert clients(served.service) == ["192.0.2.7:4000"]


async def test_connections_without_their_header_are_within_the_limit(serve: Serve) -> None:  # noqa: F811
    """Security."""
    served = await serve(listener=[listener()], limits={"max_connections": 1})
    assert await is_served(await come(served, sent=V2))
    assert await is_closed(await come(served))
    assert rejected(served, "max_connections") == 1


async def test_a_client_behind_tls(serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    authority = Authority(tmp_path, "ours")
    pair = authority.server("server")
    served = await serve(listener=[listener(tls={"certificate": pair.certificate, "key": pair.key})])
    await served.service._transports[0].check_files()  # in a thread, which nothing waits for here
    stream = await come(served, sent=V2)
    inside = client_of(stream, authority)
    await inside.handshake()
    peer = Peer(inside)
    await peer.send(connect())
    await peer.expect_command(BaseCommand.CONNECTED)
    assert clients(served.service) == ["192.0.2.7:4000"]


async def test_sni(serve: Serve) -> None:  # noqa: F811
    """The header is not the relay's."""
    served = await serve(listener=[listener(routing="sni")], brokers={"service_url": "pulsar+ssl://broker:6651"})
    await come(served, sent=V2 + b"\x16")
    [connection] = served.service._sni_connections
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert connection._client.address == "192.0.2.7:4000"
    assert bytes(connection._parser.received) == b"\x16"


@pytest.mark.parametrize("timeout_s", [0, 1])
async def test_a_drain_ends_what_waits_for_its_header(serve: Serve, timeout_s: float) -> None:  # noqa: F811
    served = await serve(listener=[listener()], limits={"handshake_timeout_ms": 600_000})
    stream = await come(served)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: served.service.drain(timeout_s, hand_over=False))
        await trio.testing.wait_all_tasks_blocked()
        if timeout_s:
            await stream.send_all(V2)
        with trio.fail_after(30):
            assert await is_closed(stream)
    assert served.value("pulsar_proxy_active_connections") == 0
    assert served.value("pulsar_proxy_new_connections_total") == 0


async def test_a_reading_leaves_nothing_to_the_garbage_collector(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener()])
    gc.collect()
    gc.disable()
    try:
        stream = await come(served)
        [reading] = served.service._announced.readings
        left: weakref.ref[ProxyHeaderReading] = weakref.ref(reading)
        del reading
        await stream.send_all(V2)
        assert await is_served(stream)
        assert left() is None
    finally:
        gc.enable()


# ---- announced to brokers


TLV = b"\xea\x00\x06vpce-1"
V2_TLV = V2[:15] + bytes([12 + len(TLV)]) + V2[16:] + TLV
LOCAL_TLV = LOCAL[:15] + bytes([len(TLV)]) + TLV
ALICE_ANNOUNCED = HostPort(ALICE, 4000), HostPort("198.51.100.1", 6650)


async def announcement(serve: Serve, sent: bytes, *, mode: str = "required", ip: str = BALANCER) -> bytes:  # noqa: F811
    """The header for brokers of a client that sends this."""
    brokers = {"service_url": "pulsar+ssl://broker:6651", "proxy_protocol": "before_tls"}
    served = await serve(listener=[listener(mode, routing="sni")], brokers=brokers)
    await come(served, ip, sent + b"\x16", tcp=True)
    [connection] = served.service._sni_connections
    assert TLV[:3] not in connection.stored_relay().SerializeToString()
    return connection._client.announcement


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (V1, encode_header(*ALICE_ANNOUNCED)),
        (V2, encode_header(*ALICE_ANNOUNCED)),
        (V2_TLV, encode_header(*ALICE_ANNOUNCED, TLV)),
        (V2_IPV6, encode_header(HostPort("2001:db8::7", 4000), HostPort("::", 1))),
    ],
)
async def test_brokers_are_told_what_the_balancer_announced(serve: Serve, sent: bytes, expected: bytes) -> None:  # noqa: F811
    assert await announcement(serve, sent) == expected


@pytest.mark.parametrize(("sent", "mode"), [(LOCAL_TLV, "required"), (b"", "optional")])
async def test_brokers_are_told_the_connection_itself_where_no_client_is_announced(
    serve: Serve,  # noqa: F811
    sent: bytes,
    mode: str,
) -> None:
    """Security: TLVs of a header without a client are not passed on."""
    header, _ = parse_header(await announcement(serve, sent, mode=mode))
    assert (header.client, header.tlvs) == (HostPort(BALANCER, 50_000), b"")
    assert header.destination is not None
    assert header.destination.host == PROXY


def parse_header(data: bytes) -> tuple[ProxyHeader, int]:
    parser = ProxyHeaderParser()
    size = parser.receive_data(data)
    assert isinstance(parser.outcome, ProxyHeader)
    return parser.outcome, size


async def test_brokers_are_told_no_header_of_a_strangers(serve: Serve) -> None:  # noqa: F811
    """Security: neither the address that he claims nor his TLVs; what he sends is no client's hello."""
    brokers = {"service_url": "pulsar://broker:6650", "proxy_protocol": "within_tls"}
    served = await serve(listener=[listener("optional")], brokers=brokers)
    ours, theirs = (TcpStream(end) for end in tcp_pair())
    OPEN.extend((ours, theirs))
    served.listener.take_in_of[served.real_listeners[0].getsockname()](ours, ("192.0.2.66", 4000))
    [connection] = served.service._client_connections
    await theirs.send_all(V2_TLV)
    header, size = parse_header(connection.handshake._client.announcement)
    assert (header.client, header.tlvs, size) == (HostPort("192.0.2.66", 4000), b"", 28)


async def test_without_the_setting_no_header_is_made(serve: Serve) -> None:  # noqa: F811
    served = await serve(listener=[listener()])
    await come(served, sent=V2_TLV, tcp=True)
    [connection] = served.service._client_connections
    assert connection.handshake._client.announcement == b""


async def test_what_is_kept_of_a_header_is_bounded(serve: Serve) -> None:  # noqa: F811
    """Security: nothing beyond what one header may have, and nothing in a relay's stored record."""
    longest = b"\xea\x01\xf9" + bytes(505)
    sent = V2[:14] + (12 + len(longest)).to_bytes(2) + V2[16:] + longest
    assert len(sent) == HEADER_BYTES_MAX
    assert await announcement(serve, sent) == sent
