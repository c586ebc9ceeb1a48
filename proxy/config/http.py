"""Checks for the HTTP reverse proxy, and its upstreams as the configuration names them."""

import re
from collections.abc import Callable, Iterator

from proto.addresses import AddressInvalid, parse_host_port, parse_web_url, speaks_tls
from proxy.common.errors import ConfigError
from proxy.common.networks import parse_network
from proxy.config.methods import client_methods, one_round_methods
from proxy.config.types import MIB, Config, HttpListener, Listener

_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+\Z")
_DOTS = re.compile(r"/\.{1,2}(/|\Z)")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?\Z")

FRAMING_HEADERS = frozenset(
    {"connection", "content-length", "content-encoding", "date", "keep-alive", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "via", "www-authenticate", "location"}
)
"""Headers of a response that say something of this one response, or this one connection."""


REPLAY_BYTES_TOTAL = 64 * MIB
"""Of bodies that one HTTP worker keeps, to be sent once more."""


def replay_bytes_total(config: Config) -> int:
    """Return how many bytes of bodies one HTTP worker keeps at most: those of one in any case."""
    return max(REPLAY_BYTES_TOTAL, config.http.max_replay_bytes)


def web_urls(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys of all upstreams of HTTP requests that are configured, and their URLs, without a path."""
    named = {
        "brokers.web_service_url": config.brokers.web_service_url,
        "http.function_worker_url": config.http.function_worker_url,
        "http.websocket_url": config.http.websocket_url,
    }
    yield from ((key, url) for key, url in named.items() if url)
    for index, route in enumerate(config.http.routes):
        yield f"http.routes[{index}].url", split_route_url(route.url)[0]


def split_route_url(url: str) -> tuple[str, str | None]:
    """Return a route's URL without a path, and the path that takes the place of the route's own; None: none does."""
    scheme, mark, rest = url.partition("://")
    hosts, slash, path = rest.partition("/")
    return f"{scheme}{mark}{hosts}", slash + path if slash else None


def web_uses_tls(config: Config) -> bool:
    """Return whether HTTP requests are passed on by TLS, which is that of ``brokers.tls``."""
    return any(url.startswith("https://") for _key, url in web_urls(config))


def uses_broker_tls(config: Config) -> bool:
    """Return whether any connection to a broker uses ``brokers.tls``."""
    return speaks_tls(config.brokers.service_url) or web_uses_tls(config)


def http_worker_count(config: Config) -> int:
    """Return how many HTTP workers to run: none without a listener for them."""
    return config.cluster.http_workers if config.http_listener else 0


def check_http(config: Config) -> None:
    """Check listeners, upstreams, routes and headers of responses. Raises ConfigError, which names the key."""
    for index, listener in enumerate(config.http_listener):
        key = f"http_listener[{index}]"
        _parse(f"{key}.bind", parse_host_port, listener.bind)
        for name in ("allowed_networks", "denied_networks", "proxy_protocol_sources"):
            for network in getattr(listener, name):
                _parse(f"{key}.{name}", parse_network, network)
        check_proxy_protocol(key, listener)
        if listener.tls is not None and listener.tls.session_tickets:
            raise ConfigError(f"{key}.tls.session_tickets: only [[listener]] gives tickets")
    if config.http_listener and not config.brokers.web_service_url:
        raise ConfigError("brokers.web_service_url: is needed for http_listener: where the brokers serve HTTP")
    for key, url in web_urls(config):
        _parse(key, parse_web_url, url)
    _check_proxy_certificate(config)
    _check_routes(config)
    for name, value in config.http.response_headers.items():
        check_header(name, value)


def _check_proxy_certificate(config: Config) -> None:
    """Refuse to show the proxy's certificate for clients that nobody has authenticated: brokers would let each of them
    do what the proxy's role may. Its ``Authorization`` is shown for none of them in any case. Raises
    ConfigError.
    """
    urls = {"brokers.web_service_url": config.brokers.web_service_url}
    urls["http.function_worker_url"] = config.http.function_worker_url
    key = next((key for key, url in urls.items() if url.startswith("https://")), None)
    is_shown = config.http_listener and config.brokers.tls.certificate and key
    if is_shown and not config.authentication.enabled and not config.http.allow_unauthenticated:
        raise ConfigError(
            f"http.allow_unauthenticated: without authentication.enabled all who reach http_listener could do at "
            f"{key} what the certificate of brokers.tls allows: enable authentication, or set this to true if they "
            "may do that"
        )


def http_warnings(config: Config) -> Iterator[str]:
    """Yield a sentence for each listener for HTTP at which no client can authenticate."""
    authentication = config.authentication
    if not authentication.enabled:
        return
    for index, listener in enumerate(config.http_listener):
        methods = one_round_methods(authentication)
        if listener.tls is None or not listener.tls.client_ca:
            methods -= {"tls"}
        if not methods:
            names = ", ".join(sorted(client_methods(authentication)))
            yield (
                f"http_listener[{index}]: no client can authenticate there by {names}; over HTTP they can by token, "
                "oidc and basic, by tls at a listener with tls.client_ca, and without credentials where there is an "
                "anonymous_role"
            )


def check_proxy_protocol(key: str, listener: Listener | HttpListener) -> None:
    """Refuse a header from anyone, and senders without a use. Raises ConfigError."""
    mode, sources = listener.proxy_protocol, listener.proxy_protocol_sources
    if mode != "off" and not sources:
        raise ConfigError(f"{key}.proxy_protocol_sources: is needed for proxy_protocol: the load balancers' networks")
    if sources and mode == "off":
        raise ConfigError(f"{key}.proxy_protocol_sources: has no use while proxy_protocol is off")


def _check_routes(config: Config) -> None:
    seen: dict[str, int] = {}
    for index, route in enumerate(config.http.routes):
        key, path = f"http.routes[{index}].path", route.path.rstrip("/")
        if route.path != "/" and not is_route_path(path):
            raise ConfigError(f"{key}: {route.path!r} is no absolute path: segments, each behind a /, none encoded")
        _, replaces = split_route_url(route.url)
        if replaces not in {None, "/"} and not is_route_path(replaces.rstrip("/")):
            raise ConfigError(f"http.routes[{index}].url: its path is none of segments, each behind a /, none encoded")
        if path in seen:
            raise ConfigError(f"{key}: {route.path} is that of http.routes[{seen[path]}], too")
        seen[path] = index


def is_route_path(path: str) -> bool:
    """Return whether a route may have this path: segments, each behind a slash, none encoded, none of dots."""
    return bool(_PATH.match(path)) and not _DOTS.search(path)


def check_header(name: str, value: str) -> None:
    """Check a header that responses are to get. Raises ConfigError, which does not show the value."""
    key = "http.response_headers"
    if not _HEADER_NAME.match(name):
        raise ConfigError(f"{key}: {name!r} is no name of a header")
    if name.lower() in FRAMING_HEADERS:
        raise ConfigError(f"{key}.{name}: is for the proxy and the upstream alone")
    if not _HEADER_VALUE.match(value):
        raise ConfigError(f"{key}.{name}: is no value of a header: visible ASCII characters, between them blanks")


def _parse(key: str, parse: Callable[[str], object], value: str) -> None:
    try:
        parse(value)
    except (AddressInvalid, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from None
