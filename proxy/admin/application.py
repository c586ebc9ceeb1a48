"""GET /metrics, /healthz, /readyz, /status.html, /status: what is answered, to whom."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import prometheus_client
import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from proxy.admin.http import Answer, Request
from proxy.admin.scrape import Collected
from proxy.common.logs import get_logger
from proxy.runtime.rpc.client import RpcError

JSON = "application/json"

FOR_TOKEN_HOLDERS = frozenset({"/metrics", "/metrics/", "/status"})
"""The others say nothing but yes or no, and Kubernetes has no token to bring."""


class Knowledge(Protocol):
    """What can be answered; what has to be asked for raises RpcError."""

    async def metrics(self) -> Collected:
        """All processes' metrics."""
        ...

    def is_well(self) -> bool:
        """Whether the supervisor has answered lately."""
        ...

    async def not_ready_reasons(self) -> list[str]:
        """Why clients should not be sent here now."""
        ...

    async def status(self) -> str:
        """The whole cluster, as JSON."""
        ...


Allows = Callable[[list[bytes]], Awaitable[bool]]


class AdminApplication:
    """Answers requests. ``allows`` judges their ``Authorization``."""

    def __init__(self, knowledge: Knowledge, allows: Allows, registry: CollectorRegistry) -> None:
        self._knowledge = knowledge
        self._allows = allows
        self._paths: dict[str, Callable[[], Awaitable[Answer]]] = {
            "/metrics": self._metrics,
            "/metrics/": self._metrics,  # as annotations for Pulsar's own proxy name it
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status.html": self._status_html,  # what probes of Pulsar's own proxy ask
            "/status": self._status,
        }
        self._requests = prometheus_client.Counter(
            "pulsar_proxy_admin_requests", "Requests at the admin port.", ["path", "code"], registry=registry
        )

    async def answer(self, request: Request) -> Answer:
        """Answer one request."""
        try:
            answer = await self._judge(request)
        except RpcError as error:
            answer = Answer(503, f"the supervisor does not answer: {error}\n".encode())
        path = request.path if request.path in self._paths else "other"
        self._requests.labels(path=path, code=str(answer.status)).inc()
        return answer

    async def _judge(self, request: Request) -> Answer:
        handler = self._paths.get(request.path)
        if handler is None:
            return Answer(404, f"there is no such path; try {', '.join(self._paths)}\n".encode())
        if request.method not in {"GET", "HEAD"}:
            return Answer(405, b"only GET\n", headers=(("Allow", "GET, HEAD"),))
        if request.path in FOR_TOKEN_HOLDERS and not await self._allows(request.authorization):
            get_logger().warning(
                "refused at the admin port",
                client=request.client,
                path=request.path,
                reason="another token than that of admin.token_file" if request.authorization else "no token",
            )
            return Answer(401, b"the token of admin.token_file is needed\n", headers=(("WWW-Authenticate", "Bearer"),))
        return await handler()

    async def _metrics(self) -> Answer:
        text, at = await self._knowledge.metrics()
        return Answer(200, text, CONTENT_TYPE_LATEST, (("X-Collected-At", f"{at:.6f}"),))

    async def _healthz(self) -> Answer:
        await trio.lowlevel.checkpoint()
        well = self._knowledge.is_well()
        return Answer(200, b"ok\n") if well else Answer(503, b"the supervisor does not answer\n")

    async def _readyz(self) -> Answer:
        reasons = await self._knowledge.not_ready_reasons()
        return Answer(503, "".join(f"{reason}\n" for reason in reasons).encode()) if reasons else Answer(200, b"ok\n")

    async def _status_html(self) -> Answer:
        reasons = await self._knowledge.not_ready_reasons()
        return Answer(503, b"NOT READY\n") if reasons else Answer(200, b"OK\n")

    async def _status(self) -> Answer:
        status = (await self._knowledge.status()).encode()
        return Answer(200, msgspec.json.format(status, indent=2) + b"\n", JSON)
