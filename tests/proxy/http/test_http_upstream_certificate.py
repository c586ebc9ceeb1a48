"""proxy.http.upstream: to whom the proxy shows its own certificate."""

from typing import Any

import pytest
import trio

from proto.addresses import HostPort
from proxy.common.errors import ConfigError
from proxy.config.types import Brokers, BrokerTls
from proxy.http import upstream as http_upstream
from proxy.http.client import Upstream
from proxy.runtime.network.dialing import DialFailed


class NoDialer:
    """A Dialer that says with which TLS it would connect."""

    def __init__(self, config: Brokers, _own_binds: Any) -> None:
        assert config.proxy_protocol == "off", "connections are shared, and the web port may take no header"
        self._config = config

    async def dial_any(self, _broker: HostPort, _addresses: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise DialFailed(self._config.tls.certificate or "none", self._config.service_url)


@pytest.mark.parametrize(("knows_proxies", "expected"), [(True, "own.pem"), (False, "none")])
async def test_the_proxys_own_certificate(monkeypatch: pytest.MonkeyPatch, knows_proxies: bool, expected: str) -> None:
    """Security: any other server would take the proxy for the client."""
    monkeypatch.setattr(http_upstream, "Dialer", NoDialer)
    dial = http_upstream.dial_brokers(
        Brokers(tls=BrokerTls(certificate="own.pem", key="own.key"), proxy_protocol="before_tls")
    )
    with pytest.raises(DialFailed) as failed:
        await dial(Upstream(HostPort("b", 8443), ("10.0.0.1",), tls=True, knows_proxies=knows_proxies))
    assert failed.value.reason == expected
    assert str(failed.value).startswith("pulsar+ssl://")


def test_files_of_other_workers_are_not_read() -> None:
    """Where brokers alone have TLS: an HTTP worker may not read them, and could not start."""
    brokers = Brokers(tls=BrokerTls(trust="/nowhere/authorities.pem"))
    http_upstream.dial_brokers(brokers, uses_tls=False)
    with pytest.raises(ConfigError):
        http_upstream.dial_brokers(brokers)


async def test_connections_with_it_are_not_used_for_others() -> None:
    """Security."""
    keys = {
        http_upstream._key_of(Upstream(HostPort("b", 8443), ("10.0.0.1",), tls=True, knows_proxies=knows))
        for knows in (True, False)
    }
    assert len(keys) == 2
