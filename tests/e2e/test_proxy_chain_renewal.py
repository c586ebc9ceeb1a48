"""Two clusters in a chain: the first one's own session ends every few seconds, and no client behind it notices.

Cluster `a` is where clients come in; `b` takes `a` for a proxy, and asks for fresh credentials before `a`'s session
ends: every 8 s. The token of `a` is replaced every second, and each ends within the test. Clients' own tokens last for
an hour, so a worker that is asked for them was asked for `a`'s.

What is left of 8 s when `b` asks (0.4 s at least) may be too little for a busy machine. So `b` only observes ends: an
answer that comes late is late, and counted as that, and one that does not come is missing from those that `b` accepts.
That what is used past its end is closed is shown in test_reauthentication.py and below tests/e2e.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.certificates import Authority, replace
from .lab.cluster import ProxyCluster, merged
from .lab.listeners import ManyListenersCluster
from .lab.metrics import Scrape
from .lab.programs import Program
from .lab.renewing import start
from .lab.security import NAMESPACE
from .lab.sessions import FAILURE, KILLED, SUCCESS, Session
from .lab.waiting import BUSY_S, eventually
from .lab.wire import REPLY_TIMEOUT_S

SESSION_LIFETIME_S = 8
TOKEN_LIFETIME_S = BUSY_S
"""Long enough for a token to reach `b` on a busy machine, short enough to end within the test."""
HOUR_S = 3600
DURATION_S = TOKEN_LIFETIME_S
"""At least so long: by then the tokens that all relays began with have ended."""
RENEWALS_MIN = int(DURATION_S / SESSION_LIFETIME_S)
ANSWERED = "pulsar_proxy_broker_reauthentication_success_total"
UNANSWERED = "pulsar_proxy_broker_reauthentication_failure_total"
CREDENTIALS_END = "pulsar_proxy_broker_credentials_expire_timestamp_seconds"
ENDED = "pulsar_proxy_ended_connections_total"
OBSERVED = "pulsar_proxy_expired_connections_observed_total"
ONE_FORWARDER = {"cluster": {"forwarders": 1}}


@contextmanager
def kept_fresh(file: Path, key: bytes, role: str) -> Iterator[None]:
    """A token that is replaced every second, as a sidecar does it."""
    over = threading.Event()

    def write() -> None:
        replace(file, make_token(key, role, TOKEN_LIFETIME_S).encode())

    def go_on() -> None:
        while not over.wait(1.0):
            write()

    write()
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class Chain:
    """Both clusters, and the broker behind them."""

    broker: Standalone
    a: ProxyCluster
    b: ProxyCluster


@pytest.fixture(scope="module")
def b(
    secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ManyListenersCluster, Authority]]:
    """Takes `proxy-a` for a proxy, whose sessions it asks to renew every 8 s; at its second listener with TLS."""
    authority = Authority(tmp_path_factory.mktemp("b"), "authority")
    server = authority.server("b")
    chain = {
        "authentication": {"proxy_roles": ["proxy-a"]},
        "session": {"connections_max_reauth_ms": SESSION_LIFETIME_S * 1000, "enforcement": "observe"},
    }
    tls = {"tls": {"certificate": server.certificate, "key": server.key}}
    with running(cluster := ManyListenersCluster(merged(authentication(secured_broker), chain, ONE_FORWARDER), tls)):
        yield cluster, authority


@pytest.fixture(scope="module")
def chains(
    secured_broker: Standalone,
    b: tuple[ManyListenersCluster, Authority],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Chain, Chain]]:
    """Between the two clusters without TLS, and with it; `b` is the same."""
    cluster_b, authority = b
    token = tmp_path_factory.mktemp("a") / "proxy-a.jwt"
    plain: dict[str, dict[str, Any]] = {
        "brokers": {
            "service_url": cluster_b.service_url,
            "through_proxy": True,
            "credentials": {"method": "token", "file": str(token)},
        }
    }
    tls = {
        "brokers": {"service_url": f"pulsar+ssl://localhost:{cluster_b.ports[0]}"},
        "brokers.tls": {"trust": authority.file},
    }
    with kept_fresh(token, secured_broker.secret_key.read_bytes(), "proxy-a"):
        tables = merged(authentication(secured_broker), plain, ONE_FORWARDER)
        with running(ProxyCluster(tables)) as first, running(ProxyCluster(merged(tables, tls))) as second:
            yield Chain(secured_broker, first, cluster_b), Chain(secured_broker, second, cluster_b)


class PingedSession(Session):
    """A client that lives long enough to be pinged by the broker."""

    def receive(self, within_s: float = REPLY_TIMEOUT_S) -> Any:
        """The next command that is no PING."""
        while (command := super().receive(within_s)).type == BaseCommand.PING:
            self.send(BaseCommand.PONG, pong={})
        return command


def fresh_topic() -> str:
    """One that no other test uses."""
    return f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}"


@pytest.mark.conforms("kip-368.11")
def test_clients_produce_and_consume_through_renewals_in_a_chain_without_a_reconnect(
    chains: tuple[Chain, Chain], python_client: Program, java_client: Program
) -> None:
    """C++ clients with producers, too, which may not be asked: it is not they that answer."""
    options = {"lifetime_s": HOUR_S, "size": 5_000, "rate": 50}
    key, b = chains[0].broker.secret_key, chains[0].b
    alice = make_token(key.read_bytes(), "alice", HOUR_S)
    with ExitStack() as stack:
        runs = {
            f"{program.name} {number}": stack.enter_context(
                start(program, chain.a.service_url, fresh_topic(), key, **options)
            )
            for number, chain in enumerate(chains)
            for program in (python_client, java_client)
        }
        raw = [stack.enter_context(raw_relay(chain, alice)) for chain in chains]
        for run in runs.values():
            run.wait_for_progress(20)
        said_before = {name: run.reconnects() for name, run in runs.items()}
        before, before_b, began_at = [chain.a.metrics() for chain in chains], b.metrics(), time.monotonic()
        relays = len(runs) // len(chains) + 1
        while time.monotonic() < began_at + DURATION_S or fewest_answered(chains, before) < RENEWALS_MIN * relays:
            assert time.monotonic() < began_at + DURATION_S + 5 * BUSY_S, "they are not renewed"
            for client in raw:
                client.assert_serves()  # and nothing else comes
            time.sleep(0.1)
        after, after_b = [chain.a.metrics() for chain in chains], b.metrics()
        for run in runs.values():
            run.wait_for_progress(20)
        outcomes = {name: run.stop() for name, run in runs.items()}
    for name, outcome in outcomes.items():
        result = outcome.result
        assert result["ok"], f"{name}: {result}\n{outcome.log[-4000:]}"
        found = {what: result[what] for what in ("missing", "duplicates", "corrupt", "send_failures", "in_order")}
        assert found == {"missing": 0, "duplicates": 0, "corrupt": 0, "send_failures": 0, "in_order": True}, name
        assert outcome.reconnect_lines[said_before[name] :] == [], name
    moved_b = after_b.moved_since(before_b)
    assert moved_b.get(SUCCESS, 0) >= RENEWALS_MIN * relays * len(chains), "b has accepted what both have answered"
    for earlier, later in (*zip(before, after, strict=True), (before_b, after_b)):
        for name, labels in ((UNANSWERED, {}), (FAILURE, {}), (KILLED, {}), (ENDED, {"cause": "relay_ended"})):
            assert later.total(name, **labels) == earlier.total(name, **labels), name
    moved = [later.moved_since(earlier) for earlier, later in zip(before, after, strict=True)]
    assert [one.get(SUCCESS, 0) for one in moved] == [0, 0], "no client was asked for a client's own credentials"
    print(
        {"answered": [one[ANSWERED] for one in moved], "accepted": moved_b[SUCCESS], "late": moved_b.get(OBSERVED, 0)},
        {n: o.result["sent"] for n, o in outcomes.items()},
    )


def fewest_answered(chains: tuple[Chain, Chain], before: list[Scrape]) -> float:
    """How often the first cluster of a chain has answered since then, in the chain with fewer answers."""
    moved = [chain.a.metrics().total(ANSWERED) - one.total(ANSWERED) for chain, one in zip(chains, before, strict=True)]
    return min(moved)


def raw_relay(chain: Chain, token: str) -> PingedSession:
    """One that has begun."""
    topic = fresh_topic()
    with Session(chain.a, token, topic) as lookup:
        lookup.begin().assert_serves()  # the broker has the topic from now on
    return PingedSession(chain.a, token, topic, broker=chain.broker).begin()


def test_the_end_of_the_proxys_own_token_is_a_metric(chains: tuple[Chain, Chain]) -> None:
    chain, _ = chains

    def end() -> float:
        return chain.a.metrics().total(CREDENTIALS_END)

    first = eventually(end, what="the end is known")
    assert abs(first - time.time()) < TOKEN_LIFETIME_S + BUSY_S
    eventually(lambda: end() > first, what="the end of the token that has replaced it")
    assert CREDENTIALS_END not in chain.b.metrics().names(), "its token does not end"
