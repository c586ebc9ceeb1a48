"""proxy.supervisor.broker_changes: what no broker accepts does not come into force; what one accepts does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from supervisor_fakes import make_config

from proxy.common.reloading_file import file_stamps
from proxy.config.trial import BrokerTrial
from proxy.config.types import BrokerCredentials, Config
from proxy.supervisor import broker_changes
from proxy.supervisor.broker_changes import (
    IN_FORCE_WAIT_S,
    RETRY_PAUSE_FIRST_S,
    RETRY_PAUSE_MAX_S,
    WATCH_INTERVAL_S,
    BrokerChanges,
)
from proxy.supervisor.processes.broker_trial import TrialNotRun
from proxy.supervisor.processes.configure import ReloadRefused

HELD = "pulsar_proxy_broker_files_held"
ACCEPTED = BrokerTrial(accepted=True)
REFUSED = BrokerTrial(accepted=False, reason="b0:6650 at 10.0.0.1: AuthenticationError: no")
TWO_POLLS_S = 2 * WATCH_INTERVAL_S + 0.1


class FakeCluster:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.taken_over: list[dict[str, str]] = []
        self.refusals: list[str] = []

    async def take_over_files(self, stamps: dict[str, str]) -> list[str]:
        await trio.lowlevel.checkpoint()
        if not self.refusals:
            self.taken_over.append(stamps)
        return self.refusals


class Setup:
    """The changes of a cluster with a token in a file. ``outcome``: of trials; ``works``: what is in force."""

    def __init__(self, tmp_path: Path) -> None:
        self.file = tmp_path / "proxy.jwt"
        self.number = 0
        self.write()
        self.config = make_config(brokers={"credentials": {"method": "token", "file": str(self.file)}})
        self.cluster = FakeCluster(self.config)
        self.outcome: BrokerTrial | TrialNotRun = ACCEPTED
        self.works = True
        self.tried: list[str] = []
        self.tried_at: list[float] = []
        self.during_trial: Callable[[], None] = lambda: None
        self.lock = trio.Lock()
        self.changes = BrokerChanges(self.cluster, self._in_force_works, self.lock, self._try)  # type: ignore[arg-type]

    def write(self) -> None:
        """A new content, of another length: a stamp has the length, and a coarse clock does not matter."""
        self.number += 1
        self.file.write_text("x" * self.number)

    async def _in_force_works(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self.works

    async def _try(self, config: Config) -> BrokerTrial:
        await trio.lowlevel.checkpoint()
        self.tried.append(config.brokers.service_url)
        self.tried_at.append(trio.current_time())
        self.during_trial()
        if isinstance(self.outcome, TrialNotRun):
            raise self.outcome
        return self.outcome

    def with_brokers(self, **changed: Any) -> Config:
        return msgspec.structs.replace(self.config, brokers=msgspec.structs.replace(self.config.brokers, **changed))

    @property
    def stamps(self) -> dict[str, str]:
        return file_stamps([str(self.file)])

    @property
    def held(self) -> float | None:
        return self.cluster.registry.get_sample_value(HELD)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clock would not wait for them."""

    async def read(work: Callable[[Config], object], config: Config) -> object:
        await trio.lowlevel.checkpoint()
        return work(config)

    monkeypatch.setattr(broker_changes, "in_thread_without_signals", read)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


# ---- settings

OTHER = {"service_url": "pulsar://other:6650"}


async def test_a_change_that_no_broker_login_depends_on_is_not_tried(setup: Setup) -> None:
    setup.outcome = REFUSED
    changed = msgspec.structs.replace(
        setup.with_brokers(probe_interval_ms=1, allowed_ports=(7000,)),
        limits=msgspec.structs.replace(setup.config.limits, max_connections=5),
    )
    assert await setup.changes.require_acceptance(changed) == setup.stamps
    assert setup.tried == []


