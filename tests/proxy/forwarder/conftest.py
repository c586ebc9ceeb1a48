"""Sessions to play with."""

from collections.abc import Callable

import pytest
import trio
from forwarder_fakes import Play


@pytest.fixture
def play(nursery: trio.Nursery) -> Callable[..., Play]:
    """Start a session; takes the configuration's tables."""
    return lambda **kwargs: Play(nursery, **kwargs)
