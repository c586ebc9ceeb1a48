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
from .lab.programs import Program
from .lab.renewing import start
from .lab.security import NAMESPACE
from .lab.sessions import FAILURE, KILLED, SUCCESS, Session
from .lab.waiting import BUSY_S, eventually
from .lab.wire import REPLY_TIMEOUT_S

SESSION_LIFETIME_S = 8
TOKEN_LIFETIME_S = 2 * BUSY_S
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


@pytest.fixture(params=["plain", "tls"])
def chain(
    request: pytest.FixtureRequest,
    secured_broker: Standalone,
    b: tuple[ManyListenersCluster, Authority],
    tmp_path: Path,
) -> Iterator[Chain]:
    """Between the two clusters without TLS, and with it."""
    cluster_b, authority = b
    token = tmp_path / "proxy-a.jwt"
    to_b: dict[str, Any] = {
        "service_url": cluster_b.service_url,
        "through_proxy": True,
        "credentials": {"method": "token", "file": str(token)},
    }
    more: dict[str, dict[str, Any]] = {"brokers": to_b}
    if request.param == "tls":
        to_b["service_url"] = f"pulsar+ssl://localhost:{cluster_b.ports[0]}"
        more["brokers.tls"] = {"trust": authority.file}
    with kept_fresh(token, secured_broker.secret_key.read_bytes(), "proxy-a"):
        tables = merged(authentication(secured_broker), more, ONE_FORWARDER)
        with running(cluster_a := ProxyCluster(tables)):
            yield Chain(secured_broker, cluster_a, cluster_b)


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
def test_a_minute_of_producing_and_consuming_without_a_reconnect(
    chain: Chain, python_client: Program, java_client: Program
) -> None:
    """C++ clients with producers, too, which may not be asked: it is not they that answer."""
    topic, options = fresh_topic(), {"lifetime_s": HOUR_S, "size": 5_000, "rate": 50}
    key = chain.broker.secret_key
    with ExitStack() as stack:
        runs = {
            program.name: stack.enter_context(
                start(program, chain.a.service_url, f"{topic}-{program.name}", key, **options)
            )
            for program in (python_client, java_client)
        }
        alice = make_token(key.read_bytes(), "alice", HOUR_S)
        with Session(chain.a, alice, topic) as lookup:
            lookup.begin().assert_serves()  # the broker has the topic from now on
        raw = stack.enter_context(PingedSession(chain.a, alice, topic, broker=chain.broker)).begin()
        for run in runs.values():
            run.wait_for_progress(20)
        said_before = {name: run.reconnects() for name, run in runs.items()}
        before_a, before_b, began_at = chain.a.metrics(), chain.b.metrics(), time.monotonic()
        relays = len(runs) + 1
        while (
            time.monotonic() < began_at + DURATION_S
            or chain.a.metrics().total(ANSWERED) - before_a.total(ANSWERED) < RENEWALS_MIN * relays
        ):
            assert time.monotonic() < began_at + DURATION_S + 5 * BUSY_S, "they are not renewed"
            raw.assert_serves()  # and nothing else comes
            time.sleep(0.1)
        after_a, after_b = chain.a.metrics(), chain.b.metrics()
        for run in runs.values():
            run.wait_for_progress(20)
        outcomes = {name: run.stop() for name, run in runs.items()}
    for name, outcome in outcomes.items():
        result = outcome.result
        assert result["ok"], f"{name}: {result}\n{outcome.log[-4000:]}"
        found = {what: result[what] for what in ("missing", "duplicates", "corrupt", "send_failures", "in_order")}
        assert found == {"missing": 0, "duplicates": 0, "corrupt": 0, "send_failures": 0, "in_order": True}, name
        assert outcome.reconnect_lines[said_before[name] :] == [], name
    moved_a, moved_b = after_a.moved_since(before_a), after_b.moved_since(before_b)
    assert moved_b.get(SUCCESS, 0) >= RENEWALS_MIN * relays, "b has accepted what a answered"
    for earlier, later in ((before_a, after_a), (before_b, after_b)):
        for name, labels in ((UNANSWERED, {}), (FAILURE, {}), (KILLED, {}), (ENDED, {"cause": "relay_ended"})):
            assert later.total(name, **labels) == earlier.total(name, **labels), name
    assert moved_a.get(SUCCESS, 0) == 0, "no client was asked for a client's own credentials"
    print(
        {"answered": moved_a[ANSWERED], "accepted": moved_b[SUCCESS], "late": moved_b.get(OBSERVED, 0)},
        {n: o.result["sent"] for n, o in outcomes.items()},
    )


def test_the_end_of_the_proxys_own_token_is_a_metric(chain: Chain) -> None:
    def end() -> float:
        return chain.a.metrics().total(CREDENTIALS_END)

    first = eventually(end, what="the end is known")
    assert abs(first - time.time()) < TOKEN_LIFETIME_S + BUSY_S
    eventually(lambda: end() > first, what="the end of the token that has replaced it")
    assert CREDENTIALS_END not in chain.b.metrics().names(), "its token does not end"