@pytest.mark.parametrize(
    "changed",
    [
        OTHER,
        {"through_proxy": True},
        {"proxy_protocol": "within_tls"},
        {"credentials": BrokerCredentials(method="basic", file="FILE")},
        {"tls": msgspec.convert({"verify_hostname": False}, type(make_config().brokers.tls))},
    ],
    ids=["service_url", "through_proxy", "proxy_protocol", "credentials", "tls"],
)
async def test_a_reload_that_no_broker_accepts_is_refused_while_the_old_configuration_works(
    setup: Setup, changed: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    if "credentials" in changed:  # of another method, by the same file
        changed = {"credentials": msgspec.structs.replace(changed["credentials"], file=str(setup.file))}
    config = setup.with_brokers(**changed)
    await setup.changes.require_acceptance(config)
    assert setup.tried == [config.brokers.service_url]
    setup.outcome = REFUSED
    with pytest.raises(ReloadRefused, match=r"^brokers: no broker accepts .*: no\), .* reload --force`$"):
        await setup.changes.require_acceptance(config)


async def test_where_what_is_in_force_does_not_work_there_is_nothing_to_lose(
    setup: Setup, autojump_clock: trio.testing.MockClock
) -> None:
    setup.outcome, setup.works = REFUSED, False
    await setup.changes.require_acceptance(setup.with_brokers(**OTHER))
    assert trio.current_time() == pytest.approx(IN_FORCE_WAIT_S)


async def test_workers_that_were_reconfigured_a_moment_ago_have_time_to_find_that_it_works(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Two changes in a row: the good one is in force, and the bad one is refused."""
    setup.outcome, setup.works = REFUSED, False

    async def find() -> None:
        await trio.sleep(IN_FORCE_WAIT_S / 2)
        setup.works = True

    nursery.start_soon(find)
    with pytest.raises(ReloadRefused):
        await setup.changes.require_acceptance(setup.with_brokers(**OTHER))


@pytest.mark.parametrize("works", [True, False])
async def test_a_trial_that_does_not_run_accepts_nothing(
    setup: Setup, works: bool, autojump_clock: trio.testing.MockClock
) -> None:
    setup.outcome, setup.works = TrialNotRun("it did not end in time"), works
    if works:
        with pytest.raises(ReloadRefused, match=r"cannot be tried \(it did not end in time\)"):
            await setup.changes.require_acceptance(setup.with_brokers(**OTHER))
    else:
        await setup.changes.require_acceptance(setup.with_brokers(**OTHER))


async def test_files_that_change_during_the_trial_are_not_those_that_were_tried(setup: Setup) -> None:
    setup.during_trial = setup.write
    with pytest.raises(ReloadRefused, match="reload once more"):
        await setup.changes.require_acceptance(setup.with_brokers(**OTHER))


async def test_changed_files_are_tried_by_any_reload(setup: Setup, autojump_clock: trio.testing.MockClock) -> None:
    """Workers build all again upon a reload, and would have the content that no broker accepts."""
    setup.write()
    setup.outcome = REFUSED
    with pytest.raises(ReloadRefused):
        await setup.changes.require_acceptance(setup.config)
    setup.changes.on_applied(setup.stamps)  # by force
    await setup.changes.require_acceptance(setup.config)
    assert len(setup.tried) == 1


# ---- files


async def watch(setup: Setup, nursery: trio.Nursery) -> None:
    nursery.start_soon(setup.changes.watch_files)
    await trio.sleep(TWO_POLLS_S)
    assert setup.tried == [], "what is there at the start is in force"


async def test_a_file_that_a_broker_accepts_is_taken_over(
    setup: Setup, nursery: trio.Nursery, logs: list[Any], autojump_clock: trio.testing.MockClock
) -> None:
    chances: list[float] = []
    setup.changes.on_files_taken_over = lambda: chances.append(trio.current_time())
    await watch(setup, nursery)
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    assert setup.cluster.taken_over == [setup.stamps]
    assert len(chances) == 1, "a configuration that was refused is tried again"
    await trio.sleep(1000)
    assert len(setup.tried) == 1
    assert setup.held == 0
    [entry] = logs
    assert (entry["event"], entry["files"]) == ("took over a changed file", str(setup.file))
    nursery.cancel_scope.cancel()


async def test_a_file_that_no_broker_accepts_is_held_and_tried_again(
    setup: Setup, nursery: trio.Nursery, logs: list[Any], autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)
    setup.outcome = REFUSED
    setup.write()
    await trio.sleep(300)
    assert setup.cluster.taken_over == []
    assert (setup.held, setup.changes.are_files_held) == (1, True)
    first, second = setup.tried_at[:2]
    assert second - first == pytest.approx(RETRY_PAUSE_FIRST_S, abs=WATCH_INTERVAL_S)
    pauses = [after - before for before, after in zip(setup.tried_at[-3:], setup.tried_at[-2:], strict=False)]
    assert pauses == pytest.approx([RETRY_PAUSE_MAX_S] * 2, abs=WATCH_INTERVAL_S)
    [entry] = logs
    assert (entry["log_level"], entry["files"]) == ("error", str(setup.file)), "once for each content"
    assert entry["reason"] == f"no broker accepts the proxy with it: {REFUSED.reason}"
    setup.outcome = ACCEPTED
    await trio.sleep(RETRY_PAUSE_MAX_S + WATCH_INTERVAL_S)
    assert setup.cluster.taken_over == [setup.stamps]
    assert setup.held == 0
    nursery.cancel_scope.cancel()


async def test_a_held_file_is_held_in_an_outage_too(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The content before is nowhere but in the workers' memory: it may be the right one once brokers are back."""
    await watch(setup, nursery)
    setup.outcome, setup.works = REFUSED, False
    setup.write()
    await trio.sleep(300)
    assert setup.cluster.taken_over == []
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("works", [True, False])
async def test_a_file_that_cannot_be_tried(
    setup: Setup, nursery: trio.Nursery, works: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """It is held, unless what is in force does not work: a machine that cannot start a trial must not end the proxy."""
    await watch(setup, nursery)
    setup.outcome, setup.works = TrialNotRun("it cannot be started"), works
    setup.write()
    await trio.sleep(60)
    assert bool(setup.cluster.taken_over) is not works
    assert setup.held == works
    nursery.cancel_scope.cancel()


async def test_a_content_that_comes_back_is_told_to_workers_that_may_have_started_with_the_other(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """The same file is moved back, with the same stamp: it is in force, so it needs no trial, and no broker."""
    await watch(setup, nursery)
    aside, before = setup.file.with_name("aside"), setup.stamps
    setup.outcome = REFUSED
    setup.file.rename(aside)
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    assert (setup.held, len(setup.tried)) == (1, 1)
    aside.rename(setup.file)
    assert setup.stamps == before
    setup.cluster.refusals = ["the auth worker with pid 7: changed once more"]
    await trio.sleep(TWO_POLLS_S)
    assert setup.held == 1
    setup.cluster.refusals = []
    await trio.sleep(RETRY_PAUSE_FIRST_S + WATCH_INTERVAL_S)
    assert (setup.held, setup.cluster.taken_over) == (0, [before])
    await trio.sleep(300)
    assert (len(setup.tried), len(setup.cluster.taken_over)) == (1, 1)
    setup.file.rename(aside)
    setup.write()
    await trio.sleep(WATCH_INTERVAL_S)  # too short for a trial, but not for a start
    aside.rename(setup.file)
    await trio.sleep(TWO_POLLS_S)
    assert (len(setup.tried), setup.cluster.taken_over) == (1, [before, before])
    nursery.cancel_scope.cancel()


async def test_the_last_of_several_changes_counts(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)
    setup.outcome = REFUSED
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    assert len(setup.tried) == 1
    setup.outcome = ACCEPTED
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    assert setup.cluster.taken_over == [setup.stamps], "at once, not after the pause of the one before"
    nursery.cancel_scope.cancel()


async def test_a_file_that_changes_during_its_trial_is_tried_again(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)

    def change_once() -> None:
        setup.during_trial = lambda: None
        setup.write()

    setup.during_trial = change_once
    setup.write()
    await trio.sleep(10)
    assert len(setup.tried) == 2
    assert setup.cluster.taken_over == [setup.stamps]
    nursery.cancel_scope.cancel()


async def replace_all_the_time(setup: Setup, nursery: trio.Nursery) -> None:
    """As a sidecar that replaces the token every second: no content is the same at two polls, or during a trial."""

    async def go_on() -> None:
        while True:
            setup.write()
            await trio.sleep(WATCH_INTERVAL_S / 2)

    setup.during_trial = setup.write
    await watch(setup, nursery)
    nursery.start_soon(go_on)


async def test_a_file_that_is_replaced_all_the_time_is_taken_over(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await replace_all_the_time(setup, nursery)
    await trio.sleep(60)
    assert len(setup.cluster.taken_over) > 10, "the one in force would end"
    assert len(setup.tried) == len(setup.cluster.taken_over) + 1, "two contents were accepted before one was untried"
    assert await setup.changes.require_acceptance(setup.with_brokers(**OTHER)) == setup.stamps, "a reload goes on, too"
    nursery.cancel_scope.cancel()


async def test_a_file_that_is_replaced_all_the_time_is_held_where_no_broker_accepts_it(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.outcome = REFUSED
    await replace_all_the_time(setup, nursery)
    await trio.sleep(60)
    assert len(setup.tried) > 2, "it is tried"
    assert setup.cluster.taken_over == []
    assert setup.held == 1
    setup.outcome = ACCEPTED
    await trio.sleep(20)
    assert setup.cluster.taken_over
    setup.outcome, setup.cluster.taken_over[:] = REFUSED, []
    await trio.sleep(60)
    assert setup.cluster.taken_over == [], "a refusal ends what the acceptances before it have allowed"
    nursery.cancel_scope.cancel()


async def test_a_changed_file_that_not_all_workers_took_over_is_tried_again(
    setup: Setup, nursery: trio.Nursery, logs: list[Any], autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)
    setup.cluster.refusals = ["the auth worker with pid 7: changed once more"]
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    assert setup.held == 1
    assert logs[-1]["reason"].endswith(f"not every worker took it over: {setup.cluster.refusals[0]}")
    setup.cluster.refusals = []
    await trio.sleep(RETRY_PAUSE_FIRST_S + WATCH_INTERVAL_S)
    assert (setup.held, setup.cluster.taken_over) == (0, [setup.stamps])
    nursery.cancel_scope.cancel()


async def test_a_file_is_no_longer_held_once_a_reload_has_applied_it(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)
    setup.outcome = REFUSED
    setup.write()
    await trio.sleep(TWO_POLLS_S)
    setup.changes.on_applied(setup.stamps)
    assert setup.held == 0
    await trio.sleep(100)
    assert len(setup.tried) == 1
    nursery.cancel_scope.cancel()


async def test_no_file_is_taken_over_during_a_reload(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await watch(setup, nursery)
    async with setup.lock:
        setup.write()
        await trio.sleep(100)
        assert setup.tried == []
        setup.changes.on_applied(setup.stamps)
    await trio.sleep(100)
    assert setup.tried == []
    nursery.cancel_scope.cancel()
