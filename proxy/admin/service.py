"""The admin worker: serves the operators' port with what it reads from the supervisor.

It reads unauthenticated input, so it holds no key: its configuration has no secrets, and the one token that it reads
itself is that of its callers.
"""

import fnmatch
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import trio

from proto.addresses import AddressInvalid, parse_host_port
from proxy.admin.application import AdminApplication
from proxy.admin.scrape import MetricsScrape
from proxy.admin.supervisor_client import ChannelLost, SupervisorClient
from proxy.common.bearer_tokens import is_authorized, token_digest
from proxy.common.errors import ConfigError
from proxy.common.http_server import HttpServer
from proxy.common.logs import get_logger
from proxy.common.reloading_file import ReloadingFile
from proxy.config.admin_token import read_admin_token
from proxy.config.types import Admin, Config
from proxy.runtime.dns.resolver import is_address
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.server import Handler, StreamingHandler

METRICS_KEPT_S = 1.0
READINESS_KEPT_S = 0.5
"""Any client that reaches the port may ask for it; Kubernetes does every few seconds."""

STATUS_KEPT_S = 0.1
OVERVIEW_KEPT_S = 1.0
"""Viewers of the page ask at the same moments (proxy.admin.page); who comes in between gets what the last have got."""

DRAIN_S_MAX = 1.0
"""Time for a request under way when the worker ends."""

_HTTP_PORT = 80
_KEY = "admin.token_file"

ValueT = TypeVar("ValueT")


class CoalescingCache(Generic[ValueT]):
    """``make`` is never run twice at a time, and not again until ``keep_s`` seconds after its end, however many ask.

    From its end, not from its beginning: what takes longer than it is kept would otherwise never pause.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], keep_s: float) -> None:
        self._make = make
        self._keep_s = keep_s
        self._value: ValueT | None = None
        self._error: RpcError | None = None
        self._ended = float("-inf")
        self._flight = SingleFlight(self._run)

    async def current(self) -> ValueT:
        """Return the value, at most ``keep_s`` old at the time of the call. Raises RpcError where there is none."""
        if self._flight.is_under_way or trio.current_time() - self._ended >= self._keep_s:
            await self._flight.result()
        if self._value is None:
            raise self._error or RpcError("no worker answered")
        return self._value

    async def _run(self) -> None:
        try:
            self._value, self._error = await self._make(), None
        except RpcError as error:
            self._value, self._error = None, error
        except Exception as error:  # noqa: BLE001 -- the next time it may succeed
            get_logger().error("the admin port met a defect", exc_info=error)
            self._value, self._error = None, None
        finally:
            self._ended = trio.current_time()


class TokenCheck:
    """Checks the ``Authorization`` of requests. Raises ConfigError where the file cannot be used at the start.

    A file that becomes unusable later leaves the previous token in force.
    """

    def __init__(self, config: Admin) -> None:
        file = config.token_file
        self._token = ReloadingFile(_KEY, (file,), lambda: read_admin_token(file)) if file else None

    async def is_allowed(self, authorization: list[bytes]) -> bool:
        """Return True if a request with these values of the header may read the protected paths."""
        if self._token is None:
            return True
        digest = token_digest(await self._token.current_value())
        return len(authorization) == 1 and is_authorized(authorization[0], (digest,))


class HostCheck:
    """Checks the ``Host`` of requests against ``admin.allowed_hosts``.

    A page that an operator's browser shows can give its own host name the admin port's address (DNS rebinding). The
    browser then lets it read what the port answers, as of one origin; it sends that name as ``Host``.
    """

    def __init__(self, config: Admin) -> None:
        names = ("localhost", parse_host_port(config.bind).host, *config.allowed_hosts)
        self._names = [re.compile(fnmatch.translate(name.lower().removesuffix("."))) for name in names]

    def is_own_host(self, host: bytes) -> bool:
        """Return True for an IP address, an allowed name, or no ``Host`` at all, with or without a port.

        No page can take an IP address for its name, and every browser sends ``Host``; probes of load balancers by
        HTTP/1.0 do not.
        """
        if not host:
            return True
        try:
            name = parse_host_port(host.decode("latin-1"), default_port=_HTTP_PORT).host.lower().removesuffix(".")
        except AddressInvalid:
            name = ""  # only `*` allows it
        return is_address(name) or any(pattern.match(name) for pattern in self._names)


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
        self.overview = CoalescingCache(client.overview, OVERVIEW_KEPT_S).current


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
