"""A pytest plugin for `make check`: what must be covered of single packages, beside the total that pytest-cov asks for.

It speaks before pytest's closing line, so that this one stays the last.
"""

import io
from collections.abc import Iterator

import coverage
import pytest

PERCENT_MIN = 97.0
PACKAGES = ("proto", "auth", "lookup")
"""What reads untrusted bytes, and what decides on them."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Compare when pytest-cov has combined the data of all processes; too little is a failure."""
    result = yield
    config = session.config
    if not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("_cov"):
        measured = coverage.Coverage()
        measured.load()
        for package in PACKAGES:
            percent = measured.report(include=[f"{config.rootpath}/{package}/*"], file=io.StringIO())
            if percent < PERCENT_MIN:
                session.testsfailed += 1
                print(f"\nFAIL Required coverage of {package}: {PERCENT_MIN:g}%; it is {percent:.2f}%")
    return result
