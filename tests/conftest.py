"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest

FORBID_SKIPS = "PULSAR_TRIO_PROXY_FORBID_SKIPS"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI nothing may be skipped in silence: a skip is a failure there."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.skipped and os.environ.get(FORBID_SKIPS) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, which {FORBID_SKIPS} forbids: {report.longrepr}"
    return report  # type: ignore[return-value]
