"""lookup.service: where HTTP requests go to: an upstream's own hosts, and which of its redirects are followed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from eager_calls import carry_out
from lookup_fakes import Network, make_config
from prometheus_client import CollectorRegistry

from lookup.service import LookupService
from proto.roles import Role
from proto.rpc_pb2 import Method, Principal, ResolveTargetRequest, ResolveTargetResponse, Status
from proto.sealed_principal import seal
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Addresses
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcRefused

SEAL_KEY = b"k" * 32
WEB = "http://web.pulsar.example.com:8080"
FUNCTIONS = "http://functions.pulsar.example.com:6750"


def config_of(http: dict[str, Any] | None = None, *, web: str = WEB, enabled: bool = True, **brokers: Any) -> Config:
    return make_config(
        http_listener=[{}],
        http=http or {},
        brokers={"service_url": "pulsar://b0.example.com:6650", "web_service_url": web, **brokers},
        authentication={"enabled": enabled},
    )


class Worker:
    def __init__(self, nursery: trio.Nursery, config: Config) -> None:
        self.registry = CollectorRegistry()
        no_reactor: Any = None
        descriptors = Descriptors(channel=-1, liveness=-1)
        self.service = LookupService(
            WorkerContext(Role.LOOKUP, 0, config, SEAL_KEY, descriptors, self.registry, nursery, no_reactor)
        )

    async def resolve(
        self, upstream: str, *, role: Role = Role.HTTP, sealed: bytes | None = None, **fields: Any
    ) -> ResolveTargetResponse:
        fields.setdefault("client_address", "192.0.2.7:4000")
        if fields.get("target"):
            fields.setdefault("principal_name", "alice")
            fields["sealed_principal"] = seal(Principal(name="alice"), SEAL_KEY) if sealed is None else sealed
        request = ResolveTargetRequest(upstream=upstream, **fields)
        handler: Any = self.service.handlers()[Method.RESOLVE_TARGET]
        return ResolveTargetResponse.FromString(await carry_out(handler, request.SerializeToString(), Caller(role, 1)))

    async def own(self, upstream: str) -> list[tuple[str, int, list[str]]]:
        answer = await self.resolve(upstream)
        assert not answer.denial
        return [(one.host, one.port, list(one.addresses)) for one in [answer, *answer.others]]


@pytest.fixture
def names(network: Network, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Hosts of upstreams, and what may be there beside them; DNS finds them under whole names."""

    async def query_addresses(servers: object, name: str, timeout_s: float, ttl_max_s: float) -> Addresses:
        return replace(await network.query_addresses(servers, name, timeout_s, ttl_max_s), name=name.lower())

    monkeypatch.setattr("proxy.runtime.dns.resolver._query_addresses", query_addresses)
    network.names["b0.example.com"] = [["10.0.0.1"]]
    network.names["web.pulsar.example.com"] = [["10.0.1.1", "10.0.1.2"]]
    network.names["functions.pulsar.example.com"] = [["10.0.2.1"]]
    network.names["broker-1.web.pulsar.example.com"] = [["10.0.1.77"]]
    network.names["other.example.net"] = [["10.7.7.7"]]
    network.names["metadata.web.pulsar.example.com"] = [["169.254.169.254"]]
    network.names["local.web.pulsar.example.com"] = [["127.0.0.1"]]
    network.names["another-name.example.net"] = [["10.0.1.2"]]
    return network


async def started(nursery: trio.Nursery, config: Config) -> Worker:
    worker = Worker(nursery, config)
    await worker.service.start()
    await trio.testing.wait_all_tasks_blocked()
    return worker


async def test_the_hosts_of_an_upstream_take_turns(names: Network, nursery: trio.Nursery) -> None:
    worker = await started(nursery, config_of())
    first, second = await worker.own(WEB), await worker.own(WEB)
    one, other = ("web.pulsar.example.com", 8080, ["10.0.1.1"]), ("web.pulsar.example.com", 8080, ["10.0.1.2"])
    assert first in ([one, other], [other, one])
    assert second == first[::-1]


