"""What the parts of the HTTP worker tell each other: a client, its identity, an upstream, a request's record."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proto.addresses import HostPort
from proto.http_rules import Redirect, RequestHead
from proto.rpc_pb2 import Principal, RelayRequest


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Facts of a client's connection. ``address``: with its port; ``certificate``: DER, empty where there is none.

    ``connection``: the connection's number in its worker. A client that resets one may have the next one at the same
    address before the worker has noticed.
    """

    address: str
    ip: str
    scheme: str
    certificate: bytes = b""
    listener: int = 0
    connection: int = 0


@dataclass(frozen=True, slots=True)
class HttpIdentity:
    """Who the client is. ``principal``: empty where the cluster does not authenticate.

    ``credentials``: what the deny list knows them by; ``authorization``: the proxy's own, where the client sent none.
    """

    principal: Principal
    sealed: bytes = b""
    credentials: tuple[bytes, ...] = ()
    authorization: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server to which requests are passed on, and its addresses, which have been checked.

    ``knows_proxies``: it may see the proxy's own certificate. Others would take the proxy for the client.
    """

    broker: HostPort
    addresses: tuple[str, ...]
    tls: bool
    knows_proxies: bool = False


class Authenticator(Protocol):
    """Finds out who a client is."""

    async def authenticate(self, head: RequestHead, route: str, client: HttpClient) -> HttpIdentity:
        """Return the client's identity. ``route``: the upstream of the request. Raises RequestRefused: 401, 503."""
        ...


class Locator(Protocol):
    """Finds the servers of an upstream."""

    async def locate(self, name: str, identity: HttpIdentity, client: HttpClient) -> Sequence[Upstream]:
        """Return the servers of an upstream, to be tried in this order. Raises RequestRefused: 502, 503."""
        ...

    async def locate_redirect(
        self, name: str, redirect: Redirect, identity: HttpIdentity, client: HttpClient
    ) -> Upstream:
        """Return the server to which a redirect leads. Raises RequestRefused: 502 where it may not be dialled."""
        ...


class ConnectionPasser(Protocol):
    """Passes connections to forwarders, which relay them."""

    async def request(
        self, request: RelayRequest, client: socket.socket, broker: socket.socket, timeout_s: float
    ) -> bytes:
        """See proxy.runtime.shared.relay_request_channel.RelayRequestChannel."""
        ...


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request at its end, for metrics and the access log.

    ``path``: without the query, empty for a head that is no request's. ``route``: the upstream's name, empty where
    there is none. ``status``: 499 where the client left before the response. ``cause``: why the request has no proper
    response, the ``reason`` of a RequestRefused or ``client_left``, ``upstream_cut``, ``client_slow``; empty for one
    that has. ``request_bytes`` and ``response_bytes``: of bodies.
    """

    client: HttpClient
    started: float
    method: str = ""
    path: str = ""
    route: str = ""
    principal: str = ""
    status: int = 0
    upstream: str = ""
    request_bytes: int = 0
    response_bytes: int = 0
    cause: str = ""
    counted: bool = field(default=False, repr=False)
    """Whether ``Requests.begin`` has admitted it."""


class Requests(Protocol):
    """The requests under way of a worker: their bound, their metrics, their log."""

    def begin(self, record: RequestRecord) -> None:
        """Admit a request of which the head is known. Raises RequestRefused: 503 where too many are under way."""
        ...

    def end(self, record: RequestRecord) -> None:
        """Count and log a request that has ended, also one that was refused before ``begin`` or by it.

        It holds a place among those under way only where ``counted`` is true.
        """
        ...
