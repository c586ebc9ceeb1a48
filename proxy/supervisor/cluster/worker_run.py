"""One process in a worker slot, from its spawning to its end: health checks, draining, import."""

import trio

from proto.rpc_pb2 import DrainRequest, Empty, Method, Text
from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcError
from proxy.supervisor.processes.worker_process import WorkerProcess

HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
HEALTH_FAILURES_MAX = 3

DRAIN_GRACE_S = 5.0
"""How much longer than its timeout a DRAIN call may take."""


class WorkerRun:
    """One process in a slot; ``slot_name`` is for logs.

    ``slot_vacated``: the process has ended, or the slot is another's. ``channel_drained``: all that the process sent to
    the fd store was applied. ``retired``: the process was replaced, and finishes its work by ``drain_until`` (Trio's
    time).
    """

    def __init__(self, worker: WorkerProcess, slot_name: str = "") -> None:
        self.worker = worker
        self.slot_vacated = trio.Event()
        self.ended = trio.Event()
        self.channel_drained = trio.Event()
        self.retired = False
        self.drain_until = float("inf")
        self.exit_code = 0
        self._slot_name = slot_name

    async def kill_if_hung(self) -> None:
        """Check the worker's health until it leaves its slot; kill it if it hangs, so that its clients do not wait."""
        missed = 0
        while missed < HEALTH_FAILURES_MAX:
            with trio.move_on_after(HEALTH_INTERVAL_S):
                await self.slot_vacated.wait()
                return
            try:
                await self.worker.call(Method.GET_STATUS, Empty(), Text, timeout_s=HEALTH_TIMEOUT_S)
                missed = 0
            except RpcError:
                missed += 1
        get_logger().error("a worker hangs; ending it", who=self._slot_name, pid=self.worker.pid)
        self.worker.kill()

    async def drain_and_stop(self, drain_timeout_ms: int) -> None:
        """Drain a replaced worker, with its relays handed over, then stop it."""
        request = DrainRequest(timeout_ms=drain_timeout_ms, hand_over=True)
        await request_drain(self.worker, request, self._slot_name, "a replaced worker did not drain")
        await self.worker.stop()


async def request_drain(worker: WorkerProcess, request: DrainRequest, slot_name: str, failure_event: str) -> bool:
    """Call DRAIN and wait for its end; return True if the connection to the worker was lost meanwhile.

    ``slot_name`` and ``failure_event`` are for the log entry where the call fails.
    """
    try:
        await worker.send_command(Method.DRAIN, request, timeout_s=seconds(request.timeout_ms) + DRAIN_GRACE_S)
    except RpcError as error:
        get_logger().warning(failure_event, who=slot_name, reason=str(error))
        return isinstance(error, RpcConnectionLost)
    return False
