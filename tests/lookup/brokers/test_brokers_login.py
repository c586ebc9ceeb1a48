"""lookup.brokers.login and lookup.brokers.credential_checks: what brokers say to the proxy's own credentials, and
that no client has a say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import FakeAuth, FakeBroker, Network, make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.credential_checks import (
    CHECK_INTERVAL_S,
    FAILURES_MAX,
    FIRST_LOGIN_TIMEOUT_S,
    LOGINS_MAX,
    LOGINS_PER_CHECK,
    REFUSALS_MIN,
    REMEMBERED_S,
)
from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.brokers.discovery import ENDPOINTS_MAX, CredentialVerdict, Endpoint
from lookup.brokers.login import CHECK_CREDENTIALS, CHECK_PRINCIPAL, DETAIL_CHARACTERS_MAX, LoginFactory, LoginResult
from lookup.brokers.original_data import AGREEING_MIN, ORIGINAL_DATA_INTERVAL_S, RETRY_INTERVAL_S
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipal
from lookup.metrics import BrokerMetrics
from lookup.targets.rules import Target
from proto.addresses import HostPort
from proto.connect_rules import NO_PROXY_VERSION, OriginalCredentials
from proto.pulsar_pb2 import BaseCommand, CommandConnect, ServerError
from proto.rpc_pb2 import OriginalData
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.broker_link import BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.network.dialing import Dialer
from proxy.supervisor.operators.report import LOOKUP_STATUS_BYTES_MAX

ENABLED = {"enabled": True, "token": {"secret_key": "unused"}}
LONGEST_ADDRESSES = "255.255.255.255 and 2001:0db8:1234:5678:9abc:def0:1234:5678"
CREDENTIALS = {"method": "token", "token": "unused"}


def refusal(code: int, message: str = "no") -> BaseCommand:
    """What a broker answers CONNECT with."""
    return BaseCommand(type=BaseCommand.ERROR, error={"request_id": 2**64 - 1, "error": code, "message": message})


AUTHENTICATION = refusal(ServerError.AuthenticationError, "Unable to authenticate")
ROLES = refusal(ServerError.AuthorizationError, "Invalid roles.")
NO_PROXY = refusal(ServerError.AuthorizationError, "Must not set proxyVersion without connecting as a ProxyRole.")


async def logged_in(
    network: Network,
    greeting: Any,
    auth: FakeAuth | None = None,
    *,
    finds_original_data: bool = True,
    broker: FakeBroker | None = None,
    **tables: Any,
) -> tuple[LoginResult, Any]:
    """The outcome of one login, and the CONNECT that the broker saw."""
    broker = network.brokers["10.0.0.1", 6650] = broker or FakeBroker()
    broker.greeting = greeting
    config = make_config(**{"authentication": ENABLED, **tables})
    link_factory = BrokerLinkFactory(Dialer(config.brokers), 1 << 20, "proxy")
    endpoint, told = Endpoint("10.0.0.1", 6650, ("10.0.0.1",)), auth or FakeAuth()
    login = await LoginFactory(link_factory, config).log_in(
        endpoint,
        lambda: credentials_for(told, "10.0.0.1", configured=True),  # type: ignore[arg-type]
        finds_original_data=finds_original_data,
    )
    await trio.testing.wait_all_tasks_blocked()
    assert not broker.open, "the connection is closed, whatever came of it"
    assert not broker.requests, "nothing is asked"
    return login, broker.connects[0] if broker.connects else None


async def test_a_login_is_what_clients_connections_are(network: Network) -> None:
    login, connect = await logged_in(network, FakeBroker().greeting)
    assert (login.verdict, login.connected, login.code) == (CredentialVerdict.ACCEPTED, True, None)
    assert (connect.auth_method_name, connect.auth_data) == ("token", b"proxy-1")
    assert connect.original_principal == CHECK_PRINCIPAL
    assert connect.HasField("proxy_version")


async def test_where_no_principal_is_named(network: Network) -> None:
    _login, connect = await logged_in(network, FakeBroker().greeting, authentication={})
    assert not connect.HasField("original_principal"), "clients' connections name none, either"
    assert not connect.HasField("original_auth_data")


NOT_FORWARDED = {"brokers": {"forward_authorization_credentials": False}}
NO_PRINCIPAL: dict[str, Any] = {"finds_original_data": False}


@pytest.mark.parametrize(
    ("greeting", "tables", "verdict"),
    [
        (AUTHENTICATION, {}, CredentialVerdict.REFUSED),
        (ROLES, {}, CredentialVerdict.REFUSED),
        (ROLES, {"authentication": {}}, CredentialVerdict.REFUSED),
        (ROLES, NO_PRINCIPAL, CredentialVerdict.ACCEPTED),  # a proxy's role must name a principal, and did not
        (NO_PROXY, NO_PRINCIPAL, CredentialVerdict.REFUSED),
        (NO_PROXY, {"authentication": {}}, CredentialVerdict.REFUSED),
        (refusal(ServerError.NotAllowedError, NO_PROXY_VERSION), {}, CredentialVerdict.REFUSED),
        (
            refusal(ServerError.NotAllowedError, "Reached the maximum number of connections"),
            {},
            CredentialVerdict.UNKNOWN,
        ),
        (refusal(ServerError.ServiceNotReady), {}, CredentialVerdict.UNKNOWN),
        (refusal(ServerError.TooManyRequests), {}, CredentialVerdict.UNKNOWN),
        (refusal(ServerError.UnknownError), {}, CredentialVerdict.UNKNOWN),
        (BaseCommand(type=BaseCommand.PONG, pong={}), {}, CredentialVerdict.UNKNOWN),
    ],
)
async def test_the_error_of_a_failed_login_decides_the_credential_verdict(
    network: Network, greeting: BaseCommand, tables: dict[str, Any], verdict: CredentialVerdict
) -> None:
    """Security: clients can make a broker run out of connections for the proxy's address, and must gain nothing."""
    login, _connect = await logged_in(network, greeting, **tables)
    assert login.verdict is verdict
    assert not login.connected


