"""A network of fake brokers for each test, and nothing that reaches beyond the process."""

import pytest
import trio
from fake_dns import Still
from lookup_fakes import Network


@pytest.fixture
def network(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Network:
    """The only network that the code under test can reach."""
    fake = Network(nursery)
    monkeypatch.setattr("proxy.runtime.network.dialing._connect", fake.dial)
    monkeypatch.setattr("proxy.runtime.dns.resolver.ReloadingFile", Still)
    monkeypatch.setattr("proxy.runtime.dns.resolver._read_hosts", dict)
    monkeypatch.setattr("proxy.runtime.dns.resolver._read_resolv_conf", object)
    monkeypatch.setattr("proxy.runtime.dns.resolver._query_addresses", fake.query_addresses)
    return fake