async def test_upstreams_are_those_of_the_configuration(names: Network, nursery: trio.Nursery) -> None:
    routes = [{"path": "/tools", "url": "https://other.example.net:8443"}]
    http = {"function_worker_url": FUNCTIONS, "routes": routes}
    worker = await started(nursery, config_of(http))
    assert await worker.own(FUNCTIONS) == [("functions.pulsar.example.com", 6750, ["10.0.2.1"])]
    assert await worker.own(routes[0]["url"]) == [("other.example.net", 8443, ["10.7.7.7"])]
    assert {address for _, _, [address] in await worker.own(WEB)} == {"10.0.1.1", "10.0.1.2"}
    assert (await worker.resolve("http://other.example.net:8443")).denial == "unknown_upstream"
    assert names.resolved.count("web.pulsar.example.com") == 1, "brokers and websocket are one"


async def test_without_a_listener_nothing_is_resolved(names: Network, nursery: trio.Nursery) -> None:
    config = make_config(brokers={"service_url": "pulsar://b0.example.com", "web_service_url": WEB})
    worker = await started(nursery, config)
    assert (await worker.resolve(WEB)).denial == "unknown_upstream"
    assert "web.pulsar.example.com" not in names.resolved


async def test_a_host_that_is_not_found(names: Network, nursery: trio.Nursery) -> None:
    web = "http://nowhere.example.com:8080"
    worker = await started(nursery, config_of(web=web))
    with structlog.testing.capture_logs() as logs:
        answer = await worker.resolve(web)
    assert answer.denial == "unknown_host"
    [entry] = [entry for entry in logs if entry["event"] == "a target was refused"]
    assert entry["upstream"] == web
    assert "nowhere.example.com" in entry["detail"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("web.pulsar.example.com:8080", ("web.pulsar.example.com", ["10.0.1.1", "10.0.1.2"])),
        ("WEB.pulsar.example.com:8080", ("WEB.pulsar.example.com", ["10.0.1.1", "10.0.1.2"])),
        ("broker-1.web.pulsar.example.com:8080", ("broker-1.web.pulsar.example.com", ["10.0.1.77"])),
        ("10.0.1.2:8080", ("web.pulsar.example.com", ["10.0.1.2"])),
        ("another-name.example.net:8080", ("web.pulsar.example.com", ["10.0.1.2"])),
    ],
)
async def test_a_redirect_to_one_of_the_upstreams_own(
    names: Network, nursery: trio.Nursery, target: str, expected: tuple[str, list[str]]
) -> None:
    worker = await started(nursery, config_of())
    answer = await worker.resolve(WEB, target=target)
    assert (answer.denial, answer.host, answer.port, list(answer.addresses)) == ("", expected[0], 8080, expected[1])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("other.example.net:8080", "host"),
        ("10.7.7.7:8080", "host"),
        ("b0.example.com:8080", "host"),
        ("functions.pulsar.example.com:8080", "host"),
        ("web.pulsar.example.com:6650", "port"),
        ("web.pulsar.example.com:22", "port"),
        ("metadata.web.pulsar.example.com:8080", "metadata"),
        ("169.254.169.254:8080", "metadata"),
        ("[fe80::1]:8080", "link_local"),
        ("local.web.pulsar.example.com:8080", "loopback"),
        ("127.0.0.1:8080", "host"),
        ("nowhere.example.com:8080", "unknown_host"),
        ("web.pulsar.example.com", "no_port"),
        ("a b:8080", "malformed"),
    ],
)
async def test_a_redirect_to_anywhere_else(names: Network, nursery: trio.Nursery, target: str, reason: str) -> None:
    """Security: with the request goes all that proves who its client is."""
    worker = await started(nursery, config_of())
    with structlog.testing.capture_logs() as logs:
        answer = await worker.resolve(WEB, target=target)
    assert (answer.denial, answer.host, list(answer.addresses)) == (reason, "", [])
    assert worker.registry.get_sample_value("pulsar_proxy_denied_targets_total", {"reason": reason}) == 1
    [entry] = [entry for entry in logs if entry["event"] == "a target was refused"]
    assert (entry["upstream"], entry["target"], entry["principal"]) == (WEB, target, "alice")
    assert "brokers.service_url" not in entry["detail"], "it is about another key"


async def test_redirects_are_those_of_one_upstream(names: Network, nursery: trio.Nursery) -> None:
    """Security: another upstream's hosts are none of this one's."""
    http = {"function_worker_url": FUNCTIONS}
    worker = await started(nursery, config_of(http))
    assert not (await worker.resolve(FUNCTIONS, target="functions.pulsar.example.com:6750")).denial
    assert (await worker.resolve(WEB, target="functions.pulsar.example.com:6750")).denial == "port"
    assert (await worker.resolve(FUNCTIONS, target="web.pulsar.example.com:6750")).denial == "host"


