"""The admin worker: serves the operators' port, and knows nothing but what the supervisor tells it.

It reads what strangers send, so it holds no key: its configuration has no secrets, the one token that it reads itself
is its callers'.
"""

from collections.abc import Mapping

import trio

from proxy.admin.access import Access
from proxy.admin.application import AdminApplication
from proxy.admin.http import HttpServer
from proxy.admin.kept import CoalescingCache
from proxy.admin.questions import ChannelLost, SupervisorClient
from proxy.admin.scrape import Scrape
from proxy.common.errors import ConfigError
from proxy.config.types import Config
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.server import Handler, StreamingHandler

METRICS_KEPT_S = 1.0
READINESS_KEPT_S = 0.5
"""Whoever reaches the port may ask for it; Kubernetes does every few seconds."""

STATUS_KEPT_S = 0.1
DRAIN_S_MAX = 1.0
"""A request under way has so long when the worker ends."""


class Knowledge:
    """What the supervisor tells, collected once for all who ask in the same moment."""

    def __init__(
        self,
        questions: SupervisorClient,
        scrape: Scrape,
        nursery: trio.Nursery,
        *,
        readiness_kept_s: float = READINESS_KEPT_S,
    ) -> None:
        self.metrics = CoalescingCache(nursery, scrape.collect, METRICS_KEPT_S).current
        self.is_well = questions.is_well
        self.not_ready_reasons = CoalescingCache(nursery, questions.not_ready_reasons, readiness_kept_s).current
        self.status = CoalescingCache(nursery, questions.status, STATUS_KEPT_S).current


class AdminService:
    """proxy.runtime.process.worker.Service for the admin port."""

    def __init__(self, context: WorkerContext) -> None:
        self._nursery = context.nursery
        self._access = Access(context.config.admin)
        self._questions = SupervisorClient(context.descriptors.questions)
        scrape = Scrape(context.config.cluster.name, self._questions, context.registry)
        knowledge = Knowledge(self._questions, scrape, context.nursery)
        self._server = HttpServer(AdminApplication(knowledge, self._allows, context.registry).answer)
        self._ended = trio.Event()

    async def _allows(self, authorization: list[bytes]) -> bool:
        return await self._access.allows(authorization)

    def handlers(self) -> Mapping[int, Handler | StreamingHandler]:
        """None: nobody but the supervisor calls it."""
        return {}

    async def start(self) -> None:
        """Take the port over, and serve it. Raises ConfigError."""
        try:
            listener = await self._questions.take_listener()
        except (ChannelLost, OSError) as error:
            raise ConfigError(f"admin.bind: {error}") from None
        self._nursery.start_soon(self._keep_line)
        self._nursery.start_soon(self._serve, listener)

    async def _keep_line(self) -> None:
        """End the worker with its line: without it there is nothing that it could answer."""
        await self._questions.run()
        self._nursery.cancel_scope.cancel()

    async def _serve(self, listener: trio.SocketListener) -> None:
        async with listener:
            await self._server.serve(listener)
        self._ended.set()

    async def configure(self, config: Config) -> None:
        """Take over another token. Raises ConfigError."""
        await trio.lowlevel.checkpoint()
        self._access = Access(config.admin)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002 -- nothing can be handed over
        """Leave new requests to a successor; return when those under way are answered, or soon."""
        self._server.stop_accepting()
        with trio.move_on_after(min(timeout_s, DRAIN_S_MAX)):
            await self._ended.wait()

    def status(self) -> dict[str, object]:
        """What an operator may want to know."""
        return {"http_connections": self._server.connections, "displaced_connections": self._server.displaced}
