"""Fixtures of the tests of the HTTP worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from http_fakes import Setup, opened

from proxy.http.server import HttpConnection


@pytest.fixture(params=["tasks", "as in a worker", "all taskless"])
async def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    """The same answers are given in a connection's task, without one where a request repeats headers, and where all
    requests that may come, in pieces or malformed, are begun without one: then none waits there.
    """
    if request.param == "all taskless":
        monkeypatch.setattr(HttpConnection, "may_be_as_before", True)
        monkeypatch.setattr(HttpConnection, "is_as_before", lambda *_: True)
    async with opened(reactor=request.param != "tasks") as setup:
        yield setup
