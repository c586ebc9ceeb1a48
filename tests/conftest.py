"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from local.ports import use_part
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A busy machine is no failure: no deadline for a single example. All else stays as it is, so CI's profile too.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Processes side by side that look for free ports find different ones. A process that follows one that died has the next
# number: it takes the part of one of the first.
PARTS = max(2, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "2")))
use_part(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PARTS, PARTS)

FORBID_SKIPS = "PULSAR_TRIO_PROXY_FORBID_SKIPS"
END_TO_END = "tests/e2e/"
STAND_ALONE = (
    "test_analytics",
    "test_relays_survive",
    "test_framed_relays_survive",
    "test_docs_commands",
    "test_two_brokers",
    "test_admin",
    "test_inside",
    "test_analytics_cluster",
    "test_exchanges_survive",
    "test_slow_names",
    "test_report_in_browser",
    "test_stranger_brokers",
    "test_discovery",
)
"""End-to-end tests that need next to nothing of what others share, the longest first."""


def scope_of(nodeid: str) -> tuple[int, str]:
    """What is run by one process: the unit tests (0), the end-to-end tests that share brokers and client programs (1),
    each file of the others (from 2 on).
    """
    if not nodeid.startswith(END_TO_END):
        return 0, "unit tests"
    name = nodeid.removeprefix(END_TO_END).partition(".py::")[0]
    if name in STAND_ALONE:
        return 2 + STAND_ALONE.index(name), name
    return 1, "end-to-end tests"


class ByKind(LoadScopeScheduling):  # type: ignore[misc]  # xdist does not tell its types
    """For `pytest -n 2`: one process has the unit tests, so one Spark, the other most end-to-end tests, so one set of
    brokers; whichever is done takes the files that stand alone, one after the other, so that both end together.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByKind:
    """What xdist asks for. It hands scopes out as they were collected."""
    config.option.loadscopereorder = False
    return ByKind(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scopes in the order of their numbers; within one everything stays where it was."""
    items.sort(key=lambda item: scope_of(item.nodeid)[0])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI nothing may be skipped in silence: a skip is a failure there."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.skipped and os.environ.get(FORBID_SKIPS) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, which {FORBID_SKIPS} forbids: {report.longrepr}"
    return report  # type: ignore[return-value]
