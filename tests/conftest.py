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
SPARK = "tests/analytics/"
OPEN_BROKER = (
    "test_clients",
    "test_clients_do_not_notice",
    "test_exposure",
    "test_failing_brokers",
    "test_large_answers",
    "test_leaving",
    "test_misbehaving_clients",
    "test_operations",
    "test_password_floods",
    "test_pulsar_perf",
    "test_strangers",
)
"""End-to-end tests with the broker that lets every client in."""
SECURED_BROKER = (
    "test_analytics",
    "test_basic_and_scram",
    "test_lookups",
    "test_relays_left_behind",
    "test_security",
)
"""End-to-end tests with the broker that authenticates."""
RENEWALS = (
    "test_proxy_chain",
    "test_proxy_chain_renewal",
    "test_reauthentication",
    "test_reauthentication_in_relays",
    "test_reauthentication_methods",
    "test_reauthentication_survives",
    "test_session_end_holds",
    "test_session_enforcement",
)
"""The same, with sessions that are renewed or end: as long again, which is worth a broker of its own."""
BOTH_BROKERS = ("test_chart_smoke", "test_check_connect", "test_lookup_attacks", "test_recovery")
MATRIX = ("test_works_with",)
"""Brokers of its own, one after the other: minutes."""
LONG = (
    "test_analytics_executors",
    "test_analytics_kills",
    "test_analytics_object_store",
    "test_docs_commands",
    "test_relays_survive",
    "test_wrong_changes",
)
"""Files that share nothing, of more than a minute: not left for the end, which one process would wait for."""
SHARING = {
    "renewals": RENEWALS,
    "secured broker": SECURED_BROKER,
    "open broker": OPEN_BROKER,
    "matrix": MATRIX,
    "both brokers": BOTH_BROKERS,
}
"""By what is shared, the longest first. A file that stands in none has its own: it needs nothing that others share."""


def scope_of(nodeid: str) -> tuple[int, str]:
    """Return what one process runs in one go, with its rank: what shares a Spark session or a broker comes first, then
    end-to-end tests that share nothing, one file each, the long ones before the others. All other tests, one folder
    each, are short and fill the rest.
    """
    if nodeid.startswith(SPARK):
        return 0, "Spark"
    if not nodeid.startswith(END_TO_END):
        return len(SHARING) + 3, nodeid.partition("::")[0].removeprefix("tests/").rpartition("/")[0]
    name = nodeid.removeprefix(END_TO_END).partition(".py::")[0]
    for rank, (what, files) in enumerate(SHARING.items(), start=1):
        if name in files:
            return rank, what
    return len(SHARING) + (1 if name in LONG else 2), name


class ByResource(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hand out tests by what they share, so that one Spark session and one broker of each kind do."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByResource | None:
    """Return our scheduler for `pytest -n 3`; None, which is xdist's own, where the command line asks for a `--dist`.

    xdist hands scopes out in the order of their collection.
    """
    if config.option.dist != "load":
        return None
    config.option.loadscopereorder = False
    return ByResource(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort scopes by rank; within one everything stays where it was."""
    items.sort(key=lambda item: scope_of(item.nodeid)[0])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI nothing may be skipped in silence: a skip is a failure there."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.skipped and os.environ.get(FORBID_SKIPS) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, which {FORBID_SKIPS} forbids: {report.longrepr}"
    return report  # type: ignore[return-value]
