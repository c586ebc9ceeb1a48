"""Watch of the configuration file: a change is applied once it is stable, and tried again where it failed.

By polling, not by file system events: a ConfigMap of Kubernetes changes by a symbolic link above the file. Each poll
reads the file, which for a small one costs no more than reading its timestamps, and does not depend on the clock of its
file system. Only a hash of the content is kept.
"""

import hashlib
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from prometheus_client import CollectorRegistry, Gauge

from proxy.common.toml import FILE_BYTES_MAX
from proxy.runtime.loop.tasks import Backoff, seconds
from proxy.supervisor.processes.signals import in_thread_without_signals

NEVER = float("inf")
RETRY_PAUSE_FIRST_S = 60.0
RETRY_PAUSE_MAX_S = 600.0
"""Pause before a content that failed is tried again: the first, and the longest that it grows to."""

DISABLED_POLL_S = 5.0
"""Interval of checks whether a reload has turned the watch on."""

MISSING = b"missing"
NOT_WATCHED = b""
"""Fingerprints of a file that cannot be read, and of what is no regular file (a pipe can be read only once)."""


def fingerprint(path: Path) -> bytes:
    """Return a hash of the file's content, MISSING or NOT_WATCHED; symbolic links are followed."""
    try:
        # O_NONBLOCK: to open a pipe would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return NOT_WATCHED
            return hashlib.sha256(file.read(FILE_BYTES_MAX)).digest()
    except OSError:
        return MISSING


class ChangeDetector:
    """Decides when a content is due: it was the same at two polls, and is new or due for another attempt."""

    def __init__(self, pauses: Backoff | None = None, unsettled_polls_max: float = NEVER) -> None:
        """``pauses``: between attempts with a content that failed. ``unsettled_polls_max``: polls at each of which the
        content was another one, after which it is due all the same.
        """
        self._tried = NOT_WATCHED
        self._seen = NOT_WATCHED
        self._unsettled_polls = 0
        self._unsettled_polls_max = unsettled_polls_max
        self._again_at_s = NEVER
        self._pauses = pauses or Backoff(initial_s=RETRY_PAUSE_FIRST_S, max_s=RETRY_PAUSE_MAX_S)

    def note_attempt(self, content: bytes) -> None:
        """Note that this content is being tried, by the watch or by an operator."""
        self._unsettled_polls = 0
        if content != self._tried:
            self._tried = content
            self._again_at_s = NEVER
            self._pauses.reset()

    def note_failure(self, now_s: float) -> None:
        """Schedule another attempt: what the content lacks (a key file, say) may come, what was slow may pass."""
        self._again_at_s = now_s + self._pauses.next_pause_s()

    def note_chance(self) -> None:
        """Note that what a content lacked may have come: it is due at the next poll."""
        self._again_at_s = -NEVER

    def is_due(self, content: bytes, now_s: float) -> bool:
        """Return True if this content should be tried now, and note it as tried."""
        before, self._seen = self._seen, content
        if content == NOT_WATCHED:
            return False
        self._unsettled_polls = self._unsettled_polls + 1 if content != before else 0
        if 0 < self._unsettled_polls < self._unsettled_polls_max:
            return False
        if content == self._tried and now_s < self._again_at_s:
            return False
        self.note_attempt(content)
        self._again_at_s = NEVER
        return True


class ConfigFileWatcher:
    """Polls one file. ``interval_ms`` is called before each poll (0: the watch is off). ``on_change`` applies the
    file, and returns False if it should be tried again.
    """

    def __init__(self, path: Path, interval_ms: Callable[[], int], on_change: Callable[[], Awaitable[bool]]) -> None:
        self._path = path
        self._interval_ms = interval_ms
        self._on_change = on_change
        self._detector = ChangeDetector()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            interval_ms = self._interval_ms()
            await trio.sleep(seconds(interval_ms) or DISABLED_POLL_S)
            if not interval_ms:
                continue
            content = await in_thread_without_signals(fingerprint, self._path)
            if self._detector.is_due(content, trio.current_time()):
                done = await self._on_change()
                if not done:
                    self._detector.note_failure(trio.current_time())

    def note_chance(self) -> None:
        """Note that a content that was refused may be applied now; what is in force already is not applied again."""
        self._detector.note_chance()

    def note_reload(self) -> None:
        """Note that an operator's reload tries the file's present content."""
        self._detector.note_attempt(fingerprint(self._path))


class ReloadMetrics:
    """Metrics of the last reload, with the names that Prometheus has for its own."""

    def __init__(self, registry: CollectorRegistry | None, unix_s: Callable[[], float]) -> None:
        self.successful = True
        """Whether the configuration in the file is in force, as far as is known."""
        self._unix_s = unix_s
        self._successful = Gauge(
            "pulsar_proxy_config_last_reload_successful",
            "Whether the last configuration that was to be taken over was.",
            registry=registry,
        )
        self._success_timestamp = Gauge(
            "pulsar_proxy_config_last_reload_success_timestamp_seconds",
            "When a configuration was last taken over, the one of the start included.",
            registry=registry,
        )
        self.record_success()

    def record_success(self) -> None:
        """Record that the configuration in the file is in force."""
        self.successful = True
        self._successful.set(1)
        self._success_timestamp.set(self._unix_s())

    def record_failure(self) -> None:
        """Record that the configuration in the file is not in force."""
        self.successful = False
        self._successful.set(0)
