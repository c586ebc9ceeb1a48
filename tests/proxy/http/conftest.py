"""Fixtures of the tests of the HTTP worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from http_fakes import Setup, opened


@pytest.fixture(params=[True, False], ids=["taskless", "tasks"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    async with opened(reactor=request.param) as setup:
        yield setup
