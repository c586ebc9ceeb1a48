"""A network of fake brokers for each test, and nothing that reaches beyond the process."""

import pytest
import trio
from lookup_fakes import Network


@pytest.fixture
def network(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Network:
    """The only network that the code under test can reach."""
    fake = Network(nursery)
    monkeypatch.setattr("proxy.runtime.dialing._connect", fake.dial)
    monkeypatch.setattr("proxy.runtime.resolve.getaddrinfo", fake.getaddrinfo)
    return fake
