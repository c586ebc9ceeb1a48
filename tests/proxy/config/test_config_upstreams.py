"""proxy.config.upstreams: the servers that HTTP requests are passed on to, as if they were brokers."""

from typing import Any

import msgspec

from proto.addresses import HostPort, speaks_tls
from proxy.config.types import Config
from proxy.config.upstreams import http_upstreams

WEB = "http://a.example.com:8080,b.example.com:8081"


def config(http: dict[str, Any] | None = None, **brokers: Any) -> Config:
    tables = {"http_listener": [{}], "http": http or {}, "brokers": {"web_service_url": WEB, **brokers}}
    return msgspec.convert(tables, Config)


def test_names_and_keys() -> None:
    routes = [{"path": "/tools", "url": "https://tools.example.com"}]
    found = http_upstreams(config({"routes": routes, "websocket_url": "http://ws.example.com:8082"}))
    assert {name: (one.key, one.tls, one.knows_proxies) for name, one in found.items()} == {
        "brokers": ("brokers.web_service_url", False, True),
        "functions": ("brokers.web_service_url", False, True),
        "websocket": ("http.websocket_url", False, False),
        "route-0": ("http.routes[0].url", True, False),
    }
    assert found["brokers"].hosts == (HostPort("a.example.com", 8080), HostPort("b.example.com", 8081))
    assert found["route-0"].hosts == (HostPort("tools.example.com", 443),)
    assert not http_upstreams(config())["websocket"].knows_proxies, "with the brokers' URL, too"


def test_without_a_listener_there_are_none() -> None:
    assert http_upstreams(msgspec.structs.replace(config(), http_listener=())) == {}


def test_the_rules_for_brokers_hold_for_them() -> None:
    """Security: what is allowed for relays beside the brokers' own ports and proxies is not for them."""
    through_proxy = config(through_proxy=True, allowed_ports=[9000], allowed_hosts=["c.example.com"])
    brokers = http_upstreams(through_proxy)["brokers"].brokers
    assert brokers.service_url == "pulsar://a.example.com:8080,b.example.com:8081"
    assert brokers.allowed_ports == (8080, 8081, 9000)
    assert (brokers.port_pairs, brokers.through_proxy) == ((), False)
    assert brokers.allowed_hosts == ("c.example.com",)
    routes = [{"path": "/tools", "url": "https://[2001:db8::1]:8443"}]
    tools = http_upstreams(config({"routes": routes}))["route-0"].brokers
    assert tools.service_url == "pulsar+ssl://[2001:db8::1]:8443"
    assert speaks_tls(tools.service_url)
