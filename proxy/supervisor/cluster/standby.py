"""The standby forwarder: a process that has done its imports and waits for its START.

When a forwarder dies, its relays pause until a successor has them; most of that time would be the start of Python.
"""

from collections.abc import Awaitable, Callable

import trio

from proxy.common.logs import get_logger
from proxy.supervisor.processes.worker_process import WorkerProcess

PAUSE_S = 1.0
"""Pause after one was taken before the next is spawned: the successor itself needs the CPU first."""


class StandbyForwarder:
    """At most one standby process; PAUSE_S after it was taken or has died, another is spawned."""

    def __init__(self, spawn: Callable[[], Awaitable[WorkerProcess]]) -> None:
        self._spawn = spawn
        self._worker: WorkerProcess | None = None
        self._taken = trio.Event()
        self._running = trio.CancelScope()
        self._stopped = trio.Event()

    async def run(self) -> None:
        """Keep one process ready until cancelled or stopped."""
        try:
            await self._keep_ready()
        finally:
            self._stopped.set()

    async def _keep_ready(self) -> None:
        with self._running:
            while True:
                try:
                    worker = self._worker = await self._spawn()
                except OSError as error:
                    get_logger().warning("no standby forwarder", reason=str(error))
                else:
                    await self._wait_until_taken(worker)
                await trio.sleep(PAUSE_S)

    async def _wait_until_taken(self, worker: WorkerProcess) -> None:
        """Wait until the process is taken or has died; end one that was not taken."""
        taken = self._taken
        try:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    await worker.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                await taken.wait()
                nursery.cancel_scope.cancel()
        finally:
            if not taken.is_set():
                with trio.CancelScope(shield=True):
                    await self._end(worker)

    async def _end(self, worker: WorkerProcess) -> None:
        self._worker = None
        worker.kill()
        if worker.store_channel is not None:
            worker.store_channel.close()
        await worker.wait()

    def take_worker(self) -> WorkerProcess | None:
        """Return the process, which is the caller's from now on; None where there is none."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._taken.set()
            self._taken = trio.Event()
        return worker

    def stop(self) -> None:
        """End the process, if there is one, and spawn no other."""
        self._running.cancel()

    async def stop_and_wait(self) -> None:
        """Stop, and wait until the process has ended."""
        self.stop()
        await self._stopped.wait()
