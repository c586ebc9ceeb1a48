"""The operators' command `log-level`: another level of the logs at run time, for a while or until it is changed."""

import time
from collections.abc import Callable

import msgspec
import trio

from proto.roles import Role
from proto.rpc_pb2 import LogLevelRequest
from proxy.common.errors import ProxyError
from proxy.common.logs import LEVELS, get_logger, set_log_level
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.cluster.log_levels import LOGGING_ROLES

CONFIGURED = "configured"
FOR_MS_MAX = 7 * 24 * 3_600_000


class LogLevelRefused(ProxyError):
    """A level was not set. The text is the reason."""


class LogLevelControl:
    """Changes the levels in all processes. ``now``: seconds of time.monotonic()."""

    def __init__(self, cluster: Cluster, now: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._now = now
        self._changed = trio.Event()
        if cluster.log_levels.changed:  # by the program before an exec
            self._apply_own()

    async def change(self, request: LogLevelRequest) -> str:
        """Change levels as an operator asks; return what is in force as JSON, with the workers that did not take it
        over. Raises LogLevelRefused.
        """
        if request.role and request.role not in LOGGING_ROLES:
            raise LogLevelRefused("there is no such role")
        if request.for_ms > FOR_MS_MAX:
            raise LogLevelRefused(f"a level can be set for at most {FOR_MS_MAX // 3_600_000} h")
        if request.level not in {*LEVELS, CONFIGURED, ""}:
            raise LogLevelRefused("there is no such level")
        failed: list[str] = []
        if request.level:
            roles = (Role(request.role),) if request.role else LOGGING_ROLES
            if request.level == CONFIGURED:
                self._cluster.log_levels.restore(roles)
            else:
                end = self._now() + request.for_ms / 1000 if request.for_ms else None
                self._cluster.log_levels.change(roles, request.level, end)
            get_logger().warning("an operator changes the log's level", to=request.level, of=request.role or "all")
            self._changed.set()  # first: the level's time ends also if the operator leaves meanwhile
            failed = await self._apply(roles)
        status = self._cluster.log_levels.status(self._cluster.config, self._now())
        return msgspec.json.encode({**status, "failed": failed}).decode()

    async def run(self) -> None:
        """Bring the configured level back where its time has come, until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_after(max(0.0, self._cluster.log_levels.next_end_s() - self._now())):
                await self._changed.wait()
            if ended := self._cluster.log_levels.ended_at(self._now()):
                self._cluster.log_levels.restore(ended)
                await self._apply(ended)
                get_logger().warning("the log has its configured level again", of=",".join(ended))

    async def on_reloaded(self, *, is_level_new: bool) -> None:
        """Keep what an operator has set in force after a reload, or end it where the configured level has changed."""
        if not self._cluster.log_levels.changed:
            return
        if is_level_new:
            self._cluster.log_levels.restore()
            await self._apply(LOGGING_ROLES)
        self._apply_own()

    async def _apply(self, roles: tuple[Role, ...] | list[Role]) -> list[str]:
        self._apply_own()
        failed = await self._cluster.send_log_levels(roles)
        if failed:
            get_logger().warning("workers did not take over the log's level", who=",".join(failed))
        return failed

    def _apply_own(self) -> None:
        set_log_level(self._cluster.log_levels.level_of(Role.SUPERVISOR, self._cluster.config))
