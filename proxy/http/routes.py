"""The routes of HTTP requests: those of Pulsar's web services, and the configured ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from proto.http_rules import RequestRefused, Routes
from proxy.config.http import split_route_url
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


@dataclass(frozen=True, slots=True)
class PathReplacement:
    """What takes the place of the first ``segments`` of a request's path; ``path`` does not end with a slash."""

    segments: int
    path: bytes

    def apply(self, target: bytes) -> bytes:
        """Return a request's target for the upstream. Raises RequestRefused."""
        raw, mark, query = target.partition(b"?")
        rest = raw.split(b"/", self.segments + 1)[self.segments + 1 :]
        path = b"/".join([self.path, *rest]) or b"/"
        if path.startswith(b"//"):  # of which a server may read a host
            raise RequestRefused(400, "The path is ambiguous", "ambiguous_path")
        return path + mark + query


def http_replacements(config: Config) -> Mapping[str, PathReplacement]:
    """Return what routes put in the place of their own path, by the names of upstreams."""
    replacements = {}
    for index, route in enumerate(config.http.routes):
        _, path = split_route_url(route.url)
        if path is not None:
            segments = len(route.path.rstrip("/").split("/")) - 1
            replacements[f"route-{index}"] = PathReplacement(segments, path.rstrip("/").encode())
    return replacements
