"""The routes of HTTP requests: those of Pulsar's web services, and the configured ones."""

from proto.http_rules import Routes
from proxy.config.types import Config
from proxy.config.upstreams import BROKERS, FUNCTIONS, WEBSOCKET

_FUNCTION_WORKERS = ("function", "functions", "sink", "sinks", "source", "sources", "worker", "worker-stats")
"""Below /admin, of any version: what the Java proxy passes on to function workers (AdminProxyHandler)."""


def http_routes(config: Config) -> Routes:
    """Return the table of routes: prefixes of paths, and the names of their upstreams."""
    own = {"/admin": BROKERS, "/lookup": BROKERS, "/ws": WEBSOCKET}
    functions = {f"/admin{version}/{kind}": FUNCTIONS for version in ("", "/v2", "/v3") for kind in _FUNCTION_WORKERS}
    configured = {route.path.rstrip("/"): f"route-{index}" for index, route in enumerate(config.http.routes)}
    return Routes([*(own | functions | configured).items()])