class CheckingBroker(FakeBroker):
    """A broker with authorization and, at first, ``authenticateOriginalAuthData``, as 4.0.8 answers."""

    def __init__(self, *, anonymous: bool = False) -> None:
        super().__init__()
        self.checks = True
        self.anonymous = anonymous
        self.takes_proxy = True

    @property
    def failed(self) -> int:
        """How many logins have left a failed authentication in its log."""
        return sum(one.HasField("original_principal") for one in self.connects)

    def greeting_for(self, connect: CommandConnect) -> Any:
        if self.checks and connect.HasField("original_principal"):
            return self.greeting if self.anonymous and not connect.original_auth_method else FAILED
        if not self.takes_proxy:
            return FAILED
        return self.greeting if connect.HasField("original_principal") else ROLES


FAILED = refusal(ServerError.AuthenticationError, "Failed to authenticate")


@pytest.mark.parametrize(
    ("checks", "takes_proxy", "verdict", "original_data", "logins"),
    [
        (True, True, CredentialVerdict.ACCEPTED, OriginalData.ORIGINAL_DATA_CHECKED, 2),
        (False, True, CredentialVerdict.ACCEPTED, OriginalData.ORIGINAL_DATA_IGNORED, 1),
        (True, False, CredentialVerdict.REFUSED, OriginalData.ORIGINAL_DATA_UNKNOWN, 2),
        (False, False, CredentialVerdict.REFUSED, OriginalData.ORIGINAL_DATA_UNKNOWN, 2),
    ],
)
@pytest.mark.parametrize("tables", [{}, NOT_FORWARDED], ids=["forwarded", "not forwarded"])
async def test_a_broker_that_wants_clients_credentials_is_told_from_one_that_refuses_the_proxys(  # noqa: PLR0917
    network: Network,
    checks: bool,
    takes_proxy: bool,
    verdict: CredentialVerdict,
    original_data: OriginalData,
    logins: int,
    tables: dict[str, Any],
) -> None:
    broker = CheckingBroker()
    broker.checks, broker.takes_proxy = checks, takes_proxy
    login, connect = await logged_in(network, broker.greeting, broker=broker, **tables)
    assert (login.verdict, login.original_data) == (verdict, original_data)
    assert len(broker.connects) == logins
    sent = (connect.original_auth_method, connect.original_auth_data)
    assert sent == ((CHECK_CREDENTIALS.method, CHECK_CREDENTIALS.data) if not tables else ("", ""))


async def test_a_broker_with_an_anonymous_role_checks_what_it_is_given(network: Network) -> None:
    """It lets a principal without credentials in as its anonymousUserRole, whose credentials it then never asks for."""
    broker = CheckingBroker(anonymous=True)
    login, _connect = await logged_in(network, broker.greeting, broker=broker)
    assert login.original_data == OriginalData.ORIGINAL_DATA_CHECKED
    login, _connect = await logged_in(network, broker.greeting, broker=broker, **NOT_FORWARDED)
    assert login.original_data == OriginalData.ORIGINAL_DATA_IGNORED, "clients get in"


async def test_another_proxy_says_nothing_of_brokers(network: Network) -> None:
    """It takes a principal with or without credentials, whatever the brokers behind it do."""
    tables = {"brokers": {"through_proxy": True, "credentials": CREDENTIALS}}
    login, connect = await logged_in(network, FakeBroker().greeting, **tables)
    assert (login.verdict, connect.original_principal) == (CredentialVerdict.ACCEPTED, CHECK_PRINCIPAL)
    assert login.original_data == OriginalData.ORIGINAL_DATA_UNKNOWN
    login, _connect = await logged_in(network, AUTHENTICATION, **tables)
    assert login.verdict is CredentialVerdict.REFUSED
    assert len(network.brokers["10.0.0.1", 6650].connects) == 1


