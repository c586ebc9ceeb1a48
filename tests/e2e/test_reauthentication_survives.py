"""Sessions that are renewed while their processes are killed, and so often that a leak would show."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.counts import count_of
from .lab.crowd import many_open_files
from .lab.fakes import FakeBroker, LookupBroker
from .lab.processes import Use
from .lab.programs import Program, Run
from .lab.renewing import start
from .lab.schema import LOOKUP_CONNECT
from .lab.security import NAMESPACE
from .lab.sessions import FAILURE, KILLED, SUCCESS, auth_response
from .lab.waiting import eventually
from .lab.wire import WireClient
from .test_reauthentication import LARGE, SMALL

TOOK_OVER = "took over the relays of a predecessor"

# ---- killed at random

KILLING_S = 20.0
KILLS_EACH = 4
LIFE_S = 1.5
"""For so long a new worker is left alone: who dies within a second of its start is replaced after a pause only."""


class Killer:
    """Kills forwarders and auth workers at random, one about every second."""

    def __init__(self, cluster: ProxyCluster) -> None:
        self.kills = {"forwarder": 0, "auth": 0}
        self._cluster = cluster
        self._random = random.Random(7)
        self._killed_at: dict[str, float] = {}

    def run(self, seconds: float) -> None:
        """For so long; on a busy machine, where workers take long to come back, until enough of each have died."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or min(self.kills.values()) < KILLS_EACH:
            self._kill_one()
            time.sleep(0.5 + self._random.random())

    def _kill_one(self) -> None:
        now = time.monotonic()
        role = self._random.choice(sorted(self.kills))
        ripe = {name: pid for name, pid in self._running(role) if now - self._killed_at.get(name, 0.0) > LIFE_S}
        if ripe:
            name = self._random.choice(sorted(ripe))
            self._killed_at[name] = now
            os.kill(ripe[name], signal.SIGKILL)
            self.kills[role] += 1

    def _running(self, role: str) -> list[tuple[str, int]]:
        workers = self._cluster.status()["workers"]
        return [
            (f"{role}-{worker['worker']}", worker["pid"])
            for worker in workers
            if worker["role"] == role and worker["state"] == "running"
        ]


def clients_in(log: str, *words: str) -> set[str]:
    """The addresses of the clients in the lines that have all these words."""
    lines = [line for line in log.splitlines() if all(word in line for word in words)]
    return {line.partition("client=")[2].split()[0] for line in lines}


def test_streams_of_clients_that_renew_survive_their_forwarders_and_auth_workers(
    every_client: list[Program], secured_broker: Standalone
) -> None:
    """Their relays go on: nothing is lost, doubled or changed. The only end that a relay may have is that no worker was
    there to ask its client in time: then it is told so, and comes back.
    """
    tables: Tables = {"cluster": {"forwarders": 2, "auth_workers": 2}}
    with ExitStack() as stack:
        cluster = stack.enter_context(running(ProxyCluster(merged(authentication(secured_broker), tables))))
        runs: dict[str, Run] = {}
        for program in every_client:
            for name, options in (("small", SMALL), ("large", LARGE)):
                if program.name != "python":  # it is not asked while it produces
                    topic = f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}"
                    begun = start(program, cluster.service_url, topic, secured_broker.secret_key, **options)
                    runs[f"{program.name} {name}"] = stack.enter_context(begun)
        if not runs:
            pytest.skip("no client here can be asked while it produces")
        for run in runs.values():
            run.wait_for_progress(1)
        killer, since = Killer(cluster), len(cluster.log_text())
        killer.run(KILLING_S)
        log = cluster.log_text()[since:]
        with ThreadPoolExecutor(len(runs)) as pool:
            outcomes = dict(zip(runs, pool.map(Run.stop, runs.values()), strict=True))
        closed = clients_in(cluster.log_text()[since:], "a client's session is being closed", "reason=expired")
    ended = clients_in(log, "a relay has ended")
    assert ended <= clients_in(log, "a client's session is being closed", "reason=expired")
    expected = {"ok": True, "missing": 0, "in_order": True, "corrupt": 0, "send_failures": 0}
    for name, outcome in outcomes.items():
        assert {key: outcome.result.get(key) for key in expected} == expected, f"{name}: {outcome.result}"
        assert outcome.result["duplicates"] == 0 or closed, f"{name}: {outcome.result}"
    assert min(killer.kills.values()) >= KILLS_EACH, killer.kills
    assert log.count(TOOK_OVER) > len(ended)
    minted = sum(outcome.result["minted"] for outcome in outcomes.values())
    assert minted > len(runs) + len(closed), (
        "each has one to come in, and one to come back; with the others they renewed"
    )
    assert "failed to authenticate itself again" not in log
    assert "eyJ" not in log
    print(
        killer.kills,
        f"{len(ended)} relays ended;",
        {name: outcome.result["minted"] for name, outcome in outcomes.items()},
    )


