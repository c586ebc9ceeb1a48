"""proxy.http.locator: where requests go, by the words of a real lookup worker, and what of them is not believed."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from fake_dns import Names
from worker_fakes import CLIENT, SEAL_KEY, WorkerPool, as_told, lookup_worker, make_config

from proto.addresses import HostPort
from proto.http_rules import Redirect, RequestRefused
from proto.rpc_pb2 import Principal, ResolveTargetResponse
from proto.sealed_principal import seal
from proxy.common.eager import Finished, continue_in_task, step_eagerly
from proxy.http.client import HttpIdentity, Upstream
from proxy.http.locator import HttpLocator

WEB = "web.pulsar.example.com"
ALICE = HttpIdentity(Principal(name="alice"), seal(Principal(name="alice"), SEAL_KEY))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    async def refuse(*_: object) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr("proxy.runtime.network.dialing._connect", refuse)  # the lookup worker probes brokers
    names = Names(monkeypatch)
    names.server.add(WEB, "A", "10.0.1.1", "10.0.1.2", "10.0.1.3")
    names.server.add(f"broker-1.{WEB}", "A", "10.0.1.77")
    names.server.add("functions.example.com", "A", "10.0.2.1")
    names.server.add("b0.example.com", "A", "10.0.0.1")
    return names


class Located:
    """An HTTP worker's locator, and its lookup worker."""

    def __init__(self, locator: HttpLocator, lookup: WorkerPool) -> None:
        self._locator = locator
        self.lookup = lookup

    async def own(self, name: str = "brokers") -> list[Upstream]:
        return list(await self._locator.locate(name, ALICE, CLIENT))

    async def redirected(
        self,
        host: str,
        port: int = 8080,
        *,
        scheme: str = "http",
        name: str = "brokers",
        identity: HttpIdentity = ALICE,
    ) -> Upstream:
        redirect = Redirect(scheme, host, port, b"/", keeps_method=True)
        return await self._locator.locate_redirect(name, redirect, identity, CLIENT)


Make = Callable[..., Awaitable[Located]]


@pytest.fixture
def make(names: Names, nursery: trio.Nursery) -> Make:
    del names

    async def located(web: str = f"http://{WEB}:8080", http: Any = None, **brokers: Any) -> Located:
        table = {"service_url": "pulsar://b0.example.com", "web_service_url": web, **brokers}
        config = make_config(brokers=table, http=http or {}, authentication={"enabled": True})
        lookup = await lookup_worker(config, nursery)
        return Located(HttpLocator(as_told(config), lookup, nursery), lookup)  # type: ignore[arg-type]

    return located


async def refusal(call: Awaitable[Any]) -> tuple[int, str]:
    with pytest.raises(RequestRefused) as refused:
        await call
    assert "example" not in refused.value.text, "clients learn nothing of what is behind the proxy"
    return refused.value.status, refused.value.reason


async def test_the_servers_of_an_upstream_take_turns(make: Make) -> None:
    located = await make()
    first = await located.own()
    assert {one.addresses for one in first} == {("10.0.1.1",), ("10.0.1.2",), ("10.0.1.3",)}
    assert {(one.broker, one.tls) for one in first} == {(HostPort(WEB, 8080), False)}
    assert [await located.own(), await located.own()] == [[*first[1:], first[0]], [*first[2:], *first[:2]]]


async def test_an_answer_holds_for_a_second_for_all_names_of_its_url(
    make: Make, mock_clock: trio.testing.MockClock
) -> None:
    routes = [{"path": "/tools", "url": f"http://{WEB}:8080"}]
    located = await make(http={"function_worker_url": "https://functions.example.com:6751", "routes": routes})
    await located.own("websocket")
    await located.own("route-0")
    assert len(located.lookup.calls) == 1
    assert await located.own("functions") == [
        Upstream(HostPort("functions.example.com", 6751), ("10.0.2.1",), tls=True, knows_proxies=True)
    ]
    assert len(located.lookup.calls) == 2
    mock_clock.jump(1.0)
    await located.own("websocket")
    assert len(located.lookup.calls) == 3


@pytest.mark.parametrize(("name", "knows"), [("brokers", True), ("functions", True), ("websocket", False)])
async def test_who_may_see_the_proxys_certificate(make: Make, name: str, knows: bool) -> None:
    """Security: a WebSocket service at the brokers' own port would take the proxy for the client."""
    located = await make(f"https://{WEB}:8443")
    assert {one.knows_proxies for one in await located.own(name)} == {knows}


async def test_requests_at_a_time_ask_once(make: Make, nursery: trio.Nursery) -> None:
    located = await make()
    located.lookup.gate = trio.Event()
    found: list[Any] = []

    async def one() -> None:
        found.append(await located.own())

    for _ in range(5):
        nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    located.lookup.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(found) == 5
    assert len(located.lookup.calls) == 1


