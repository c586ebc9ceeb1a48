"""lookup.service: the brokers' part of it: what /status tells, a reload, and who was refused which target."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from eager_calls import carry_out
from lookup_fakes import FakeAuth, FakeBroker, Network, make_config
from prometheus_client import CollectorRegistry

from lookup.service import LookupService
from proto.connect_rules import INVALID_ROLES_TEXT
from proto.pulsar_pb2 import BaseCommand, CommandConnect, ServerError
from proto.roles import Role
from proto.rpc_pb2 import Method, OriginalData, Principal, ResolveTargetRequest, ResolveTargetResponse
from proto.sealed_principal import seal
from proxy.common.errors import ConfigError
from proxy.runtime.dns.resolver import Addresses
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller

SEAL_KEY = b"k" * 32


class Worker:
    def __init__(self, nursery: trio.Nursery, *, authentication: dict[str, Any] | None = None, **brokers: Any) -> None:
        self.registry = CollectorRegistry()
        tables: dict[str, Any] = {} if authentication is None else {"authentication": authentication}
        config = make_config(brokers={"service_url": "pulsar://b0:6650", **brokers}, **tables)
        descriptors = Descriptors(channel=-1, liveness=-1)
        no_reactor: Any = None
        self.service = LookupService(
            WorkerContext(Role.LOOKUP, 0, config, SEAL_KEY, descriptors, self.registry, nursery, no_reactor)
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pulsar_proxy_{name}", labels)

    async def resolve(
        self, target: str, *, client: str = "192.0.2.7:4000", principal: str = "alice", any_broker: bool = False
    ) -> ResolveTargetResponse:
        sealed = seal(Principal(name=principal), SEAL_KEY)
        request = ResolveTargetRequest(
            target=target,
            client_address=client,
            principal_name=principal,
            sealed_principal=sealed,
            any_broker=any_broker,
        )
        handler: Any = self.service.handlers()[Method.RESOLVE_TARGET]
        return ResolveTargetResponse.FromString(
            await carry_out(handler, request.SerializeToString(), Caller(Role.FORWARDER, 1))
        )


class Checking(FakeBroker):
    """It checks clients' own credentials."""

    def greeting_for(self, connect: CommandConnect) -> BaseCommand:
        code = ServerError.AuthenticationError if connect.original_principal else ServerError.AuthorizationError
        return BaseCommand(
            type=BaseCommand.ERROR, error={"request_id": 0, "error": code, "message": INVALID_ROLES_TEXT}
        )


@pytest.mark.parametrize(("broker", "expected"), [(Checking(), "CHECKED"), (FakeBroker(), "IGNORED")])
async def test_targets_are_told_with_what_they_do_with_clients_credentials(  # noqa: PLR0917 -- fixtures and cases
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    broker: FakeBroker,
    expected: str,
) -> None:
    network.names["b0"] = network.names["b1"] = [["10.0.0.1"]]
    network.names["pod-0.elsewhere.svc.cluster.local"] = [["10.0.9.9"]]
    network.brokers["10.0.0.1", 6650] = broker
    auth = FakeAuth()
    monkeypatch.setattr(WorkerContext, "new_rpc_pool", lambda *_: auth)
    monkeypatch.setattr(auth, "run", trio.sleep_forever, raising=False)
    worker = Worker(
        nursery,
        authentication={"enabled": True},
        credentials={"method": "token", "token": "unused"},
        allowed_hosts=["b?", "*.elsewhere.svc.cluster.local"],
    )
    await worker.service.start()
    await trio.sleep(60)  # until it is certain
    for target in ("b0", "b1", "pod-0.elsewhere.svc.cluster.local"):
        response = await worker.resolve(f"{target}:6650")
        assert (response.denial, OriginalData.Name(response.original_data)) == ("", f"ORIGINAL_DATA_{expected}")
    anywhere = await worker.resolve("", any_broker=True)
    assert OriginalData.Name(anywhere.original_data) == f"ORIGINAL_DATA_{expected}"
    status: Any = worker.service.status()
    assert status["original_data_checked"] == ("all" if expected == "CHECKED" else "none")
    assert status["ready"]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("b0", "no_port"),
        ("b0:22", "port"),
        ("nowhere:6650", "unknown_host"),
        ("metadata:6650", "metadata"),
        ("127.0.0.1:6650", "host"),
    ],
)
async def test_a_refusal_is_logged_and_counted(
    network: Network, nursery: trio.Nursery, target: str, reason: str
) -> None:
    network.names["b0"] = [["10.0.0.1"]]
    network.names["metadata"] = [["169.254.169.254"]]
    worker = Worker(nursery)
    await worker.service.start()
    await trio.testing.wait_all_tasks_blocked()
    with structlog.testing.capture_logs() as logs:
        response = await worker.resolve(target)
    assert (response.denial, response.host, list(response.addresses)) == (reason, "", [])
    [entry] = [entry for entry in logs if entry["event"] == "a target was refused"]
    assert entry["detail"] == response.detail
    assert {key: entry[key] for key in ("client", "principal", "target", "reason", "log_level")} == {
        "client": "192.0.2.7:4000",
        "principal": "alice",
        "target": target,
        "reason": reason,
        "log_level": "warning",
    }
    assert worker.value("denied_targets_total", reason=reason) == 1
    assert worker.value("dns_failures_total", names="targets") == (1 if reason == "unknown_host" else None)


