"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

FORBID_SKIPS = "PULSAR_TRIO_PROXY_FORBID_SKIPS"
END_TO_END = "tests/e2e/"


class ByKind(LoadScopeScheduling):  # type: ignore[misc]  # xdist does not tell its types
    """For `pytest -n 2`: end-to-end tests in one process, all others in another, so one broker and one Spark each."""

    def _split_scope(self, nodeid: str) -> str:
        return str(nodeid.startswith(END_TO_END))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByKind:
    """What xdist asks for."""
    return ByKind(config, log)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI nothing may be skipped in silence: a skip is a failure there."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.skipped and os.environ.get(FORBID_SKIPS) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, which {FORBID_SKIPS} forbids: {report.longrepr}"
    return report  # type: ignore[return-value]