async def test_a_redirect_is_checked_each_time(make: Make) -> None:
    located = await make()
    for _ in range(2):
        upstream = await located.redirected(f"broker-1.{WEB}")
        assert upstream == Upstream(HostPort(f"broker-1.{WEB}", 8080), ("10.0.1.77",), tls=False, knows_proxies=True)
    assert len(located.lookup.calls) == 2


async def test_a_redirect_to_an_ipv6_address(make: Make, names: Names) -> None:
    names.server.add("six.example.com", "AAAA", "2001:db8::1")
    located = await make("http://six.example.com:8080")
    assert (await located.redirected("2001:db8::1")).broker == HostPort("six.example.com", 8080)


@pytest.mark.parametrize(
    ("host", "port", "scheme"),
    [("other.example.net", 8080, "http"), (WEB, 22, "http"), (WEB, 8080, "https"), ("169.254.169.254", 8080, "http")],
)
async def test_a_redirect_to_anywhere_else(make: Make, host: str, port: int, scheme: str) -> None:
    """Security."""
    located = await make()
    assert await refusal(located.redirected(host, port, scheme=scheme)) == (502, "redirect_denied")


async def test_a_redirect_from_https(make: Make) -> None:
    """Security: TLS stays TLS."""
    located = await make(f"https://{WEB}:8443")
    assert (await located.redirected(WEB, 8443, scheme="https")).tls
    assert await refusal(located.redirected(WEB, 8443)) == (502, "redirect_denied")


async def test_a_client_whose_credentials_have_ended_meanwhile(make: Make) -> None:
    located = await make()
    ended = Principal(name="alice", expires_at_unix_ms=1)
    identity = HttpIdentity(ended, seal(ended, SEAL_KEY))
    assert await refusal(located.redirected(WEB, identity=identity)) == (401, "expired")


async def test_no_lookup_worker(make: Make) -> None:
    located = await make()
    located.lookup.is_lost = True
    assert await refusal(located.own()) == (503, "lookup_unavailable")
    assert await refusal(located.redirected(WEB)) == (503, "lookup_unavailable")


async def test_hosts_that_are_not_found(make: Make) -> None:
    located = await make("http://nowhere.example.com:8080")
    assert await refusal(located.own()) == (503, "no_upstream")


def denials(logs: list[Any]) -> list[tuple[str, str]]:
    event = "a lookup worker named what no request may be passed on to"
    return [(entry["upstream"], entry["reason"]) for entry in logs if entry["event"] == event]


OWN_AND = {"host": WEB, "port": 8080, "addresses": ["10.0.1.1"]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"host": "evil.example.net", "port": 8080, "addresses": ["10.0.1.1"]}, "host"),
        ({"host": WEB, "port": 6379, "addresses": ["10.0.1.1"]}, "host"),
        ({"host": WEB, "port": 8080, "addresses": ["127.0.0.1"]}, "loopback"),
        ({"host": WEB, "port": 8080, "addresses": ["10.0.1.1", "169.254.169.254"]}, "metadata"),
        ({**OWN_AND, "others": [{"host": WEB, "port": 8080, "addresses": ["fe80::1"]}]}, "link_local"),
    ],
)
async def test_a_lookup_worker_that_was_taken_over(make: Make, answer: dict[str, Any], reason: str) -> None:
    """Security: it leads no request to where no server of the upstream can be."""
    located = await make()
    located.lookup.answers = [ResolveTargetResponse(**answer)]
    with structlog.testing.capture_logs() as logs:
        assert await refusal(located.own()) == (502, "bad_lookup_answer")
    assert denials(logs) == [(f"http://{WEB}:8080", reason)]
    assert len(await located.own()) == 3, "it is asked again"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"host": "b1.example.com", "port": 22, "addresses": ["10.0.1.1"]}, "port"),
        ({"host": "b1.example.com", "port": 8080, "addresses": ["127.0.0.1"]}, "loopback"),
        ({"host": "b1.example.com", "port": 8080, "addresses": ["no address"]}, "malformed"),
    ],
)
async def test_one_that_leads_a_redirect_elsewhere(make: Make, answer: dict[str, Any], reason: str) -> None:
    """Security."""
    located = await make()
    located.lookup.answers = [ResolveTargetResponse(**answer)]
    with structlog.testing.capture_logs() as logs:
        assert await refusal(located.redirected("b1.example.com")) == (502, "bad_lookup_answer")
    assert denials(logs) == [(f"http://{WEB}:8080", reason)]


async def test_a_route_that_a_reload_has_taken_away(make: Make) -> None:
    located = await make()
    assert await refusal(located.own("route-3")) == (503, "no_upstream")


async def test_it_cannot_take_tls_away(make: Make) -> None:
    """Security: whether there is TLS is for the configuration alone."""
    located = await make(f"https://{WEB}:8443")
    assert all(one.tls for one in await located.own())


async def test_only_servers_that_are_known_need_no_task(make: Make) -> None:
    located = await make()
    waits = located.own()
    assert step_eagerly(waits) is None
    found = await continue_in_task(waits)
    again = step_eagerly(located.own())
    assert isinstance(again, Finished)
    assert set(again.value) == set(found)
