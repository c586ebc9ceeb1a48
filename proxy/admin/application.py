"""The admin port's paths: GET / (the page), /metrics, /healthz, /readyz, /status.html, /status, /events."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec
import prometheus_client
import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from proto.rpc_pb2 import Reasons
from proxy.admin.page import EVENTS_PATH, PAGE_FILES, LivePage
from proxy.admin.scrape import CollectedMetrics
from proxy.common.http_server import HttpRequest, HttpResponse
from proxy.common.logs import get_logger
from proxy.common.readiness import LEAVING_REASON
from proxy.runtime.observability.metrics import OTHER
from proxy.runtime.rpc.errors import RpcError

JSON = "application/json"

TOKEN_PROTECTED_PATHS = frozenset({"/metrics", "/metrics/", "/status", EVENTS_PATH})
"""The other paths reveal only yes or no, or are the page without data; Kubernetes' probes have no token."""

HOST_BYTES_SHOWN = 255
NOT_OUR_HOST = b"""\
this port does not answer for the name in the request's Host header: set admin.allowed_hosts, or ask for an IP address
"""


class ClusterView(Protocol):
    """The cluster's state as the admin port serves it. Methods that call the supervisor raise RpcError."""

    async def metrics(self) -> CollectedMetrics:
        """Return all processes' metrics."""
        ...

    def is_responsive(self) -> bool:
        """Return True if the supervisor has answered lately."""
        ...

    async def readiness(self) -> Reasons:
        """Return why load balancers should send no clients here now, and which would fail all the same."""
        ...

    async def status(self) -> str:
        """Return the status of the whole cluster as JSON."""
        ...

    async def overview(self) -> str:
        """Return what the page shows, as JSON in one line."""
        ...


IsAllowed = Callable[[list[bytes]], Awaitable[bool]]
IsOwnHost = Callable[[bytes], bool]


class AdminApplication:
    """Handler of requests. ``is_allowed`` checks their ``Authorization``, ``is_own_host`` their ``Host``."""

    def __init__(
        self, view: ClusterView, is_allowed: IsAllowed, is_own_host: IsOwnHost, registry: CollectorRegistry
    ) -> None:
        self._view = view
        self._is_allowed = is_allowed
        self._is_own_host = is_own_host
        self._live = LivePage(view.overview, is_allowed)
        self._paths: dict[str, Callable[[HttpRequest], Awaitable[HttpResponse]]] = {
            "/metrics": self._metrics,
            "/metrics/": self._metrics,  # as annotations for Pulsar's own proxy name it
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/readyz?leaving=ready": self._readyz_while_leaving,
            "/status.html": self._status_html,  # what probes of Pulsar's own proxy ask
            "/status": self._status,
            EVENTS_PATH: self._live.response,
        }
        self._paths |= {path: partial(_page_file, response) for path, response in PAGE_FILES.items()}
        self._requests = prometheus_client.Counter(
            "pulsar_proxy_admin_requests", "Requests at the admin port.", ["path", "code"], registry=registry
        )

    async def handle_request(self, request: HttpRequest) -> HttpResponse:
        """Handle one request and count it."""
        try:
            response = await self._route_request(request)
        except RpcError as error:
            response = HttpResponse(503, f"the supervisor does not answer: {error}\n".encode())
        path = request.path if request.path in self._paths else OTHER
        self._requests.labels(path=path, code=str(response.status)).inc()
        return response

    async def _route_request(self, request: HttpRequest) -> HttpResponse:
        if not self._is_own_host(request.host):
            get_logger().warning(
                "refused at the admin port",
                client=request.client,
                path=request.path,
                reason=f"Host is {request.host[:HOST_BYTES_SHOWN]!r}, which is not in admin.allowed_hosts",
            )
            return HttpResponse(421, NOT_OUR_HOST)
        handler = self._paths.get(f"{request.path}?{request.query}", self._paths.get(request.path))
        if handler is None:
            return HttpResponse(404, f"there is no such path; try {', '.join(self._paths)}\n".encode())
        if request.method not in {"GET", "HEAD"}:
            return HttpResponse(405, b"only GET\n", headers=(("Allow", "GET, HEAD"),))
        if request.path in TOKEN_PROTECTED_PATHS and not await self._is_allowed(request.authorization):
            get_logger().warning(
                "refused at the admin port",
                client=request.client,
                path=request.path,
                reason="another token than that of admin.token_file" if request.authorization else "no token",
            )
            return HttpResponse(
                401, b"the token of admin.token_file is needed\n", headers=(("WWW-Authenticate", "Bearer"),)
            )
        return await handler(request)

    async def _metrics(self, _request: HttpRequest) -> HttpResponse:
        text, at = await self._view.metrics()
        return HttpResponse(200, text, CONTENT_TYPE_LATEST, (("X-Collected-At", f"{at:.6f}"),))

    async def _healthz(self, _request: HttpRequest) -> HttpResponse:
        await trio.lowlevel.checkpoint()
        well = self._view.is_responsive()
        return HttpResponse(200, b"ok\n") if well else HttpResponse(503, b"the supervisor does not answer\n")

    async def _readyz(self, _request: HttpRequest) -> HttpResponse:
        return _answer_of(await self._view.readiness())

    async def _readyz_while_leaving(self, _request: HttpRequest) -> HttpResponse:
        """Answer as `/readyz`, with `leaving` as a note.

        For Kubernetes' probe: a pod that ends is out of its Services, whatever the probe says. But if it succeeds, the
        pod is still sent the clients that load balancers bring to its node.
        """
        readiness = await self._view.readiness()  # shared with other requests: not to be changed
        reasons = [reason for reason in readiness.reasons if reason != LEAVING_REASON]
        left_out = [LEAVING_REASON] if LEAVING_REASON in readiness.reasons else []
        return _answer_of(Reasons(reasons=reasons, notes=[*readiness.notes, *left_out]))

    async def _status_html(self, _request: HttpRequest) -> HttpResponse:
        readiness = await self._view.readiness()
        return HttpResponse(503, b"NOT READY\n") if readiness.reasons else HttpResponse(200, b"OK\n")

    async def _status(self, _request: HttpRequest) -> HttpResponse:
        status = (await self._view.status()).encode()
        return HttpResponse(200, msgspec.json.format(status, indent=2) + b"\n", JSON)


async def _page_file(response: HttpResponse, _request: HttpRequest) -> HttpResponse:
    await trio.lowlevel.checkpoint()
    return response


def _answer_of(readiness: Reasons) -> HttpResponse:
    lines = list(readiness.reasons) or ["ok"]
    text = "".join(f"{line}\n" for line in (*lines, *readiness.notes))
    return HttpResponse(503 if readiness.reasons else 200, text.encode())
