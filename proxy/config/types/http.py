"""Tables of the HTTP reverse proxy: its listeners, its routes and its bounds."""

from typing import Annotated

from msgspec import Meta

from proxy.config.types.base import MIB, NonEmpty, NonNegative, Positive, ProxyProtocol, Strict
from proxy.config.types.listeners import ListenerTls


class HttpListener(Strict, frozen=True):
    """Addresses at which the proxy passes HTTP requests on to the brokers' web port (`/admin`, `/lookup`), function
    workers and the `routes` of `[http]`; one table `[[http_listener]]` for each, none by default. It needs
    `brokers.web_service_url`.

    allowed_networks: networks (CIDR) from which clients may connect, as those of `[[listener]]`; empty: all
    bind: `address:port`; an IPv6 address is written in brackets. Not 8080, the web port of Pulsar's own proxy, since
        the operators' port (`admin.bind`) has that by default; give both what you want
    denied_networks: networks (CIDR) from which none may connect, not even from `allowed_networks`
    proxy_protocol: whether connections from `proxy_protocol_sources` begin with a PROXY header: as in
        `[[listener]]`
    proxy_protocol_sources: networks (CIDR) of the load balancers, as those of `[[listener]]`
    tls: certificate and key of a listener for `https://`, without `session_tickets`; absent: it is one for `http://`
    """

    allowed_networks: tuple[NonEmpty, ...] = ()
    bind: NonEmpty = "0.0.0.0:8081"
    denied_networks: tuple[NonEmpty, ...] = ()
    proxy_protocol: ProxyProtocol = "off"
    proxy_protocol_sources: tuple[NonEmpty, ...] = ()
    tls: ListenerTls | None = None


class HttpRoute(Strict, frozen=True):
    """A further path that is passed on, beside those of brokers and function workers.

    path: beginning of the path of requests, by whole segments: `/tools` is `/tools` and what is below it
    url: `http://host:port` or `https://…`, or several hosts separated by commas: the path is passed on as it is. A path
        behind them takes the place of `path`: with `http://host:port/`, `/tools/x` is passed on as `/x`
    """

    path: NonEmpty
    url: NonEmpty


class Http(Strict, frozen=True):
    """Requests at the listeners of `[[http_listener]]`.

    access_log: whether each request is logged: client, principal, method, path without its query, status, where it was
        passed on, bytes, milliseconds; as of all events 50 a second
    allow_unauthenticated: whether requests may be passed on without `authentication.enabled` though the proxy shows
        brokers or function workers its certificate (`brokers.tls.certificate`, a URL with `https://`): all who
        reach the listeners may then do what that certificate allows. Without it such a configuration is refused
    body_timeout_ms: longest time between two portions of a body, of a request and of a response
    function_worker_url: where requests for functions, sources, sinks and workers are passed on, in the form of
        `brokers.web_service_url`; empty: to the brokers
    head_timeout_ms: time for a TLS handshake, and for the head of a request from its first byte on
    idle_timeout_ms: how long a client's connection may be without a request
    max_connections: connections of clients, of all HTTP workers together: each has an equal part. Where one has its
        part, it closes an idle connection for a new one: of the address that has most, the oldest
    max_head_bytes: largest head of a request
    max_redirects: how many redirects of brokers the proxy follows for one request
    max_replay_bytes: largest body of a request that is kept, to be sent once more where a broker redirects the request
    max_requests: requests under way, of all HTTP workers together: each has an equal part, of which one
        address gets at most half; above it, they get 503
    response_headers: headers that responses get, in place of equal ones of the upstream
    response_timeout_ms: longest time from the end of a request to the head of its response
    routes: further paths that are passed on; of several that match, the longest
    websocket_url: where requests of `/ws` are passed on; empty: to the brokers
    """

    access_log: bool = True
    allow_unauthenticated: bool = False
    body_timeout_ms: Positive = 60_000
    function_worker_url: str = ""
    head_timeout_ms: Positive = 10_000
    idle_timeout_ms: Positive = 60_000
    max_connections: Annotated[int, Meta(ge=1, le=10_000)] = 2_048
    max_head_bytes: Annotated[int, Meta(ge=1_024, le=MIB)] = 8_192
    max_redirects: Annotated[int, Meta(ge=0, le=20)] = 5
    max_replay_bytes: NonNegative = 5 * MIB
    max_requests: Annotated[int, Meta(ge=1, le=10_000)] = 1_024
    response_headers: dict[NonEmpty, str] = {}
    response_timeout_ms: Positive = 300_000
    routes: Annotated[tuple[HttpRoute, ...], Meta(max_length=100)] = ()
    websocket_url: str = ""
