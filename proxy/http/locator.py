"""Where HTTP requests are passed on to: lookup workers say where, and what they say is checked once more.

The hosts of an upstream come from its URL in the configuration, so an answer is good for all clients and kept for a
moment. A redirect is checked each time (lookup.targets.upstreams has the rules).
"""

from collections.abc import Sequence

import trio

from proto.addresses import HostPort
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.http_rules import Redirect, RequestRefused
from proto.rpc_pb2 import Method, OtherBroker, ResolveTargetRequest, ResolveTargetResponse, Status
from proxy.common.eager import enter_task
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.config.upstreams import HttpUpstream, http_upstreams
from proxy.http.client import HttpClient, HttpIdentity, Upstream
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.dial_check import DialCheck
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError
from proxy.runtime.rpc.pool import RpcPool

Target = ResolveTargetResponse | OtherBroker

KNOWN_S = 1.0
"""How long an answer holds without another call: as long as the shortest TTL of a lookup worker's resolver."""

_RESOLVE_TARGET = int(Method.RESOLVE_TARGET)
_NO_SERVER = "The proxy knows no server for this request at the moment"


class HttpLocator:
    """Locator of the servers of upstreams. Tasks of its own run in ``nursery``."""

    def __init__(self, config: Config, lookup: RpcPool, nursery: trio.Nursery) -> None:
        self._by_name: dict[str, _Source] = {}
        by_url: dict[tuple[str, bool], _Source] = {}
        for name, upstream in http_upstreams(config).items():
            key = upstream.url, upstream.knows_proxies
            if key not in by_url:
                by_url[key] = _Source(upstream, config, lookup, nursery)
            self._by_name[name] = by_url[key]

    async def locate(self, name: str, identity: HttpIdentity, client: HttpClient) -> Sequence[Upstream]:  # noqa: ARG002 -- the interface's
        """Return the servers of an upstream, in the order to try them: they take turns. Raises RequestRefused."""
        return await self._source(name).in_turn()

    async def locate_redirect(
        self, name: str, redirect: Redirect, identity: HttpIdentity, client: HttpClient
    ) -> Upstream:
        """Return the server to which an upstream redirects a request. Raises RequestRefused: 502 where it may not be
        dialled, 503, 401 where the client's credentials have ended in the meantime.
        """
        return await self._source(name).redirected(redirect, identity, client)

    def _source(self, name: str) -> "_Source":
        source = self._by_name.get(name)
        if source is None:  # a reload in the middle of a request has taken its route away
            raise RequestRefused(503, _NO_SERVER, "no_upstream")
        return source


class _Source:
    """One upstream."""

    def __init__(self, upstream: HttpUpstream, config: Config, lookup: RpcPool, nursery: trio.Nursery) -> None:
        self._upstream = upstream
        self._lookup = lookup
        self._timeout_s = seconds(config.brokers.handshake_timeout_ms)
        self._dial_check = DialCheck(upstream.brokers, nursery)
        self._flight = SingleFlight(self._ask_for_own, nursery)
        self._known: tuple[Upstream, ...] = ()
        self._known_until = 0.0
        self._turn = 0

    async def in_turn(self) -> Sequence[Upstream]:
        known = self._known
        if trio.current_time() >= self._known_until:
            await enter_task()
            known = await self._flight.result()
        self._turn = turn = (self._turn + 1) % len(known)
        return *known[turn:], *known[:turn]

    async def _ask_for_own(self) -> tuple[Upstream, ...]:
        answer = await self._call(ResolveTargetRequest(upstream=self._upstream.url))
        if answer.denial:
            raise RequestRefused(503, _NO_SERVER, "no_upstream")
        targets: list[Target] = [answer, *answer.others]
        found = [await self._checked(target, own=True) for target in targets]
        self._known, self._known_until = tuple(found), trio.current_time() + KNOWN_S
        return self._known

    async def redirected(self, redirect: Redirect, identity: HttpIdentity, client: HttpClient) -> Upstream:
        answer = await self._call(
            ResolveTargetRequest(
                upstream=self._upstream.url,
                target=str(HostPort(redirect.host, redirect.port)),
                tls=redirect.scheme == "https",
                client_address=client.address,
                principal_name=identity.principal.name,
                sealed_principal=identity.sealed,
            )
        )
        if answer.denial:
            text = "The server redirects the request to where this proxy may not pass it on"
            raise RequestRefused(502, text, "redirect_denied")
        return await self._checked(answer, own=False)

    async def _call(self, request: ResolveTargetRequest) -> ResolveTargetResponse:
        try:
            return await self._lookup.pick_client().call(
                _RESOLVE_TARGET, request, ResolveTargetResponse, timeout_s=self._timeout_s, retry=True
            )
        except RpcCallRefused as refused:
            if refused.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE:
                raise RequestRefused(401, AUTHENTICATION_FAILED, "expired") from None
            raise RequestRefused(503, _NO_SERVER, "lookup_unavailable") from None
        except RpcError:
            raise RequestRefused(503, _NO_SERVER, "lookup_unavailable") from None

    async def _checked(self, answer: Target, *, own: bool) -> Upstream:
        """Return what a lookup worker has answered, if it may be dialled. Raises RequestRefused.

        ``own``: it is one of the hosts of the URL, since by its name the certificate is checked.
        """
        broker, addresses = HostPort(answer.host, answer.port), tuple(answer.addresses)
        if own and broker not in self._upstream.hosts:
            raise self._bad_answer(TargetDenied("host", f"{broker} is not in {self._upstream.key}"))
        try:
            await self._dial_check.check_target(broker, addresses)
        except TargetDenied as denied:
            raise self._bad_answer(denied) from None
        return Upstream(broker, addresses, self._upstream.tls, self._upstream.knows_proxies)

    def _bad_answer(self, denied: TargetDenied) -> RequestRefused:
        get_logger().error(
            "a lookup worker named what no request may be passed on to",
            upstream=self._upstream.url,
            reason=denied.reason,
            detail=str(denied),
        )
        return RequestRefused(502, _NO_SERVER, "bad_lookup_answer")