@pytest.mark.parametrize(
    ("brokers", "target", "denial"),
    [
        ({"allowed_hosts": ["other.example.net"]}, "other.example.net:8080", ""),
        ({"allowed_addresses": ["10.7.0.0/16"]}, "10.7.7.7:8080", ""),
        ({"allowed_hosts": ["other.example.net"]}, "other.example.net:8081", "port"),
        ({"allowed_hosts": ["other.example.net"]}, "other.example.net:6650", "port"),
        ({"allowed_hosts": ["other.example.net"], "allowed_ports": [8081]}, "other.example.net:8081", ""),
        ({"allowed_ports": [8081]}, "web.pulsar.example.com:8081", ""),
        (
            {"allowed_hosts": ["*"], "allowed_addresses": ["10.0.0.0/8"]},
            "metadata.web.pulsar.example.com:8080",
            "metadata",
        ),
    ],
)
async def test_what_the_operator_allows_beside_them(
    names: Network, nursery: trio.Nursery, brokers: dict[str, Any], target: str, denial: str
) -> None:
    worker = await started(nursery, config_of(**brokers))
    assert (await worker.resolve(WEB, target=target)).denial == denial


@pytest.mark.parametrize(("web", "tls", "denial"), [
    (WEB, False, ""),
    (WEB, True, "scheme"),
    (WEB.replace("http:", "https:"), True, ""),
    (WEB.replace("http:", "https:"), False, "scheme"),
])  # fmt: skip
async def test_a_redirect_changes_nothing_about_tls(
    names: Network,
    nursery: trio.Nursery,
    web: str,
    tls: bool,
    denial: str,
) -> None:
    """Security: credentials do not go over plain HTTP where the operator has set TLS."""
    worker = await started(nursery, config_of(web=web))
    assert (await worker.resolve(web, target="web.pulsar.example.com:8080", tls=tls)).denial == denial


EXPIRED = Principal(name="alice", expires_at_unix_ms=int(time.time() * 1000) - 1)


@pytest.mark.parametrize(
    "sealed",
    [b"", seal(Principal(name="alice"), b"x" * 32), seal(Principal(name="bob"), SEAL_KEY), seal(EXPIRED, SEAL_KEY)],
)
async def test_a_redirect_is_followed_for_an_authenticated_client_alone(
    names: Network, nursery: trio.Nursery, sealed: bytes
) -> None:
    """Security: an HTTP worker that was taken over cannot make up clients."""
    worker = await started(nursery, config_of())
    with pytest.raises(RpcRefused) as refused:
        await worker.resolve(WEB, target="web.pulsar.example.com:8080", sealed=sealed)
    assert refused.value.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE


@pytest.mark.parametrize(("role", "upstream"), [(Role.FORWARDER, WEB), (Role.HTTP, "")])
async def test_only_http_workers_ask_for_upstreams_and_for_nothing_else(
    names: Network, nursery: trio.Nursery, role: Role, upstream: str
) -> None:
    """Security."""
    worker = await started(nursery, config_of(enabled=False))
    with pytest.raises(RpcRefused) as refused:
        await worker.resolve(upstream, role=role, target="web.pulsar.example.com:8080")
    assert refused.value.status == Status.CLUSTER_AUTHORIZATION_FAILED


async def test_a_reload(names: Network, nursery: trio.Nursery) -> None:
    worker = await started(nursery, config_of())
    names.names["web.pulsar.example.com"] = [[]]  # DNS fails from now on
    await worker.service.configure(config_of({"function_worker_url": FUNCTIONS}))
    assert len(await worker.own(WEB)) == 2, "what was found before is still true"
    assert await worker.own(FUNCTIONS) == [("functions.pulsar.example.com", 6750, ["10.0.2.1"])]


async def test_a_reload_that_an_http_worker_has_not_heard_of(names: Network, nursery: trio.Nursery) -> None:
    worker = await started(nursery, config_of())
    await worker.service.configure(config_of(web=FUNCTIONS))
    assert len(await worker.own(WEB)) == 2, "the workers are told one after the other"
    await worker.service.configure(config_of(web=FUNCTIONS))
    assert (await worker.resolve(WEB)).denial == "unknown_upstream"
