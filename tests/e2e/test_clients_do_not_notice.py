"""Relays outlive their processes, and real clients do not notice: none of them reconnects."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from local.standalone import Standalone

from .conftest import before, running
from .lab.cluster import ProxyCluster
from .lab.programs import Program, Run
from .test_relays_survive import ADOPTED, kill_forwarder

MESSAGES = 20_000
RATE = 2000


def test_real_clients_do_not_notice(every_client: list[Program], broker: Standalone, topic: str) -> None:
    """Forwarders are killed and everything is replaced while they produce and consume: none of them reconnects."""
    tables: Mapping[str, Mapping[str, object]] = {"brokers": before(broker)}
    with running(ProxyCluster(tables)) as cluster, ExitStack() as stack:
        runs: dict[str, Run] = {
            program.name: stack.enter_context(
                program.start("stream", cluster.service_url, f"{topic}-{program.name}", rate=RATE)
            )
            for program in every_client
        }
        assert runs
        for run in runs.values():
            run.wait_for_progress(300)
        said_before = {name: run.reconnects() for name, run in runs.items()}  # settings with such names, at the start
        for number in range(6):
            kill_forwarder(cluster, number % 2)
            if number == 2:
                answer = cluster.command("upgrade", timeout_s=300)
                assert answer.returncode == 0, answer.stderr
            for run in runs.values():
                run.wait_for_progress(RATE // 4)
        for run in runs.values():
            run.wait_for_progress(max(1, MESSAGES - run.progress()))
        adopted = cluster.metrics().total(ADOPTED)  # by those who follow the last two who were killed
        outcomes = {name: run.stop() for name, run in runs.items()}
    for name, outcome in outcomes.items():
        result = outcome.result
        assert result["ok"], f"{name}: {result}\n{outcome.log[-4000:]}"
        assert result["sent"] >= MESSAGES
        found = {key: result[key] for key in ("missing", "duplicates", "send_failures", "in_order")}
        assert found == {"missing": 0, "duplicates": 0, "send_failures": 0, "in_order": True}, name
        assert outcome.reconnect_lines[said_before[name] :] == [], name
    assert adopted >= len(runs)
    print({name: outcome.result["sent"] for name, outcome in outcomes.items()})
