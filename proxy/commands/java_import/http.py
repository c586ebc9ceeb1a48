"""HTTP keys of a Java proxy: its web ports, where requests go, routes of its own, and headers of responses."""

import json
import re
from collections.abc import Callable

from proto.addresses import AddressInvalid, parse_web_url
from proxy.commands.java_import import values as v
from proxy.commands.java_import.java import HTTP_PORT, Java, Lost
from proxy.commands.java_import.result import Result
from proxy.common.errors import ConfigError
from proxy.common.suggestions import quote_name
from proxy.config.http import check_header, is_route_path, split_route_url

LISTENERS = ("plain http_listener", "TLS http_listener")
_ROUTE = re.compile(r"httpReverseProxy\.([^.]*)\.(path|proxyTo)\Z")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")
_BROKERS = {False: "brokerWebServiceURL", True: "brokerWebServiceURLTLS"}
_FUNCTIONS = {False: "functionWorkerWebServiceURL", True: "functionWorkerWebServiceURLTLS"}
_TLS = {
    "webServiceTlsProtocols": ("minimum_version", v.tls_version),
    "webServiceTlsCiphers": ("ciphers", v.ciphers),
}
_PROXY_PROTOCOL = "webServiceHaProxyProtocolEnabled"
_HEADERS = "proxyHttpResponseHeadersJson"


def convert_http(java: Java, result: Result, stores: list[str], put_tls: Callable[[Java, Result, str], None]) -> None:
    """Convert what has several keys. ``stores``: metadata stores, in which Java finds brokers' web URLs.

    ``put_tls`` puts the certificate and the like into the table of a listener.
    """
    if java.missing(HTTP_PORT):
        result.handled |= {"webServicePort", "webServicePortTls"}
        return
    if _put_url(java, result, _BROKERS, "brokers.web_service_url"):
        _put_listeners(java, result, put_tls)
    else:
        _name_missing(java, result, stores)
    _put_url(java, result, _FUNCTIONS, "http.function_worker_url")
    _put_routes(java, result)
    _put_headers(java, result)


def _put_url(java: Java, result: Result, names: dict[bool, str], target: str) -> bool:
    """Put the URL that ``tlsEnabledWithBroker`` chooses; return whether there is one."""
    tls = java.flag("tlsEnabledWithBroker")
    name, other = names[tls], names[not tls]
    if java.given(other):
        result.skip(other, f"tlsEnabledWithBroker is {str(tls).lower()}, so {name} counts")
    url = java.given(name)
    if not url:
        return False
    try:
        parse_web_url(url)
    except (AddressInvalid, ValueError):
        result.lose(name, f"it is not http:// or https:// with a host and a port alone: write {target}")
        return False
    result.put(target, url, name)
    return True


def _put_listeners(java: Java, result: Result, put_tls: Callable[[Java, Result, str], None]) -> None:
    plain, tls = java.port("webServicePort"), java.port("webServicePortTls")
    if plain:
        result.put("plain http_listener.bind", java.bind(plain), "bindAddress", "webServicePort")
        put_proxy_protocol(java, result, "plain http_listener", _PROXY_PROTOCOL)
    if not tls:
        return
    result.put("TLS http_listener.bind", java.bind(tls), "bindAddress", "webServicePortTls")
    put_proxy_protocol(java, result, "TLS http_listener", _PROXY_PROTOCOL)
    put_tls(java, result, "http_listener.tls")
    for name, (key, convert) in _TLS.items():
        if java.given(name):
            result.put_converted(f"http_listener.tls.{key}", convert(java.given(name)), name)


def put_proxy_protocol(java: Java, result: Result, listener: str, name: str) -> None:
    """Put the PROXY protocol into the table of a listener. Java takes a header from anyone; here none can."""
    if java.flag(name):
        result.put(f"{listener}.proxy_protocol", "optional", name)
        written = "to be written: the load balancers' networks, as [\"10.0.0.0/24\"]; Java believes any client's header"
        result.put(f"{listener}.proxy_protocol_sources", None, name, comment=written)


def _name_missing(java: Java, result: Result, stores: list[str]) -> None:
    """Say what HTTP lacks. Java's proxy finds brokers by the metadata store where it is told no URL of theirs."""
    tls = java.flag("tlsEnabledWithBroker")
    name = _BROKERS[tls]
    reason = (
        "it is empty, so no HTTP is served: write brokers.web_service_url (in Java, brokers' web ports are found in "
        "the metadata store), [[http_listener]], and another port in admin.bind"
    )
    if java.given(name):
        pass  # it has been named, with the reason
    elif stores or java.given(_BROKERS[not tls]):
        result.lose(name, reason)
    else:
        result.note(name, reason)
    if java.flag(_PROXY_PROTOCOL):
        result.skip(_PROXY_PROTOCOL, f"no HTTP is served: see {name}")
    if java.port("webServicePortTls"):
        result.lose("webServicePortTls", f"no HTTP is served: see {name}")
        for key in _TLS:
            if java.given(key):
                result.skip(key, f"no HTTP is served: see {name}")


# ---- routes


def _put_routes(java: Java, result: Result) -> None:
    """Put the routes that Java's proxy has by pairs of keys, ``httpReverseProxy.<name>.path`` and ``.proxyTo``."""
    found: dict[str, dict[str, str]] = {}
    for key in java.values:
        if match := _ROUTE.match(key):
            result.named.add(key)
            if java.given(key):
                found.setdefault(match[1], {})[match[2]] = key
    routes: list[dict[str, str]] = []
    names: list[str] = []
    for keys in found.values():
        shown = {part: key if _PLAIN_NAME.match(key) else quote_name(key) for part, key in keys.items()}
        if len(keys) == 1:
            ((part, name),) = shown.items()
            result.lose(name, f"there is no .{'path' if part == 'proxyTo' else 'proxyTo'} beside it, as Java needs")
            continue
        path = java.given(keys["path"]).rstrip("/")
        url = _route_url(path, java.given(keys["proxyTo"]))
        if not is_route_path(path):
            result.lose(shown["path"], f"it is no path as of http.routes, which {shown['proxyTo']} needs, too")
        elif isinstance(url, Lost):
            result.lose(shown["proxyTo"], url.reason)
        else:
            routes.append({"path": path, "url": url})
            names += shown.values()
            if url.startswith("https:"):
                result.note(
                    shown["proxyTo"],
                    "its certificate is verified by brokers.tls, as brokers' are; by Java's proxy, as the JVM does it",
                )
    if routes:
        result.put("http.routes", routes, *names)


def _route_url(path: str, proxy_to: str) -> str | Lost:
    """Return the URL of a route. In Java the path of ``proxyTo``, or none, takes the place of the route's own."""
    base, replaces = split_route_url(proxy_to)
    replaces = (replaces or "").rstrip("/")
    try:
        parse_web_url(base)
    except (AddressInvalid, ValueError):
        return Lost("it is no http:// or https:// with a host, a port and a path")
    if replaces and not is_route_path(replaces):
        return Lost("its path is no path as of http.routes")
    return base if replaces == path else f"{base}{replaces or '/'}"


# ---- headers of responses


def _put_headers(java: Java, result: Result) -> None:
    text = java.given(_HEADERS)
    if not text:
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        result.lose(_HEADERS, "it is no JSON of headers and their values, so that Java adds none")
        return
    headers = {}
    for name, value in found.items():
        try:
            check_header(name, value if isinstance(value, str) else "")
        except ConfigError as error:
            result.lose(_HEADERS, str(error))
        else:
            headers[name] = value
    if headers:
        result.put("http.response_headers", headers, _HEADERS)
