"""A pytest plugin for `make coverage`: what must be covered of single packages, beside pytest-cov's total.

It writes before pytest's closing line, so that this one stays the last.
"""

import io
from collections.abc import Iterator

import coverage
import pytest

PERCENT_MIN = 97.0
PACKAGES = ("proto", "auth", "lookup")
"""What reads untrusted bytes, and what decides on them."""

_FAILURES = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Compare when pytest-cov has combined the data of all processes; too little is a failure."""
    result = yield
    config = session.config
    if not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("_cov"):
        config.stash[_FAILURES] = failures = _failures(str(config.rootpath))
        session.testsfailed += len(failures)
    return result


def _failures(root: str) -> list[str]:
    measured = coverage.Coverage()
    measured.load()
    percents = {one: measured.report(include=[f"{root}/{one}/*"], file=io.StringIO()) for one in PACKAGES}
    return [
        f"FAIL Required coverage of {package}: {PERCENT_MIN:g}%; it is {percent:.2f}%"
        for package, percent in percents.items()
        if percent < PERCENT_MIN
    ]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what is not covered enough."""
    for line in config.stash.get(_FAILURES, []):
        terminalreporter.write_line(line, red=True, bold=True)
