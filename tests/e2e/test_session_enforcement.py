"""Sessions whose ends are only observed (`session.enforcement`), with a real broker and real clients: nothing is
closed, each life is counted once, and a reload ends those that are past their end.

Raw clients only connect before their session's end: however slow the broker is, their first use is past it.
"""

from __future__ import annotations

import os
import signal
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.listeners import ManyListenersCluster
from .lab.programs import Program
from .lab.renewing import start
from .lab.security import NAMESPACE
from .lab.sessions import EXPIRED, KILLED, Session, counting
from .lab.waiting import BUSY_S, eventually

LIFETIME_S = 3.0
LONG_DRAIN_MS = 600_000
"""Longer than a test takes on any machine: no relay ends because the time of a replaced process is over."""

OBSERVED = "pulsar_proxy_expired_connections_observed_total"
OPEN = "pulsar_proxy_expired_sessions"
WOULD_BE_CLOSED = "a client's session would have been closed"
CANNOT_BE_ASKED: dict[str, Any] = {"feature_flags": {"supports_auth_refresh": False}}
ONLY_CONNECTS: dict[str, Any] = {"producer": False, **CANNOT_BE_ASKED}
MAXIMUM = int(LIFETIME_S * 1000)
OBSERVE: Tables = {
    "cluster": {"forwarders": 1},
    "session": {"connections_max_reauth_ms": MAXIMUM, "enforcement": "observe", "relay_reauthentication": "never"},
}


def reload(cluster: ProxyCluster, enforcement: str, **session: object) -> None:
    """Have a cluster take over another `session.enforcement`, and other keys of that table."""
    cluster.write_config(merged(cluster.tables, {"session": {"enforcement": enforcement, **session}}))
    answer = cluster.command("reload")
    assert answer.returncode == 0, answer


@dataclass
class Stage:
    """A cluster that observes at its first listener and at one with TLS, and enforces at a third."""

    cluster: ManyListenersCluster
    broker: Standalone
    context: ssl.SSLContext
    topic: str

    def lookup(self) -> Session:
        """In lookup mode; it has not begun."""
        return Session(self.cluster, self.broker.token("alice"), self.topic)

    def relay(self) -> Session:
        """A relay in the kernel."""
        return Session(self.cluster, self.broker.token("alice"), self.topic, broker=self.broker)

    def secure_relay(self) -> Session:
        """A relay with TLS."""
        return Session(
            self.cluster,
            self.broker.token("alice"),
            self.topic,
            broker=self.broker,
            tls=self.context,
            port=self.cluster.ports[0],
        )

    def enforced(self) -> Session:
        """A relay at the listener that enforces."""
        token = self.broker.token("alice")
        return Session(self.cluster, token, self.topic, broker=self.broker, port=self.cluster.ports[1])

    def all_kinds(self, stack: ExitStack) -> list[Session]:
        """One of each that is observed, not begun."""
        return [stack.enter_context(kind()) for kind in (self.lookup, self.relay, self.secure_relay)]

    def counting(self, **expected: int) -> AbstractContextManager[None]:
        """As the lab's, for this cluster."""
        return counting(self.cluster, **expected)

    def observed(self, **labels: str) -> float:
        """How many lives were counted."""
        return self.cluster.metrics().total(OBSERVED, **labels)


@contextmanager
def staged(secured_broker: Standalone, directory: Path) -> Iterator[Stage]:
    authority = Authority(directory, "authority")
    server = authority.server("proxy")
    secure = {"tls": {"certificate": server.certificate, "key": server.key}}
    enforced = {"session_enforcement": "enforce"}
    tables = merged(authentication(secured_broker), OBSERVE)
    context = ssl.create_default_context(cafile=authority.file)
    with running(cluster := ManyListenersCluster(tables, secure, enforced)):
        made = Stage(cluster, secured_broker, context, f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}")
        with made.lookup() as client:
            client.begin().assert_serves()  # the broker has the topic from now on
        yield made


