"""Upstreams of HTTP requests: their names, URLs and hosts."""

from dataclasses import dataclass, replace

import msgspec

from proto.addresses import HostPort, parse_web_url
from proxy.config.types import Brokers, Config

BROKERS = "brokers"
FUNCTIONS = "functions"
WEBSOCKET = "websocket"


@dataclass(frozen=True, slots=True)
class HttpUpstream:
    """Servers behind one URL of the configuration.

    ``key``: the URL's configuration key. ``brokers``: the table ``brokers``, as if these servers were the brokers: the
    rules for targets and for TLS are then those of brokers. ``knows_proxies``: they read X-Original-Principal, so the
    proxy may show its own credentials or certificate. Others would take the proxy for the client.
    """

    key: str
    url: str
    hosts: tuple[HostPort, ...]
    tls: bool
    brokers: Brokers
    knows_proxies: bool = False


def http_upstreams(config: Config) -> dict[str, HttpUpstream]:
    """Return the upstreams by name: ``brokers``, ``functions``, ``websocket``, ``route-0`` and so on; none without a
    listener for HTTP. Raises AddressInvalid.
    """
    if not config.http_listener:
        return {}
    brokers = _upstream(config, "brokers.web_service_url", config.brokers.web_service_url)
    functions, websocket = config.http.function_worker_url, config.http.websocket_url
    workers = _upstream(config, "http.function_worker_url", functions) if functions else brokers
    return {
        BROKERS: replace(brokers, knows_proxies=True),
        FUNCTIONS: replace(workers, knows_proxies=True),
        WEBSOCKET: _upstream(config, "http.websocket_url", websocket) if websocket else brokers,
        **{
            f"route-{index}": _upstream(config, f"http.routes[{index}].url", route.url)
            for index, route in enumerate(config.http.routes)
        },
    }


def _upstream(config: Config, key: str, url: str) -> HttpUpstream:
    web = parse_web_url(url)
    ports = dict.fromkeys((*(host.port for host in web.hosts), *config.brokers.allowed_ports))
    brokers = msgspec.structs.replace(
        config.brokers,
        service_url=f"pulsar{'+ssl' if web.tls else ''}://{','.join(map(str, web.hosts))}",
        allowed_ports=tuple(ports),  # at another port of the same machine anything may listen
        port_pairs=(),
        through_proxy=False,
    )
    return HttpUpstream(key, url, web.hosts, web.tls, brokers)
