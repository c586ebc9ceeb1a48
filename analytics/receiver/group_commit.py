"""Group commit: requests that wait for the disk at the same time share one write and one fdatasync, in a thread."""

from collections import deque
from dataclasses import dataclass, field

import trio

from analytics.errors import AnalyticsError
from analytics.receiver.config import Spool
from analytics.receiver.metrics import Metrics
from analytics.spool.records import SpoolError
from analytics.spool.writer import SpoolFullError, SpoolWriter
from proxy.common.logs import get_logger

GROUP_BYTES_MAX = 16 * 1024 * 1024


class NotCommittedError(AnalyticsError):
    """The record was not committed, and may be sent again. The text says why; `reason` is a metric's label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(eq=False)
class _PendingRecord:
    record: bytes
    done: trio.Event = field(default_factory=trio.Event)
    failure: NotCommittedError | None = None


class GroupCommit:
    """Queue of records for the spool, bounded in requests, bytes and waiting time; written in groups."""

    def __init__(self, writer: SpoolWriter, config: Spool, metrics: Metrics) -> None:
        self._writer = writer
        self._config = config
        self._metrics = metrics
        self._queue: deque[_PendingRecord] = deque()
        self._queued_bytes = 0
        self._queued_requests = 0
        self._arrived = trio.Event()
        self._closed = False
        self.finished = trio.Event()

    async def commit_record(self, record: bytes) -> None:
        """Enqueue a record and return once it is on the disk. Raises NotCommittedError.

        After the error the record may still reach the disk: its sender repeats it, and readers drop duplicates.
        """
        if (
            self._closed
            or self._queued_requests >= self._config.queue_requests_max
            or self._queued_bytes + len(record) > self._config.queue_bytes_max
        ):
            raise NotCommittedError("slow", "the disk does not keep up")
        waiting = _PendingRecord(record)
        self._queue.append(waiting)
        self._queued_requests += 1
        self._queued_bytes += len(record)
        self._arrived.set()
        with trio.move_on_after(self._config.commit_timeout_ms / 1000):
            await waiting.done.wait()
        if not waiting.done.is_set():
            raise NotCommittedError("slow", "the disk takes too long")
        if waiting.failure is not None:
            raise waiting.failure

    async def commit_groups(self) -> None:
        """Commit groups until `stop_accepting` is called and the queue is empty; then set `finished` and return."""
        while self._queue or not self._closed:
            await self._arrived.wait()
            self._arrived = trio.Event()
            while self._queue:
                await self._commit_group(self._take_next_group())
        self.finished.set()

    def stop_accepting(self) -> None:
        """Refuse further records; those in the queue are still committed."""
        self._closed = True
        self._arrived.set()

    def _take_next_group(self) -> list[_PendingRecord]:
        group = [self._queue.popleft()]
        size = len(group[0].record)
        while self._queue and size + len(self._queue[0].record) <= GROUP_BYTES_MAX:
            group.append(self._queue.popleft())
            size += len(group[-1].record)
        return group

    async def _commit_group(self, group: list[_PendingRecord]) -> None:
        failure = None
        started_at = trio.current_time()
        try:
            await trio.to_thread.run_sync(self._writer.append_records, [waiting.record for waiting in group])
        except SpoolError as error:
            failure = NotCommittedError("full" if isinstance(error, SpoolFullError) else "failed", str(error))
            get_logger().error("cannot write to the spool; senders get 503 and try again later", reason=str(error))
        self._metrics.commit_seconds.observe(trio.current_time() - started_at)
        self._metrics.group_requests.observe(len(group))
        for waiting in group:
            self._queued_requests -= 1
            self._queued_bytes -= len(waiting.record)
            waiting.failure = failure
            waiting.done.set()