async def test_no_credentials_to_be_had_is_no_refusal(network: Network) -> None:
    login, _connect = await logged_in(network, AUTHENTICATION, FakeAuth(broken=True))
    assert login.verdict is CredentialVerdict.UNKNOWN
    assert "no credentials for 10.0.0.1:6650: no auth worker" in login.detail


async def test_the_error_text_of_a_broker_is_sanitized_and_truncated(network: Network) -> None:
    """Security: the text is shown in /status and in the log."""
    login, _connect = await logged_in(network, refusal(ServerError.AuthenticationError, "\x1b[2J\u00e9" + "x" * 9999))
    assert login.detail.startswith("AuthenticationError: ?[2J?x")
    assert len(login.detail) == DETAIL_CHARACTERS_MAX


# ---- the worker's own


class Ring:
    """BrokerDirectory that are looked at and logged in at."""

    def __init__(
        self,
        network: Network,
        nursery: trio.Nursery,
        count: int = 2,
        make_broker: type[FakeBroker] = FakeBroker,
        **brokers: Any,
    ) -> None:
        self.fakes = [make_broker() for _ in range(count)]
        for number, fake in enumerate(self.fakes):
            network.brokers[f"10.0.0.{number + 1}", 6650] = fake
        url = "pulsar://" + ",".join(f"10.0.0.{number + 1}" for number in range(count))
        tables = {"service_url": url, "credentials": CREDENTIALS, **brokers}
        self.config = make_config(brokers=tables, authentication=ENABLED)
        self.registry = CollectorRegistry()
        self.metrics = BrokerMetrics(self.registry)
        self.auth: Any = FakeAuth()
        self.nursery = nursery
        self.dialer = Dialer(self.config.brokers)
        self.link_factory = BrokerLinkFactory(self.dialer, 1 << 20, "proxy")
        self.brokers = self.make(None)
        self.pool = BrokerPool(self.config, self.dialer, self.auth, nursery, self.brokers.credential_checks)

    def make(self, before: BrokerDirectory | None, *, asks: bool = True) -> BrokerDirectory:
        resolver = Resolver(self.nursery, timeout_s=5, ttl_max_s=300)
        log_in_at = self.log_in if asks else None
        return BrokerDirectory(self.config, self.dialer, resolver, self.metrics, DirectoryOptions(before, log_in_at))

    async def log_in(self, broker: Endpoint, finds_original_data: bool) -> LoginResult:
        return await LoginFactory(self.link_factory, self.config).log_in(
            broker,
            lambda: credentials_for(self.auth, broker.host, configured=True),
            finds_original_data=finds_original_data,
        )

    def run(self) -> None:
        self.nursery.start_soon(self.brokers.run)

    def logins(self, number: int = 0) -> int:
        return sum(one.original_principal == CHECK_PRINCIPAL for one in self.fakes[number].connects)

    def refuse(self, greeting: BaseCommand = AUTHENTICATION) -> None:
        for fake in self.fakes:
            fake.greeting = greeting

    def accept(self, number: int = 0) -> None:
        self.fakes[number].greeting = FakeBroker().greeting

    def value(self, number: int = 0) -> float | None:
        labels = {"broker": f"10.0.0.{number + 1}:6650"}
        return self.registry.get_sample_value("pulsar_proxy_broker_credentials_accepted", labels)

    def told(self, number: int = 0) -> dict[str, Any]:
        return next(one for one in self.brokers.status() if one["broker"] == f"10.0.0.{number + 1}:6650")

    async def lookup_connection(self, credentials: OriginalCredentials | None = None, number: int = 0) -> None:
        endpoint = self.brokers.discovery.endpoints[number]

        async def locate() -> Target:
            await trio.lowlevel.checkpoint()
            return Target(endpoint, endpoint.addresses)

        await self.pool.get_connection(endpoint, locate, LookupPrincipal("alice", credentials))