@pytest.fixture
def stage(secured_broker: Standalone, tmp_path: Path) -> Iterator[Stage]:
    """Of one test, which replaces its processes."""
    with staged(secured_broker, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Of all tests that leave it observing, as it was."""
    with staged(secured_broker, tmp_path_factory.mktemp("shared")) as made:
        yield made


def test_all_kinds_go_on_and_are_counted_once_and_the_enforcing_listener_closes(shared: Stage) -> None:
    with ExitStack() as stack, shared.counting(no_reauth=4, killed=1):
        clients = [client.begin(**ONLY_CONNECTS) for client in shared.all_kinds(stack)]
        other = stack.enter_context(shared.enforced()).begin(**ONLY_CONNECTS)
        for client in (*clients, other):
            client.wait_until(1.1 * LIFETIME_S)
        assert shared.cluster.metrics().total(OPEN) == 4
        assert shared.observed() == 0, "an idle one would not have been closed"
        for _ in range(3):
            for client in clients:
                client.assert_serves()
        other.use()
        other.assert_ends_with(EXPIRED)
        assert shared.observed(reason="expired", method="token") == shared.observed() == 3
        assert shared.cluster.metrics().total(OPEN) == 3
    for client in clients:
        shared.cluster.wait_for_log(WOULD_BE_CLOSED, client.address, "reason=expired", "principal=alice")
    assert shared.cluster.log_text().count(WOULD_BE_CLOSED) == 3


@contextmanager
def connected_with_short_token(stage: Stage) -> Iterator[tuple[Session, str, float]]:
    """A client in lookup mode, its token of a few seconds, and when that ends by the wall clock.

    Where the machine is so slow that the token has ended before it was verified, with another token.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        token = make_token(stage.broker.secret_key.read_bytes(), "alice", LIFETIME_S)
        ends_at = time.time() + LIFETIME_S
        with stage.lookup() as client:
            answer = client.connect(token=token, **CANNOT_BE_ASKED)
            if answer.type == BaseCommand.CONNECTED:
                yield client, token, ends_at
                return
        assert time.time() >= ends_at - 1, answer  # tokens end at whole seconds: up to one earlier
        assert time.monotonic() < deadline, "each token has ended before it was verified"


def test_a_token_that_has_ended_serves_in_lookup_mode(shared: Stage) -> None:
    """The lookup worker accepts its sealed principal; a new connection is denied as ever."""
    with ExitStack() as stack:
        client, token, ends_at = stack.enter_context(connected_with_short_token(shared))
        eventually(lambda: time.time() > ends_at, what="the token's end")
        for _ in range(3):
            client.assert_serves()
        with shared.lookup() as late:
            refused = late.connect(token=token)
            assert refused.error.message == "Failed to authenticate", refused
        client.assert_serves()


def test_a_reload_enforces_and_observes_again(shared: Stage) -> None:
    """Also for connections that are there."""
    with ExitStack() as stack:
        clients = [client.begin(**ONLY_CONNECTS) for client in shared.all_kinds(stack)]
        early = stack.enter_context(shared.enforced()).begin(**ONLY_CONNECTS)
        for client in (*clients, early):
            client.wait_until(1.1 * LIFETIME_S)
        for client in clients:
            client.assert_serves()
        reload(shared.cluster, "enforce")
        with shared.counting(killed=3):
            for client in clients:
                client.use()
                client.assert_ends_with(EXPIRED)
        reload(shared.cluster, "observe")
        again = [client.begin(**ONLY_CONNECTS) for client in shared.all_kinds(stack)]
        for client in again:
            client.wait_until(1.1 * LIFETIME_S)
            client.assert_serves()
        early.use()
        early.assert_ends_with(EXPIRED)


@pytest.mark.parametrize("at_once", [False, True], ids=["a later reload", "the one that replaces it"])
def test_a_reload_reaches_a_relay_that_stays_in_a_replaced_forwarder(stage: Stage, at_once: bool) -> None:
    """With TLS it cannot move, and it is to end as soon as all others."""
    new_processes: Tables = {"log": {"level": "debug"}, "limits": {"drain_timeout_ms": LONG_DRAIN_MS}}
    enforce: Tables = {"session": {"enforcement": "enforce"}}
    with stage.secure_relay() as client:
        client.begin(**CANNOT_BE_ASKED).wait_until(1.1 * LIFETIME_S)
        client.assert_serves()
        tables = merged(stage.cluster.tables, new_processes, *([enforce] if at_once else []))
        stage.cluster.write_config(tables)
        answer = stage.cluster.command("reload")
        assert answer.returncode == 0, answer
        leaving = [one["role"] for one in stage.cluster.status()["leaving_workers"]]
        assert "forwarder" in leaving
        if not at_once:
            client.assert_serves()
            stage.cluster.write_config(merged(tables, enforce))
            answer = stage.cluster.command("reload")
            assert answer.returncode == 0, answer
        client.use()
        client.assert_ends_with(EXPIRED)


def test_a_successor_goes_on_and_counts_no_life_twice(stage: Stage) -> None:
    with stage.relay() as counted, stage.relay() as idle:
        for client in (counted, idle):
            client.begin(**ONLY_CONNECTS).wait_until(1.1 * LIFETIME_S)
        counted.assert_serves()
        assert stage.observed() == 1
        pid = stage.cluster.worker_pids()["forwarder-0"]
        os.kill(pid, signal.SIGKILL)
        for client in (counted, idle):
            client.assert_serves()
        eventually(lambda: stage.cluster.worker_pids().get("forwarder-0", pid) != pid, what="a successor")
        eventually(lambda: stage.observed() == 1, what="the idle one's end, which the successor has counted")
        assert stage.cluster.log_text().count(WOULD_BE_CLOSED) == 2


# ---- real clients

RELAYED_MESSAGES = 300
"""So many more are produced and consumed past the end of each client's session."""


@pytest.fixture
def clients(python_client: Program, java_client: Program) -> list[Callable[..., Any]]:
    return [
        lambda url, topic, key: start(python_client, url, f"{topic}-python", key, size=100, rate=100),
        lambda url, topic, key: start(java_client, url, f"{topic}-java", key, size=100, rate=100),
    ]


def test_expired_clients_go_on_until_a_reload_enforces(
    secured_broker: Standalone, clients: list[Callable[..., Any]]
) -> None:
    """Python's and Java's, each producing and consuming. No client is asked in a relay, so all of these expire."""
    tables = merged(authentication(secured_broker), OBSERVE)
    topic = f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}"
    with running(cluster := ProxyCluster(tables)), ExitStack() as stack:
        runs = [
            stack.enter_context(client(cluster.service_url, topic, secured_broker.secret_key)) for client in clients
        ]
        for run in runs:
            run.wait_for_progress(1)
        # All relays have begun by now, and are used past their end soon; connections in lookup mode may have been, too.
        all_have_ended_at = time.monotonic() + 1.1 * LIFETIME_S
        eventually(lambda: time.monotonic() > all_have_ended_at, what="the sessions' ends")
        for run in runs:
            run.wait_for_progress(RELAYED_MESSAGES)
        before = cluster.metrics()
        assert before.total(OBSERVED) >= len(runs)
        for run in runs:
            run.wait_for_progress(RELAYED_MESSAGES)
        moved = cluster.metrics().moved_since(before)
        names = (OBSERVED, KILLED, "pulsar_proxy_new_connections_total", "pulsar_proxy_ended_connections_total")
        assert [moved.get(name, 0) for name in names] == [0, 0, 0, 0], moved
        reload(cluster, "enforce")
        eventually(lambda: cluster.metrics().total(KILLED) >= len(runs), what="both relays are closed")
        reload(cluster, "enforce", connections_max_reauth_ms=0)  # however slowly they come back, they may stay
        for run in runs:
            run.wait_for_progress(1)
        outcomes = [run.stop() for run in runs]
    for outcome in outcomes:
        result = outcome.result
        assert result["ok"], f"{result}\n{outcome.log[-3000:]}"
        assert (result["missing"], result["corrupt"], result["send_failures"]) == (0, 0, 0), result
