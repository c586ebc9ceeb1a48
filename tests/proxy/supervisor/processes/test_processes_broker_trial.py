"""proxy.supervisor.processes.broker_trial: what the child process says, or that it says nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from proxy.config.trial import TRIAL_TIMEOUT_S, BrokerTrial
from proxy.config.types import BrokerCredentials, Brokers, Config
from proxy.supervisor.processes.broker_trial import START_GRACE_S, TrialNotRun, run_trial
from proxy.supervisor.processes.children import child_reaper

TOKEN = "a.b.c"
CONFIG = Config(brokers=Brokers(credentials=BrokerCredentials(method="token", token=TOKEN)))


class Child:
    """In the place of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Callable[[], bytes] = lambda: b'{"accepted":true,"reason":""}'
        self.code = 0
        self.command: list[str] = []
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(trio, "run_process", self._run)

    async def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        await trio.lowlevel.checkpoint()
        assert child_reaper._spawning, "no other code may reap it"
        self.command, self.options = command, options
        return subprocess.CompletedProcess(command, self.code, self.answer(), None)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(monkeypatch)


async def test_the_trial_gets_the_whole_configuration_unseen(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSAR_TRIO_PROXY__BROKERS__CREDENTIALS__TOKEN", TOKEN)
    assert await run_trial(CONFIG) == BrokerTrial(accepted=True)
    assert json.loads(child.options["stdin"])["brokers"]["credentials"]["token"] == TOKEN
    assert TOKEN not in str(child.command)
    assert TOKEN not in str(child.options["env"])


async def test_a_refusal(child: Child) -> None:
    child.answer = lambda: b'{"accepted":false,"reason":"no"}'
    assert await run_trial(CONFIG) == BrokerTrial(accepted=False, reason="no")


@pytest.mark.parametrize("answer", [b"", b"Traceback", b'{"accepted":"yes"}', b"[]"])
async def test_an_invalid_answer_of_the_trial_process_is_no_acceptance(child: Child, answer: bytes) -> None:
    child.answer, child.code = lambda: answer, -9
    with pytest.raises(TrialNotRun, match="it ended with code -9"):
        await run_trial(CONFIG)


async def test_a_process_that_cannot_be_started(child: Child) -> None:
    def fail() -> bytes:
        raise OSError(11, "Resource temporarily unavailable")

    child.answer = fail
    with pytest.raises(TrialNotRun, match="cannot be started: Resource temporarily unavailable"):
        await run_trial(CONFIG)


async def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "run_process", hang)
    with pytest.raises(TrialNotRun, match="did not end in time"):
        await run_trial(CONFIG)
    assert trio.current_time() == pytest.approx(TRIAL_TIMEOUT_S + START_GRACE_S)


async def test_a_process_that_is_not_wanted_any_more_is_killed(child: Child) -> None:
    """Not asked to end: it may have inherited a mask of signals, and the end of the cluster would wait for it."""
    await run_trial(CONFIG)
    killed: list[bool] = []
    await child.options["deliver_cancel"](SimpleNamespace(kill=lambda: killed.append(True)))
    assert killed == [True]
