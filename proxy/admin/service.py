"""The admin worker: serves the operators' port with what it reads from the supervisor.

It reads unauthenticated input, so it holds no key: its configuration has no secrets, and the one token that it reads
itself is that of its callers.
"""

from collections.abc import Mapping

import trio

from proxy.admin.application import AdminApplication
from proxy.admin.host_check import HostCheck
from proxy.admin.http import HttpServer
from proxy.admin.kept import CoalescingCache
from proxy.admin.scrape import MetricsScrape
from proxy.admin.supervisor_client import ChannelLost, SupervisorClient
from proxy.admin.token_check import TokenCheck
from proxy.common.errors import ConfigError
from proxy.config.types import Config
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.server import Handler, StreamingHandler

METRICS_KEPT_S = 1.0
READINESS_KEPT_S = 0.5
"""Any client that reaches the port may ask for it; Kubernetes does every few seconds."""

STATUS_KEPT_S = 0.1
DRAIN_S_MAX = 1.0
"""Time for a request under way when the worker ends."""


class CachedClusterView:
    """ClusterView from the supervisor's reports, each read once for all requests of the same moment."""

    def __init__(
        self,
        client: SupervisorClient,
        scrape: MetricsScrape,
        *,
        readiness_kept_s: float = READINESS_KEPT_S,
    ) -> None:
        self.metrics = CoalescingCache(scrape.collect_metrics, METRICS_KEPT_S).current
        self.is_responsive = client.is_responsive
        self.readiness = CoalescingCache(client.readiness, readiness_kept_s).current
        self.status = CoalescingCache(client.status, STATUS_KEPT_S).current


class AdminService:
    """proxy.runtime.process.worker.Service for the admin port."""

    def __init__(self, context: WorkerContext) -> None:
        self._nursery = context.nursery
        self._token_check = TokenCheck(context.config.admin)
        self._host_check = HostCheck(context.config.admin)
        self._supervisor = SupervisorClient(context.descriptors.questions)
        scrape = MetricsScrape(context.config.cluster.name, self._supervisor, context.registry)
        view = CachedClusterView(self._supervisor, scrape)
        application = AdminApplication(view, self._is_allowed, self._is_own_host, context.registry)
        self._server = HttpServer(application.handle_request)
        self._ended = trio.Event()

    async def _is_allowed(self, authorization: list[bytes]) -> bool:
        return await self._token_check.is_allowed(authorization)

    def _is_own_host(self, host: bytes) -> bool:
        return self._host_check.is_own_host(host)

    def handlers(self) -> Mapping[int, Handler | StreamingHandler]:
        """Return none: only the supervisor calls this worker."""
        return {}

    async def start(self) -> None:
        """Receive the port from the supervisor and serve it. Raises ConfigError."""
        try:
            listener = await self._supervisor.receive_listener()
        except (ChannelLost, OSError) as error:
            raise ConfigError(f"admin.bind: {error}") from None
        self._nursery.start_soon(self._run_supervisor_client)
        self._nursery.start_soon(self._serve, listener)

    async def _run_supervisor_client(self) -> None:
        """Run the channel to the supervisor and end the worker with it: it could serve nothing without."""
        await self._supervisor.run()
        self._nursery.cancel_scope.cancel()

    async def _serve(self, listener: trio.SocketListener) -> None:
        async with listener:
            await self._server.serve(listener)
        self._ended.set()

    async def configure(self, config: Config) -> None:
        """Take over another token file and other allowed hosts. Raises ConfigError."""
        await trio.lowlevel.checkpoint()
        self._token_check = TokenCheck(config.admin)
        self._host_check = HostCheck(config.admin)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002 -- nothing can be handed over
        """Leave new requests to a successor; wait for those under way, for at most DRAIN_S_MAX."""
        self._server.stop_accepting()
        with trio.move_on_after(min(timeout_s, DRAIN_S_MAX)):
            await self._ended.wait()

    def status(self) -> dict[str, object]:
        """Return the numbers of open and of displaced HTTP connections."""
        return {"http_connections": self._server.connections, "displaced_connections": self._server.displaced}
