"""Upstreams of HTTP requests: their names, URLs and hosts."""

from dataclasses import dataclass

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
    rules for targets and for TLS are then those of brokers.
    """

    key: str
    url: str
    hosts: tuple[HostPort, ...]
    tls: bool
    brokers: Brokers


def http_upstreams(config: Config) -> dict[str, HttpUpstream]:
    """Return the upstreams by name: ``brokers``, ``functions``, ``websocket``, ``route-0`` and so on; none without a
    listener for HTTP. Raises AddressInvalid.
    """
    if not config.http_listener:
        return {}
    brokers = _upstream(config, "brokers.web_service_url", config.brokers.web_service_url)
    functions, websocket = config.http.function_worker_url, config.http.websocket_url
    return {
        BROKERS: brokers,
        FUNCTIONS: _upstream(config, "http.function_worker_url", functions) if functions else brokers,
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
