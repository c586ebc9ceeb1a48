"""Fixtures of the tests of the HTTP worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from http_fakes import Setup, opened


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with opened() as setup:
        yield setup