async def test_names_that_clients_choose_and_the_operators_are_groups_of_their_own(
    network: Network, nursery: trio.Nursery
) -> None:
    network.names["b0"], network.names["b1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    worker = Worker(nursery, allowed_hosts=["b1"])
    await worker.service.start()
    assert list((await worker.resolve("b1:6650")).addresses) == ["10.0.0.2"]
    await trio.testing.wait_all_tasks_blocked()
    assert not network.resolvers["b0"] & network.resolvers["b1"]


async def test_a_brokers_own_name_is_in_the_operators_group(network: Network, nursery: trio.Nursery) -> None:
    network.names["b0"] = [["10.0.0.1"]]
    worker = Worker(nursery)
    await worker.service.start()
    await trio.testing.wait_all_tasks_blocked()
    assert list((await worker.resolve("b0:6650")).addresses) == ["10.0.0.1"]
    assert network.resolved == ["b0"], "the discovery's answer serves"


IN = {"enabled": True, "token": {"secret_key": "unused"}}


@pytest.mark.parametrize(
    ("authentication", "client", "principal", "owner"),
    [
        (IN, "10.0.0.1:1", "alice", "principal alice"),
        (IN, "10.0.0.1:1", "", "address 10.0.0.1"),
        ({**IN, "anonymous_role": "anyone"}, "10.0.0.1:1", "anyone", "address 10.0.0.1"),
        ({**IN, "anonymous_role": "anyone"}, "10.0.0.1:1", "alice", "principal alice"),
        (None, "10.0.0.1:1", "alice", "address 10.0.0.1"),
        (None, "[2001:db8::1]:1", "", "address 2001:db8::/64"),
    ],
)
async def test_names_are_resolved_in_turn_by_principal_or_address(
    network: Network,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    *,
    authentication: dict[str, Any] | None,
    client: str,
    principal: str,
    owner: str,
) -> None:
    owners: list[str] = []
    network.names["b0"] = [["10.0.0.1"]]
    worker = Worker(nursery, authentication=authentication)
    await worker.service.start()
    await trio.testing.wait_all_tasks_blocked()  # the brokers' own names were asked for

    async def answer(_self: Any, _what: str, _name: str, owner: str, **_: Any) -> Any:
        owners.append(owner)
        return Addresses(("10.0.0.1",), 0.0)

    monkeypatch.setattr("proxy.runtime.dns.queries.QueryCache.get_answer", answer)
    await worker.resolve("invented:6650", client=client, principal=principal)
    assert owners == [owner]


async def test_status_and_metrics(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    network.add("b0", "10.0.0.1", FakeBroker())
    worker = Worker(nursery, service_url="pulsar://b0,nowhere")
    before = worker.service.status()
    assert (before["ready"], before["brokers_changed_s_ago"]) == (False, None)
    await worker.service.start()
    await trio.sleep(1)
    status: Any = worker.service.status()
    assert status["brokers_changed_s_ago"] == pytest.approx(1, abs=0.2)
    assert status["ready"]
    assert [(entry["broker"], entry["reachable"]) for entry in status["brokers"]] == [
        ("b0:6650", True),
        ("nowhere:6650", False),
    ]
    assert worker.value("broker_up", broker="b0:6650") == 1
    assert worker.value("broker_up", broker="nowhere:6650") == 0
    assert worker.value("broker_set_aside", broker="b0:6650") == 0
    assert worker.value("dns_failures_total", names="brokers") == 1


async def test_a_reload(network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    network.add("b0", "10.0.0.1", FakeBroker())
    network.add("b1", "10.0.0.2", FakeBroker())
    worker = Worker(nursery)
    await worker.service.start()
    await trio.sleep(1)
    await worker.service.configure(make_config(brokers={"service_url": "pulsar://b0,b1"}))
    assert worker.service.status()["brokers_changed_s_ago"] == pytest.approx(1, abs=0.2), "b1 is not resolved yet"
    assert worker.service.status()["ready"], "what was seen is still true"
    await trio.sleep(1)
    assert (worker.value("broker_up", broker="b0:6650"), worker.value("broker_up", broker="b1:6650")) == (1, 1)
    await worker.service.configure(make_config(brokers={"service_url": "pulsar://b1"}))
    await trio.sleep(1)
    assert (worker.value("broker_up", broker="b0:6650"), worker.value("broker_up", broker="b1:6650")) == (None, 1)
    bad = make_config(brokers={"service_url": "pulsar+ssl+srv://b1", "tls": {"trust": "/nowhere"}})
    with pytest.raises(ConfigError):
        await worker.service.configure(bad)
    assert worker.service.status()["ready"]


async def test_a_worker_whose_credentials_all_brokers_refuse_is_not_ready(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    fake = network.add("b0", "10.0.0.1", FakeBroker())
    fake.greeting = BaseCommand(type=BaseCommand.ERROR, error={"request_id": 1, "error": 3, "message": "no"})
    auth: Any = FakeAuth()
    for credentials in (None, {"method": "token", "token": "unused"}):
        worker = Worker(nursery, credentials=credentials)
        worker.service._auth.pick_client = auth.pick_client  # type: ignore[method-assign]
        await worker.service.start()
        await trio.sleep(1)
        status = worker.service.status()
        refused = credentials is not None
        assert (status["ready"], status["credentials_refused"]) == (not refused, refused)
        assert worker.value("broker_up", broker="b0:6650") == 1
        assert worker.value("broker_credentials_accepted", broker="b0:6650") == (0 if refused else None)
        assert len(fake.connects) == refused, "without credentials there is nothing to be found out"
    nursery.cancel_scope.cancel()