async def test_at_a_calm_rate(network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    ring = Ring(network, nursery)
    assert ring.value() is None
    ring.run()
    await trio.sleep(59)
    assert (ring.logins(0), ring.logins(1)) == (1, 1)
    assert ring.value() == 1
    assert ring.told()["credentials"] == "accepted"
    assert not ring.brokers.credentials_refused
    await trio.sleep(3)
    assert (ring.logins(0), ring.logins(1)) == (2, 2)
    nursery.cancel_scope.cancel()


async def test_all_refuse(network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    ring = Ring(network, nursery)
    ring.refuse()
    with structlog.testing.capture_logs() as logs:
        ring.run()
        await trio.sleep(14)
        assert ring.brokers.any_reachable
        assert ring.brokers.credentials_refused
        assert (ring.logins(), ring.value()) == (1, 0)
        assert ring.told()["credentials"] == "refused"
        assert "it REFUSES the proxy's own credentials: AuthenticationError: Unable" in ring.told()["detail"]
        ring.accept(1)
        await trio.sleep(5)
        assert not ring.brokers.credentials_refused, "one that takes them is enough"
        assert (ring.logins(), ring.value(), ring.value(1)) == (2, 0, 1)
        ring.accept(0)
        await trio.sleep(16)
    assert (ring.value(), ring.told()["credentials"]) == (1, "accepted")
    assert "REFUSES" not in ring.told()["detail"]
    events = [
        entry["event"] for entry in logs if entry.get("broker") == "10.0.0.1:6650" and "credentials" in entry["event"]
    ]
    assert len(events) == 2, "once each, however often it is asked"
    assert "refuses the proxy's own credentials" in events[0]
    assert events[1] == "a broker accepts the proxy's own credentials again"
    nursery.cancel_scope.cancel()


async def test_the_verdict_is_there_before_a_broker_counts(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Or an instance that serves no client would be ready for a moment, at which clients come."""
    ring = Ring(network, nursery, count=1)
    ring.refuse()
    network.dial_delay_s = 1
    ring.run()
    for _ in range(40):
        assert ring.brokers.credentials_refused or not ring.brokers.any_reachable
        await trio.sleep(0.1)
    assert ring.brokers.credentials_refused
    nursery.cancel_scope.cancel()


async def test_brokers_that_are_down_do_not_count(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery)
    ring.refuse()
    del network.brokers["10.0.0.2", 6650]
    ring.run()
    await trio.sleep(2)
    assert ring.brokers.credentials_refused, "the other one could serve, but is down"
    assert {request.broker_host for request in ring.auth.calls} == {"10.0.0.1"}, "no login where no broker is"
    del network.brokers["10.0.0.1", 6650]
    await trio.sleep(20)
    assert not ring.brokers.credentials_refused, "that none is reachable is another reason"
    assert not ring.brokers.any_reachable
    nursery.cancel_scope.cancel()


async def test_a_login_that_comes_to_nothing_changes_nothing(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=1)
    ring.refuse(refusal(ServerError.ServiceNotReady))
    ring.run()
    await trio.sleep(2)
    assert (ring.value(), ring.told()["credentials"]) == (None, "unknown")
    assert "could not log in: ServiceNotReady" in ring.told()["detail"]
    assert not ring.brokers.credentials_refused
    ring.accept()
    await trio.sleep(16)
    assert ring.value() == 1
    ring.auth.broken = True
    await trio.sleep(100)
    assert ring.value() == 1
    await trio.sleep(60)
    assert (ring.value(), ring.told()["credentials"]) == (None, "unknown"), "not for ever"
    assert "could not log in" in ring.told()["detail"]
    ring.auth.broken = False
    await trio.sleep(RETRY_INTERVAL_S)
    assert ring.value() == 1
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("forwarded", [None, OriginalCredentials("token", "bad")])
async def test_a_client_that_is_refused_makes_nothing_unready(
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    forwarded: OriginalCredentials | None,
) -> None:
    """Security: it can have its own handshakes fail as often as it likes."""
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(10.5)
    assert ring.logins() == 1
    for _ in range(100):
        ring.refuse()
        with pytest.raises(BrokerLinkFailed):
            await ring.lookup_connection(forwarded)
        assert not ring.brokers.credentials_refused
        ring.accept()
        await trio.sleep(0.1)
    assert not ring.brokers.credentials_refused
    assert ring.value() == 1
    assert 2 <= ring.logins() <= 4, "it brings the next login forward, every 5 s at most"
    nursery.cancel_scope.cancel()


async def test_a_refused_client_brings_the_truth_forward(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(10)
    ring.refuse()
    with pytest.raises(BrokerLinkFailed):
        await ring.lookup_connection()
    await trio.sleep(9)
    assert not ring.brokers.credentials_refused, "there may be several brokers at the address"
    assert "it refused a login with the proxy's own credentials: AuthenticationError" in ring.told()["detail"]
    await trio.sleep(2)
    assert ring.brokers.credentials_refused, "instead of 60 s later"
    assert ring.logins() == 1 + REFUSALS_MIN
    nursery.cancel_scope.cancel()


async def test_lookups_that_are_taken_save_logins(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(50)
    await ring.lookup_connection()
    await trio.sleep(58)
    assert ring.logins() == 1
    await trio.sleep(4)
    assert ring.logins() == 2
    nursery.cancel_scope.cancel()


async def test_a_lookup_with_a_clients_credentials_proves_nothing(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: brokers with authenticateOriginalAuthData may have looked at these alone."""
    ring = Ring(network, nursery, count=1)
    ring.refuse()
    ring.run()
    await trio.sleep(1)
    assert ring.brokers.credentials_refused
    ring.accept()
    await ring.lookup_connection(OriginalCredentials("token", "alice's"))
    assert ring.brokers.credentials_refused
    await ring.lookup_connection()
    assert not ring.brokers.credentials_refused, "this one came with the proxy's alone"
    nursery.cancel_scope.cancel()


async def test_other_credentials_are_tried_at_once(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """After a reload, which may bring them."""
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(5)
    before = ring.brokers
    ring.brokers = ring.make(before)
    before.stop()
    ring.refuse()
    ring.run()
    await trio.sleep(2)
    assert ring.logins() == 2
    await trio.sleep(10)
    assert ring.brokers.credentials_refused
    without = ring.make(ring.brokers, asks=False)
    ring.brokers.stop()
    assert not without.credentials_refused, "without credentials of its own there are none to be refused"
    nursery.cancel_scope.cancel()


async def test_without_lookups_no_login_is_tried(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=1, login_interval_ms=0)
    ring.refuse()
    ring.run()
    await trio.sleep(200)
    assert (ring.logins(), ring.value()) == (0, None)
    assert ring.brokers.any_reachable
    assert not ring.brokers.credentials_refused
    assert "credentials" not in ring.told()
    nursery.cancel_scope.cancel()


async def test_an_accepted_login_ends_the_refusal_by_another_broker_at_the_same_address(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A Service or a load balancer leads each login to another broker."""
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(1)
    for _ in range(100):
        ring.refuse()
        await trio.sleep(60.5)
        assert "refused" in ring.told()["detail"]
        ring.accept()
        await trio.sleep(6)
        assert (ring.told()["credentials"], ring.value()) == ("accepted", 1)
        assert "refused" not in ring.told()["detail"], "an acceptance ends it"
    nursery.cancel_scope.cancel()


async def test_a_refusal_is_not_known_for_ever(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Nor is another failure shown in its words."""
    ring = Ring(network, nursery, count=1)
    ring.refuse()
    ring.run()
    await trio.sleep(2)
    ring.fakes[0].greeting = None
    await trio.sleep(RETRY_INTERVAL_S + 8)
    assert ring.brokers.credentials_refused, "one login without a result changes nothing"
    refused, hanging = ring.told()["detail"].split("; ")[1:]
    assert refused == "it REFUSES the proxy's own credentials: AuthenticationError: Unable to authenticate"
    assert hanging.startswith("the proxy could not log in: ")
    assert "Unable" not in hanging
    ring.refuse()
    await trio.sleep(2 * RETRY_INTERVAL_S)
    assert "could not log in" not in ring.told()["detail"], "this is over"
    ring.fakes[0].greeting = None
    await trio.sleep(FAILURES_MAX * (RETRY_INTERVAL_S + 8))
    assert not ring.brokers.credentials_refused
    assert (ring.told()["credentials"], ring.value()) == ("unknown", None)
    assert "could not log in" in ring.told()["detail"]
    assert "Unable" not in ring.told()["detail"]
    nursery.cancel_scope.cancel()


async def test_clients_cannot_make_a_verdict_unknown(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: they can have a broker run out of connections for the proxy's address for a moment."""
    ring = Ring(network, nursery, count=1)
    ring.run()
    await trio.sleep(1)
    ring.refuse(refusal(ServerError.NotAllowedError, "Reached the maximum number of connections"))
    for _ in range(int((FAILURES_MAX - 1) * RETRY_INTERVAL_S)):
        with pytest.raises(BrokerLinkFailed):
            await ring.lookup_connection()
        await trio.sleep(1)
        assert ring.value() == 1
    assert ring.logins() == FAILURES_MAX, "each of them, but the first, came to nothing"
    nursery.cancel_scope.cancel()


async def test_dns_that_answers_with_other_addresses_each_time(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Each of them is logged in at when its turn is, not at every answer."""
    network.names["b"] = [[f"10.0.0.{number + 1}"] for _ in range(10) for number in range(3)]
    ring = Ring(network, nursery, count=3, service_url="pulsar://b", dns_ttl_max_ms=1000)
    ring.run()
    await trio.sleep(58)
    assert len(network.resolved) > 10
    assert [ring.logins(number) for number in range(3)] == [1] * 3
    assert not ring.brokers.credentials_refused
    nursery.cancel_scope.cancel()


async def test_credential_statuses_of_removed_brokers_are_bounded_and_expire(
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookup.brokers.credential_checks.REMEMBERED_MAX", 3)
    network.names["b"] = [[f"10.0.0.{number + 1}"] for number in range(10)]
    ring = Ring(network, nursery, count=10, service_url="pulsar://b", dns_ttl_max_ms=1000)
    ring.run()
    await trio.sleep(70)
    assert ring.brokers.credential_checks is not None
    known = [addresses for _, addresses in ring.brokers.credential_checks._statuses]
    assert known == [("10.0.0.8",), ("10.0.0.9",), ("10.0.0.10",)], "the last ones"
    await trio.sleep(REMEMBERED_S)
    assert [addresses for _, addresses in ring.brokers.credential_checks._statuses] == [("10.0.0.10",)]
    nursery.cancel_scope.cancel()


async def test_brokers_that_hang_at_a_login_delay_no_lookup(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """They answer a PING. Others are looked at all the same, and the instance is ready soon."""
    ring = Ring(network, nursery, count=100)
    for fake in ring.fakes[:-1]:
        fake.greeting = None
    ring.run()
    await trio.sleep(FIRST_LOGIN_TIMEOUT_S - 0.1)
    assert all(one["reachable"] for one in ring.brokers.status())
    assert not ring.brokers.any_reachable, "their first logins are awaited for a moment"
    await trio.sleep(0.2)
    assert ring.brokers.any_reachable
    del network.brokers["10.0.0.100", 6650]
    await trio.sleep(5.1)  # brokers.probe_interval_ms
    assert not ring.told(99)["reachable"]
    await trio.sleep(5)
    assert sum(fake.open for fake in ring.fakes) == LOGINS_MAX, "at a time"
    nursery.cancel_scope.cancel()


async def test_each_broker_has_its_turn_though_many_hang_at_a_login(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=200)
    for fake in ring.fakes[:-1]:
        fake.greeting = None
    ring.run()
    await trio.sleep(70)
    assert ring.value(199) == 1
    nursery.cancel_scope.cancel()


async def test_logins_have_a_total_rate(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery, count=100)
    ring.run()
    await trio.sleep(CHECK_INTERVAL_S * 3.5)
    assert sum(ring.logins(number) for number in range(100)) == 3 * LOGINS_PER_CHECK, "at first, none was looked at"
    await trio.sleep(5)
    assert {ring.logins(number) for number in range(100)} == {1}
    nursery.cancel_scope.cancel()


async def test_a_broker_whose_first_login_is_under_way_does_not_hide_that_others_refuse(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(network, nursery)
    ring.refuse()
    ring.fakes[1].greeting = None
    ring.run()
    await trio.sleep(FIRST_LOGIN_TIMEOUT_S - 0.1)
    assert ring.brokers.any_reachable
    assert ring.brokers.credentials_refused
    await trio.sleep(0.2)
    assert not ring.brokers.credentials_refused, "nothing is known of the other one"
    nursery.cancel_scope.cancel()


async def test_lookups_from_before_a_reload_change_nothing(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """They may have come with other credentials; and what they changed would be shown nowhere."""
    ring = Ring(network, nursery, count=1)
    ring.refuse()
    ring.run()
    await trio.sleep(2)
    before = ring.brokers
    ring.brokers = ring.make(before)
    before.stop()
    ring.run()
    assert ring.brokers.credentials_refused, "until there is another verdict"
    await trio.sleep(2)
    assert ring.logins() == 2
    ring.accept()
    with structlog.testing.capture_logs() as logs:
        await ring.lookup_connection()  # the pool is the old one
        assert (ring.brokers.credentials_refused, ring.value()) == (True, 0)
        assert not logs
        await trio.sleep(RETRY_INTERVAL_S)
    assert (ring.brokers.credentials_refused, ring.value()) == (False, 1)
    assert [entry["event"] for entry in logs] == ["a broker accepts the proxy's own credentials again"]
    nursery.cancel_scope.cancel()


async def test_the_status_of_a_broker_fits(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: brokers choose words in it, and one that is cut off would hide all others."""
    ring = Ring(network, nursery, count=1)
    ring.refuse(refusal(ServerError.AuthenticationError, '"' * 999))
    ring.run()
    await trio.sleep(2)
    ring.refuse(refusal(ServerError.ServiceNotReady, '"' * 999))
    await trio.sleep(RETRY_INTERVAL_S)
    told = ring.told()
    assert told["detail"].count('"') > 500
    told["broker"] = f"{'h' * 253}:65535 at {LONGEST_ADDRESSES}"
    told["addresses"] = LONGEST_ADDRESSES.split(" and ")
    told["detail"] = told["detail"].replace("10.0.0.1", LONGEST_ADDRESSES)
    assert len(json.dumps(told)) * ENDPOINTS_MAX < LOOKUP_STATUS_BYTES_MAX
    del network.brokers["10.0.0.1", 6650]
    await trio.sleep(10)
    assert '"' not in ring.told()["detail"], "why it cannot be reached is long enough"
    nursery.cancel_scope.cancel()


async def test_brokers_that_others_named_are_none_of_ours(network: Network, nursery: trio.Nursery) -> None:
    """Redirects lead to them; readiness does not depend on them."""
    ring = Ring(network, nursery, count=1)
    assert ring.brokers.credential_checks is not None
    ring.brokers.credential_checks.record_acceptance(HostPort("10.0.0.1", 6650))
    ring.brokers.credential_checks.request_recheck(HostPort("10.0.0.1", 6650))
    assert ring.told()["credentials"] == "unknown"


# ---- whether brokers check clients' own credentials

UNKNOWN, IGNORED, CHECKED = (
    OriginalData.ORIGINAL_DATA_UNKNOWN,
    OriginalData.ORIGINAL_DATA_IGNORED,
    OriginalData.ORIGINAL_DATA_CHECKED,
)
CHECKS = "pulsar_proxy_broker_checks_original_credentials"
CONFIRMED_S = RETRY_INTERVAL_S * AGREEING_MIN
"""Time until sessions may rely on it that a broker checks."""


class CheckingRing(Ring):
    """Brokers that check clients' credentials unless a test says otherwise."""

    fakes: list[CheckingBroker]  # type: ignore[assignment]

    def __init__(self, network: Network, nursery: trio.Nursery, count: int = 2, **brokers: Any) -> None:
        super().__init__(network, nursery, count, CheckingBroker, **brokers)

    def set_checks(self, *checks: bool) -> None:
        for fake, one in zip(self.fakes, checks, strict=True):
            fake.checks = one

    def shown(self) -> list[Any]:
        return [one["original_data"] for one in self.brokers.status()]

    def checks(self, number: int = 0) -> float | None:
        return self.registry.get_sample_value(CHECKS, {"broker": f"10.0.0.{number + 1}:6650"})

    def of(self, host: str, *addresses: str) -> OriginalData:
        return self.brokers.original_data_of(HostPort(host, 6650), addresses or (host,))


async def test_each_broker_shows_whether_it_checks(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = CheckingRing(network, nursery)
    ring.set_checks(True, False)
    assert ring.of("10.0.0.1") == UNKNOWN
    with structlog.testing.capture_logs() as logs:
        ring.run()
        await trio.sleep(2)
    assert ring.of("10.0.0.1") == OriginalData.ORIGINAL_DATA_SEEMS_CHECKED, "one failed authentication is not enough"
    assert ring.shown() == ["checked", "ignored"]
    assert [ring.checks(0), ring.checks(1)] == [1, 0]
    assert [ring.value(0), ring.value(1)] == [1, 1], "both accept the proxy's own credentials"
    assert ring.of("10.0.0.2") == IGNORED
    assert ring.brokers.original_data_checked == "some"
    assert "checks clients' own credentials" in ring.told(0)["detail"]
    assert "checks" not in ring.told(1)["detail"]
    events = [entry["event"] for entry in logs]
    assert events.count("a broker checks clients' own credentials (authenticateOriginalAuthData)") == 1
    assert not any("refuses" in event for event in events)
    await trio.sleep(CONFIRMED_S)
    assert (ring.of("10.0.0.1"), ring.of("10.0.0.2")) == (CHECKED, IGNORED)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("checks", "expected"),
    [((True, True), CHECKED), ((False, False), IGNORED), ((True, False), UNKNOWN)],
)
async def test_another_target_of_the_cluster_is_known_where_all_brokers_agree(
    network: Network,
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    checks: tuple[bool, bool],
    expected: OriginalData,
) -> None:
    """As pods by name are, behind the address of a service. What is unknown is never taken for either."""
    ring = CheckingRing(network, nursery)
    ring.set_checks(*checks)
    assert ring.of("broker-0.svc", "10.0.9.9") == UNKNOWN
    ring.run()
    await trio.sleep(CONFIRMED_S)
    assert ring.of("broker-0.svc", "10.0.9.9") == expected
    assert ring.of("10.0.0.1", "10.0.0.1", "10.0.9.9") == expected, "an address more than the broker has"
    nursery.cancel_scope.cancel()


async def test_another_proxy_checks_no_clients_credentials(network: Network, nursery: trio.Nursery) -> None:
    """It challenges the proxy before it for that one's own; its answers must not be clients'."""
    ring = CheckingRing(network, nursery, through_proxy=True)
    assert (ring.of("10.0.0.1"), ring.of("broker-0.svc")) == (IGNORED, IGNORED)


async def test_sessions_do_not_rely_on_brokers_of_which_one_gives_no_verdict(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """However a client writes its name, and for targets that are only taken for brokers of the same cluster."""
    ring = CheckingRing(network, nursery)
    ring.fakes[1].takes_proxy = False
    ring.run()
    await trio.sleep(CONFIRMED_S)
    assert ring.shown() == ["checked", "unknown"]
    assert ring.of("Alias-of-broker-1.", "10.0.0.1") == CHECKED
    assert ring.of("Alias-of-broker-2.", "10.0.0.2") == UNKNOWN
    assert ring.of("broker-0.svc") == UNKNOWN
    assert ring.brokers.original_data_checked == "all", "no broker takes a client that has nothing to forward"
    nursery.cancel_scope.cancel()


async def test_a_single_failed_authentication_does_not_mark_a_broker_as_checking(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a broker that ignores clients' credentials may fail for a moment, as while it has no keys."""
    ring = CheckingRing(network, nursery, count=1)
    ring.run()
    await trio.sleep(1)
    assert ring.fakes[0].failed == 1
    ring.set_checks(False)
    for _ in range(int(ORIGINAL_DATA_INTERVAL_S)):
        assert ring.of("10.0.0.1") != CHECKED
        await trio.sleep(1)
    assert ring.of("10.0.0.1") == IGNORED
    nursery.cancel_scope.cancel()


async def test_authentications_that_fail_are_rare(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Each is a line in the broker's log. Clients that are refused bring about no more of them, nor fewer."""
    ring = CheckingRing(network, nursery, count=1)
    ring.run()
    await trio.sleep(CONFIRMED_S)
    assert ring.fakes[0].failed == AGREEING_MIN
    before = len(ring.fakes[0].connects)
    for _ in range(int(ORIGINAL_DATA_INTERVAL_S - CONFIRMED_S) // 10 - 1):
        ring.brokers.credential_checks.request_recheck(ring.brokers.discovery.endpoints[0])  # type: ignore[union-attr]
        await trio.sleep(10)
    assert len(ring.fakes[0].connects) > before + 10, "the proxy's own credentials are still looked at"
    assert ring.fakes[0].failed == AGREEING_MIN
    await trio.sleep(20 + CONFIRMED_S)
    assert ring.fakes[0].failed == AGREEING_MIN + 1
    assert ring.shown() == ["checked"]
    nursery.cancel_scope.cancel()


async def test_lookups_that_are_taken_do_not_keep_a_verdict_alive(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a client that names itself as brokers' own services do is not checked; nothing follows from it."""
    ring = CheckingRing(network, nursery, count=1)
    ring.set_checks(False)
    ring.run()
    await trio.sleep(1)
    ring.set_checks(True)
    endpoint = ring.brokers.discovery.endpoints[0]
    for _ in range(int(ORIGINAL_DATA_INTERVAL_S) // 30 + 4):
        ring.brokers.credential_checks.record_acceptance(endpoint)  # type: ignore[union-attr]
        await trio.sleep(30)
    assert ring.shown() == ["checked"]
    nursery.cancel_scope.cancel()


async def test_the_checking_of_a_restarting_broker_is_unknown_until_new_logins_agree(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = CheckingRing(network, nursery, count=1)
    ring.run()
    await trio.sleep(CONFIRMED_S)
    assert ring.of("10.0.0.1") == CHECKED
    fake = network.brokers.pop(("10.0.0.1", 6650))
    await trio.sleep(15)
    assert (ring.of("10.0.0.1"), ring.checks()) == (UNKNOWN, None)
    ring.set_checks(False)
    network.brokers["10.0.0.1", 6650] = fake
    await trio.sleep(15 + RETRY_INTERVAL_S * AGREEING_MIN)
    assert (ring.of("10.0.0.1"), ring.checks()) == (IGNORED, 0)
    nursery.cancel_scope.cancel()


async def test_several_brokers_at_an_address_that_differ(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """As behind a service during a rolling restart: only what several logins in succession say counts."""
    ring = CheckingRing(network, nursery, count=1, login_interval_ms=10_000)
    ring.set_checks(False)
    ring.run()
    await trio.sleep(1)
    assert ring.of("10.0.0.1") == IGNORED
    for checks in (True, False) * 5:
        ring.set_checks(checks)
        await trio.sleep(RETRY_INTERVAL_S)
        assert ring.of("10.0.0.1") == UNKNOWN
        assert ring.brokers.original_data_checked == "none"
    ring.set_checks(True)
    await trio.sleep(RETRY_INTERVAL_S * AGREEING_MIN)
    assert ring.of("10.0.0.1") == CHECKED
    nursery.cancel_scope.cancel()


async def test_a_reload_keeps_what_is_known_of_checking_brokers(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = CheckingRing(network, nursery, count=1)
    ring.run()
    await trio.sleep(CONFIRMED_S)
    before, ring.brokers = ring.brokers, ring.make(ring.brokers)
    before.stop()
    assert ring.of("10.0.0.1") == CHECKED
    ring.run()
    await trio.sleep(5)
    assert ring.fakes[0].failed == AGREEING_MIN
    nursery.cancel_scope.cancel()


async def test_a_verdict_ends_with_that_on_the_proxys_own_credentials(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = CheckingRing(network, nursery, count=1)
    ring.set_checks(False)
    ring.run()
    await trio.sleep(1)
    ring.refuse(refusal(ServerError.ServiceNotReady))
    await trio.sleep(60 + (FAILURES_MAX + 1) * RETRY_INTERVAL_S)
    assert (ring.told()["credentials"], ring.shown(), ring.checks()) == ("unknown", ["unknown"], None)
    nursery.cancel_scope.cancel()


async def test_without_logins_nothing_is_known(network: Network, nursery: trio.Nursery) -> None:
    ring = CheckingRing(network, nursery, login_interval_ms=0)
    assert ring.of("10.0.0.1") == UNKNOWN
    assert ring.brokers.original_data_checked == "none"