# ---- thousands of renewals

SESSIONS = count_of("SESSIONS", in_ci=250)
"""By hand PULSAR_PROXY_TEST_SESSIONS, as 500, which is ten thousand renewals."""
ROUNDS = 20
EARLY, LATE = slice(5, 8), slice(17, 20)
"""These rounds are compared, by their medians: memory goes a little up and down."""

PAUSE_S = 1.05
"""No client may come unasked more often than once a second."""

GROWTH_KIB_MAX = 1024
"""What one process may have more in the end, 3,000 renewals later, about half of them its own. Its heap goes up and
down by some 400 KiB by itself; to keep what one renewal brings (a token, its frame, a principal: above 1 KB) would take
1.5 MiB. That not one object is kept of each, tests/proxy/forwarder/client/test_client_lifetime.py counts.
"""


@dataclass
class Soak:
    """Sessions in lookup mode and relays to a broker of ours, half of each."""

    cluster: ProxyCluster
    key: bytes
    clients: list[WireClient]
    tokens: int = 0
    renewals: int = 0

    def token(self) -> str:
        """Another one each time."""
        self.tokens += 1
        return make_token(self.key, "alice", 3600, jti=str(self.tokens))

    def renew_all(self) -> None:
        """Each comes unasked with a fresh token; then all are known to be there, and counted."""
        for client in self.clients:
            client.send_bytes(auth_response(self.token().encode()))
        for client in self.clients:
            assert client.ping().type == BaseCommand.PONG
        self.renewals += len(self.clients)
        self.cluster.wait_for_total(SUCCESS, self.renewals)

    def use(self) -> dict[str, Use]:
        """Of each process."""
        own = {"supervisor": Use.of(self.cluster.pid)}
        return own | {name: Use.of(pid) for name, pid in self.cluster.worker_pids().items()}


@contextmanager
def soaking(directory: Path) -> Iterator[Soak]:
    """A cluster with a broker of ours, and all clients connected."""
    key = directory / "secret.key"
    key.write_bytes(os.urandom(32))
    broker = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with ExitStack() as stack:
        stack.enter_context(many_open_files(20 * SESSIONS))
        port = stack.enter_context(FakeBroker(broker)).port
        tables: Tables = {
            "brokers": {"service_url": f"pulsar://127.0.0.1:{port}", "allowed_ports": [port]},
            "authentication": {"enabled": True},
            "authentication.token": {"secret_key": str(key)},
        }
        soak = Soak(stack.enter_context(running(ProxyCluster(tables))), key.read_bytes(), [])
        for number in range(SESSIONS):
            client = stack.enter_context(WireClient(soak.cluster.port))
            target = {"proxy_to_broker_url": f"127.0.0.1:{port}"} if number % 2 else {}
            answer = client.connect(token=soak.token(), **target)
            assert answer.type == BaseCommand.CONNECTED, answer
            soak.clients.append(client)
        yield soak


def test_thousands_of_renewals_leave_nothing_behind(tmp_path: Path) -> None:
    """All are counted, no more and no less; memory and descriptors of every process stay as they were early on."""
    uses = []
    with soaking(tmp_path) as soak:
        began_at = time.monotonic()
        for _ in range(ROUNDS):
            time.sleep(PAUSE_S)
            soak.renew_all()
            uses.append(soak.use())
        scrape = soak.cluster.metrics()
        print(f"{time.monotonic() - began_at:.0f} s")
        early = {name: max(use[name].descriptors for use in uses[EARLY]) for name in uses[0]}

        def has_no_more_open() -> bool:
            return all(use.descriptors <= early[name] for name, use in soak.use().items())

        eventually(has_no_more_open, what=f"no process has more open than {early}")  # looks of our own end a bit later
    assert scrape.total(SUCCESS) == scrape.total("pulsar_proxy_reauthentication_seconds_count") == SESSIONS * ROUNDS
    assert (scrape.total(FAILURE), scrape.total(KILLED)) == (0, 0)
    for name in uses[0]:
        memory = [use[name].memory_kib for use in uses]
        print(f"{name}: memory (KiB) {memory}")
        assert median(memory[LATE]) - median(memory[EARLY]) <= GROWTH_KIB_MAX, f"{name}: {memory}"
        print(f"{name}: descriptors {[use[name].descriptors for use in uses]}")
