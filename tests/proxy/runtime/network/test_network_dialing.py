"""proxy.runtime.network.dialing: the first address that answers, plain or with TLS, and why there is none."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from e2e.lab.certificates import OTHER_HOST, Authority, Pair

from proto.addresses import HostPort
from proto.proxy_protocol import LOCAL_HEADER, encode_header
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import file_stamps, take_over_held_files
from proxy.config.types import Brokers, ListenerTls
from proxy.runtime.network import dialing
from proxy.runtime.network.congestion import _system_default
from proxy.runtime.network.dialing import ATTEMPT_DELAY_S, Dialer, DialFailed, interleave_families, tune_socket
from proxy.runtime.network.tls import TlsFailed, TlsStream, listener_contexts

PORT = 6651
HERE = HostPort("localhost", PORT)
REFUSED = OSError(errno.ECONNREFUSED, "Connection refused")

Stream = trio.abc.HalfCloseableStream


class Hosts:
    """What can be dialled: address → what happens there. In memory."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.at: dict[str, Callable[[Stream], Awaitable[None]] | OSError | None] = {}
        self.dialled: list[tuple[str, int, str]] = []
        self.delay_s: dict[str, float] = {}
        self.gate: trio.Event | None = None
        self.connected: list[str] = []
        self.on_connected: Callable[[], None] = lambda: None
        self.open = 0
        """Our ends that were not closed."""

    async def connect(self, address: str, port: int, congestion_control: str) -> Stream:
        self.dialled.append((address, port, congestion_control))
        await trio.lowlevel.checkpoint()
        there = self.at[address]
        if there is None:
            await trio.sleep_forever()
        if isinstance(there, OSError):
            raise there
        await trio.sleep(self.delay_s.get(address, 0))
        if self.gate is not None:
            await self.gate.wait()
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(self._serve, there, theirs)
        self.connected.append(address)
        self.open += 1
        self.on_connected()
        return ours

    async def _serve(self, there: Callable[[Stream], Awaitable[None]], stream: Stream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await there(stream)
        with contextlib.suppress(trio.ClosedResourceError):
            while await stream.receive_some():
                pass
        self.open -= 1


@pytest.fixture
def hosts(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    hosts = Hosts(nursery)
    monkeypatch.setattr(dialing, "_connect", hosts.connect)
    return hosts


def new_dialer(**keys: Any) -> Dialer:
    return Dialer(msgspec.convert(keys, Brokers))


async def plain(stream: Stream) -> None:
    await stream.send_all(b"plain")


async def failure(dialer: Dialer, *addresses: str, broker: HostPort = HERE) -> DialFailed:
    with pytest.raises(DialFailed) as caught:
        await dialer.dial_any(broker, addresses)
    return caught.value


# ---- the proxy itself


@pytest.mark.parametrize(
    ("bind", "address", "is_own"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.2", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.3", "127.0.0.2", False),
    ],
)
async def test_the_proxys_own_listener_is_no_broker(bind: str, address: str, *, is_own: bool) -> None:
    """Each connection would become another one, until the time of a handshake is over."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        dialer = Dialer(Brokers(), ["127.0.0.9:1", f"{bind}:{port}"])
        if is_own:
            assert "is this proxy itself" in str(await failure(dialer, address, broker=HostPort("broker", port)))
        else:
            await trio.aclose_forcefully(await dialer.dial_any(HostPort("broker", port), [address]))


# ---- which address


async def test_the_first_that_answers(hosts: Hosts) -> None:
    hosts.at = {"10.0.0.1": REFUSED, "fd00::2": plain, "10.0.0.3": plain}
    stream = await new_dialer(congestion_control="cubic").dial_any(HERE, ("10.0.0.1", "fd00::2", "10.0.0.3"))
    assert await stream.receive_some(10) == b"plain"
    assert hosts.dialled == [("10.0.0.1", PORT, "cubic"), ("fd00::2", PORT, "cubic")]


async def test_a_silent_address_delays_the_next_attempt_by_attempt_delay_s(
    hosts: Hosts, autojump_clock: trio.testing.MockClock
) -> None:
    hosts.at = {"10.0.0.1": None, "10.0.0.2": plain}
    await new_dialer(connect_timeout_ms=2000).dial_any(HERE, ("10.0.0.1", "10.0.0.2"))
    assert trio.current_time() == pytest.approx(ATTEMPT_DELAY_S)
    assert hosts.open == 1, "the one that is silent is left"


async def test_an_address_that_refuses_does_not_delay_the_next_attempt(
    hosts: Hosts, autojump_clock: trio.testing.MockClock
) -> None:
    hosts.at = {"10.0.0.1": REFUSED, "10.0.0.2": REFUSED, "10.0.0.3": plain}
    await new_dialer().dial_any(HERE, ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    assert trio.current_time() == 0


async def test_a_slow_address_that_connects_first_is_used(hosts: Hosts, autojump_clock: trio.testing.MockClock) -> None:
    hosts.at = {"10.0.0.1": plain, "10.0.0.2": None, "10.0.0.3": plain}
    hosts.delay_s = {"10.0.0.1": 0.6, "10.0.0.3": 0.2}
    stream = await new_dialer().dial_any(HERE, ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    assert trio.current_time() == pytest.approx(0.6)
    assert [address for address, _, _ in hosts.dialled] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert await stream.receive_some(10) == b"plain"
    assert hosts.connected == ["10.0.0.1"]
    await trio.sleep(1)
    assert hosts.open == 1


async def test_the_families_alternate(hosts: Hosts, autojump_clock: trio.testing.MockClock) -> None:
    addresses = ("fd00::1", "fd00::2", "fd00::3", "10.0.0.1", "10.0.0.2")
    hosts.at = dict.fromkeys(addresses)
    await failure(new_dialer(connect_timeout_ms=5000), *addresses)
    assert [address for address, _, _ in hosts.dialled] == ["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2", "fd00::3"]
    assert trio.current_time() == pytest.approx(4 * ATTEMPT_DELAY_S + 5), "each has its own time"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((), []),
        (("10.0.0.1",), ["10.0.0.1"]),
        (("10.0.0.2", "10.0.0.1"), ["10.0.0.2", "10.0.0.1"]),
        (("10.0.0.1", "10.0.0.2", "10.0.0.3", "::1"), ["10.0.0.1", "::1", "10.0.0.2", "10.0.0.3"]),
        (("::1", "10.0.0.1", "10.0.0.2", "10.0.0.3"), ["::1", "10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    ],
)
def test_in_which_order(addresses: tuple[str, ...], expected: list[str]) -> None:
    assert interleave_families(addresses) == expected


async def test_two_at_the_same_moment(
    hosts: Hosts, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """One wins, the other is closed."""
    hosts.at = {"10.0.0.1": plain, "10.0.0.2": plain}
    hosts.gate = trio.Event()
    won: list[Stream] = []

    async def dial() -> None:
        won.append(await new_dialer().dial_any(HERE, ("10.0.0.1", "10.0.0.2")))

    nursery.start_soon(dial)
    await trio.sleep(1)
    hosts.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(hosts.connected) == ["10.0.0.1", "10.0.0.2"]
    assert hosts.open == 1
    await won[0].aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert hosts.open == 0


@pytest.mark.parametrize("when", [0.1, 0.3, 0.5, 0.6, 1.0])
async def test_a_caller_that_gives_up_leaves_nothing_open(
    hosts: Hosts, autojump_clock: trio.testing.MockClock, when: float
) -> None:
    hosts.at = {"10.0.0.1": None, "10.0.0.2": plain}
    hosts.delay_s = {"10.0.0.2": 0.25}
    for _ in range(10):
        stream = None
        with trio.move_on_after(when):
            stream = await new_dialer().dial_any(HERE, ("10.0.0.1", "10.0.0.2"))
        await trio.testing.wait_all_tasks_blocked()
        assert hosts.open == (0 if stream is None else 1)
        if stream is not None:
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked()


async def test_a_winner_is_closed_where_the_caller_gives_up_that_very_moment(hosts: Hosts) -> None:
    scope = trio.CancelScope()

    hosts.at = {"10.0.0.1": plain}
    hosts.on_connected = scope.cancel
    with scope:
        await new_dialer().dial_any(HERE, ("10.0.0.1",))
    await trio.testing.wait_all_tasks_blocked()
    assert scope.cancelled_caught
    assert (hosts.connected, hosts.open) == (["10.0.0.1"], 0)


async def test_none_answers(hosts: Hosts, autojump_clock: trio.testing.MockClock) -> None:
    hosts.at = {"10.0.0.1": REFUSED, "10.0.0.2": None}
    failed = await failure(new_dialer(connect_timeout_ms=2000), "10.0.0.1", "10.0.0.2")
    assert failed.reason == "unreachable"
    assert str(failed) == "10.0.0.1: Connection refused; 10.0.0.2: no answer within 2000 ms"


async def test_no_address(hosts: Hosts) -> None:
    failed = await failure(new_dialer())
    assert (failed.reason, str(failed)) == ("unreachable", "no address")


# ---- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "strange")


class TlsHost:
    """A broker with TLS: says hello, and shows what it was shown."""

    def __init__(self, pair: Pair, **tls: Any) -> None:
        config = ListenerTls(certificate=pair.certificate, key=pair.key, **tls)
        self._context = listener_contexts("listener[0].tls", config).value.default
        self.certificates: list[bytes] = []
        self.failures: list[str] = []
        self.ended = trio.Event()

    async def __call__(self, stream: Stream) -> None:
        tls = TlsStream(stream, self._context, server_side=True)  # type: ignore[arg-type]
        try:
            await tls.handshake()
            self.certificates.append(tls.peer_certificate())
            with contextlib.suppress(trio.BrokenResourceError):  # some do not wait for it
                await tls.send_all(b"hello")
                while await tls.receive_some():
                    pass
        except TlsFailed as error:
            self.failures.append(str(error))
            while await stream.receive_some():
                pass
        self.ended.set()


def tls_dialer(authority: Authority, **tls: Any) -> Dialer:
    return new_dialer(service_url="pulsar+ssl://localhost", tls={"trust": authority.file, **tls})


async def test_tls(hosts: Hosts, authority: Authority) -> None:
    there = hosts.at["127.0.0.1"] = TlsHost(authority.server("broker"))
    stream = await tls_dialer(authority).dial_any(HERE, ("127.0.0.1",))
    assert isinstance(stream, TlsStream)
    assert await stream.receive_some(5) == b"hello"
    assert there.certificates == [b""]
    await stream.aclose()


async def test_the_proxys_own_certificate(hosts: Hosts, authority: Authority) -> None:
    there = hosts.at["127.0.0.1"] = TlsHost(
        authority.server("strict"), client_ca=authority.file, require_client_certificate=True
    )
    proxy = authority.client("proxy")
    dialer = tls_dialer(authority, certificate=proxy.certificate, key=proxy.key)
    stream = await dialer.dial_any(HERE, ("127.0.0.1",))
    assert await stream.receive_some(5) == b"hello"
    assert [bool(certificate) for certificate in there.certificates] == [True]
    await stream.aclose()


async def test_the_name_is_the_brokers_and_not_the_address(hosts: Hosts, authority: Authority) -> None:
    """Names are what certificates are for; addresses are only where a server answered."""
    hosts.at["10.0.0.1"] = TlsHost(authority.server("named", OTHER_HOST))
    broker = HostPort(OTHER_HOST, PORT)
    await (await tls_dialer(authority).dial_any(broker, ("10.0.0.1",))).aclose()
    failed = await failure(tls_dialer(authority), "10.0.0.1")
    assert failed.reason == "tls"
    assert "10.0.0.1: the peer's certificate is not accepted: Hostname mismatch" in str(failed)
    assert "'localhost'" in str(failed)


async def test_the_name_does_not_count_where_the_operator_says_so(hosts: Hosts, authority: Authority) -> None:
    hosts.at["10.0.0.1"] = TlsHost(authority.server("lax", OTHER_HOST))
    await (await tls_dialer(authority, verify_hostname=False).dial_any(HERE, ("10.0.0.1",))).aclose()


@pytest.mark.parametrize("lax", [True, False])
async def test_another_authoritys(hosts: Hosts, authority: Authority, stranger: Authority, *, lax: bool) -> None:
    there = hosts.at["10.0.0.1"] = TlsHost(stranger.server("strange"))
    failed = await failure(tls_dialer(authority, verify_hostname=not lax), "10.0.0.1")
    assert failed.reason == "tls"
    assert "the peer's certificate is not accepted: unable to get local issuer certificate" in str(failed)
    await there.ended.wait()
    assert "unknown ca" in there.failures[0], "it is told why, and the connection is closed"


async def test_a_broker_without_tls(hosts: Hosts, authority: Authority) -> None:
    async def error(stream: Stream) -> None:
        await stream.send_all(b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x0e error")

    hosts.at["10.0.0.1"] = error
    failed = await failure(tls_dialer(authority), "10.0.0.1")
    assert (failed.reason, str(failed)) == ("tls", "10.0.0.1: the peer does not speak TLS")


async def test_after_a_bad_one_the_next_is_tried(hosts: Hosts, authority: Authority, stranger: Authority) -> None:
    hosts.at = {"10.0.0.1": TlsHost(stranger.server("bad")), "10.0.0.2": TlsHost(authority.server("good"))}
    await (await tls_dialer(authority).dial_any(HERE, ("10.0.0.1", "10.0.0.2"))).aclose()


@pytest.mark.parametrize("how", ["in time", "cancelled"])
async def test_a_silent_handshake_is_left_and_closed(
    hosts: Hosts, authority: Authority, how: str, autojump_clock: trio.testing.MockClock
) -> None:
    closed = trio.Event()

    async def silent(stream: Stream) -> None:
        while await stream.receive_some():
            pass
        closed.set()

    hosts.at["10.0.0.1"] = silent
    dialer = new_dialer(service_url="pulsar+ssl://localhost", tls={"trust": authority.file}, connect_timeout_ms=2000)
    if how == "in time":
        assert str(await failure(dialer, "10.0.0.1")) == "10.0.0.1: no answer within 2000 ms"
        assert trio.current_time() == pytest.approx(2)
    else:
        with trio.move_on_after(1):
            await dialer.dial_any(HERE, ("10.0.0.1",))
    await closed.wait()


async def test_a_new_certificate_is_shown_without_a_reload(hosts: Hosts, authority: Authority) -> None:
    there = hosts.at["127.0.0.1"] = TlsHost(authority.server("watching"), client_ca=authority.file)
    proxy = authority.client("renewed-proxy")
    dialer = tls_dialer(authority, certificate=proxy.certificate, key=proxy.key)
    for _ in range(2):
        stream = await dialer.dial_any(HERE, ("127.0.0.1",))
        assert await stream.receive_some(5) == b"hello"
        await stream.aclose()
        authority.client("renewed-proxy")
        await take_over_held_files(file_stamps([authority.file, proxy.certificate, proxy.key]))
    assert len(set(there.certificates)) == 2


def test_certificates_that_cannot_be_used_are_an_error_of_the_configuration(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "garbage.pem").write_text("garbage")
    with pytest.raises(ConfigError, match=r"garbage\.pem"):
        tls_dialer(authority, trust=str(tmp_path / "garbage.pem"))


def test_without_tls_no_certificate_is_looked_at() -> None:
    new_dialer(service_url="pulsar://localhost", tls={"trust": "/nowhere"})


# ---- the socket


class FakeSocket:
    """A socket without a network."""

    def __init__(self, family: int, kind: int) -> None:
        self.family, self.kind = family, kind
        self.options: list[tuple[int, int, object]] = []
        self.closed = False
        self.connected_to: Any = None

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes | int:
        if option == socket.SO_ERROR:
            return errno.ECONNREFUSED if self.connected_to[0] == "10.9.9.9" else 0
        return _system_default().encode()

    def setsockopt(self, level: int, option: int, value: object) -> None:
        assert self.connected_to is None, "before there is a connection"
        self.options.append((level, option, value))

    def connect(self, address: tuple[str, int]) -> None:
        self.connected_to = address
        raise BlockingIOError

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[FakeSocket]:
    made: list[FakeSocket] = []

    def make(*arguments: int) -> FakeSocket:
        made.append(FakeSocket(*arguments))
        return made[-1]

    async def wait_writable(sock: FakeSocket) -> None:
        await trio.sleep(60 if sock.connected_to[0] == "10.9.9.0" else 0)

    monkeypatch.setattr(dialing, "socket", SimpleNamespace(**vars(socket) | {"socket": make}))
    monkeypatch.setattr(trio.lowlevel, "wait_writable", wait_writable)
    return made


NON_BLOCKING = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
TUNED = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]


@pytest.mark.parametrize(("address", "family"), [("10.0.0.1", socket.AF_INET), ("fd00::1", socket.AF_INET6)])
async def test_a_connection(sockets: list[FakeSocket], address: str, family: int) -> None:
    await new_dialer(congestion_control="cubic").dial_any(HERE, (address,))
    [sock] = sockets
    assert (sock.family, sock.kind, sock.connected_to) == (family, NON_BLOCKING, (address, PORT))
    assert sock.options == [*TUNED, (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")]
    assert not sock.closed


async def test_a_socket_that_does_not_connect_is_closed(
    sockets: list[FakeSocket], autojump_clock: trio.testing.MockClock
) -> None:
    dialer = new_dialer(congestion_control="system")
    assert str(await failure(dialer, "10.9.9.9")) == "10.9.9.9: Connection refused"
    await failure(dialer, "10.9.9.0")
    with trio.move_on_after(1):
        await dialer.dial_any(HERE, ("10.9.9.0",))
    assert [sock.closed for sock in sockets] == [True, True, True]


def test_tune_socket_is_what_clients_connections_get_too() -> None:
    sock = FakeSocket(0, 0)
    tune_socket(sock)  # type: ignore[arg-type]
    assert sock.options == TUNED


# ---- the PROXY header


ANNOUNCED = encode_header(HostPort("192.0.2.7", 4000), HostPort("192.0.2.1", 6650))


class FirstBytes:
    """A plain host that takes down what is sent there."""

    def __init__(self) -> None:
        self.heard = b""

    async def __call__(self, stream: Stream) -> None:
        while data := await stream.receive_some(4096):
            self.heard += data


@pytest.mark.parametrize("announced", [b"", ANNOUNCED])
@pytest.mark.parametrize(
    ("keys", "passes_tls", "is_sent"),
    [
        ({"proxy_protocol": "off"}, False, False),
        ({"proxy_protocol": "within_tls"}, False, True),
        ({"proxy_protocol": "before_tls"}, False, True),
        ({"proxy_protocol": "before_tls"}, True, True),
        ({"proxy_protocol": "within_tls"}, True, False),
        ({"proxy_protocol": "within_tls", "service_url": "pulsar+ssl://localhost"}, True, False),
    ],
)
async def test_a_connection_begins_with_the_header(
    hosts: Hosts, keys: dict[str, str], announced: bytes, *, passes_tls: bool, is_sent: bool
) -> None:
    """Where a client's own TLS follows, none can be within it, and another before it would break it."""
    there = hosts.at["127.0.0.1"] = FirstBytes()
    dialer = Dialer(msgspec.convert(keys, Brokers), passes_tls=passes_tls)
    stream = await dialer.dial_any(HERE, ("127.0.0.1",), announced)
    await stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert there.heard == ((announced or LOCAL_HEADER) if is_sent else b"")
    assert bool(dialer.header_hint) is is_sent


@pytest.mark.parametrize("mode", ["within_tls", "before_tls"])
async def test_the_header_with_tls(hosts: Hosts, authority: Authority, mode: str) -> None:
    """A host that takes a header elsewhere cannot be connected; the text says what may be wrong."""
    heard: list[bytes] = []

    async def host(stream: Stream) -> None:
        pair = authority.server("broker")
        context = listener_contexts("tls", ListenerTls(certificate=pair.certificate, key=pair.key)).value.default
        if mode == "before_tls":
            heard.append(await stream.receive_some(len(LOCAL_HEADER)))
        tls = TlsStream(stream, context, server_side=True)  # type: ignore[arg-type]
        with contextlib.suppress(TlsFailed):
            await tls.handshake()
        if mode == "within_tls":
            heard.append(await tls.receive_some(len(LOCAL_HEADER)))

    hosts.at["127.0.0.1"] = host
    keys = {"service_url": "pulsar+ssl://localhost", "tls": {"trust": authority.file}, "proxy_protocol": mode}
    stream = await new_dialer(**keys).dial_any(HERE, ("127.0.0.1",))
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [LOCAL_HEADER]
    await trio.aclose_forcefully(stream)

    async def takes_none(stream: Stream) -> None:
        await stream.receive_some(5)
        await stream.aclose()

    hosts.at["127.0.0.2"] = takes_none
    if mode == "before_tls":
        assert "haProxyProtocolEnabled=true" in str(await failure(new_dialer(**keys), "127.0.0.2"))
        text = str(await failure(new_dialer(**keys), "127.0.0.1", broker=HostPort("other.example", PORT)))
        assert "Hostname mismatch" in text
        assert "haProxyProtocolEnabled" not in text, "a certificate is refused for another reason"


async def test_a_broker_that_breaks_off_before_the_header_is_sent(
    hosts: Hosts, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object) -> Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        await theirs.aclose()
        return ours

    monkeypatch.setattr(dialing, "_connect", connect)
    failed = await failure(new_dialer(proxy_protocol="within_tls"), "10.0.0.1")
    assert "10.0.0.1: broke off" in str(failed)
    assert "haProxyProtocolEnabled=true" in str(failed)
