"""The configuration file, watched: what is found in it is tried as soon as it stands still, and again where it failed.

No file system events: a ConfigMap of Kubernetes changes by a symbolic link above the file. The file is read at each
look, which for so small a one costs no more than to ask when it has changed, and is right whatever the clock of its
file system says. What is kept of it is a hash.
"""

import hashlib
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from prometheus_client import CollectorRegistry, Gauge

from proxy.runtime.loop.tasks import Backoff, seconds
from proxy.supervisor.handover.exec_handover import SIGNALS

FILE_BYTES_MAX = 16 * 1024 * 1024
"""What is longer is no configuration; its beginning alone is looked at."""

NEVER = float("inf")
RETRY_PAUSE_FIRST_S = 60.0
RETRY_PAUSE_MAX_S = 600.0
"""The pause before a content that failed is tried again; it grows, up to the second."""

DISABLED_POLL_S = 5.0
"""How often it is looked whether the watch has been turned on by a reload."""

MISSING = b"missing"
NOT_WATCHED = b""
"""In place of the hash of a file that cannot be read, and of what is no file (a pipe, say, is read once)."""


def fingerprint(path: Path) -> bytes:
    """What differs when the file's content does; symbolic links are followed."""
    try:
        # A pipe would keep whoever opens it waiting.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return NOT_WATCHED
            return hashlib.sha256(file.read(FILE_BYTES_MAX)).digest()
    except OSError:
        return MISSING


def _fingerprint_in_thread(path: Path) -> bytes:
    """As ``fingerprint``, in a thread that takes no signals: it outlives the call, and what it takes while this program
    becomes the next one (which only blocks the main thread's signals) would be lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    return fingerprint(path)


class ChangeDetector:
    """Says when a content should be tried: it was the same at two looks, and is not what was tried last, or that failed
    and its pause is over.
    """

    def __init__(self) -> None:
        self._tried = NOT_WATCHED
        self._seen = NOT_WATCHED
        self._again_at_s = NEVER
        self._pauses = Backoff(initial_s=RETRY_PAUSE_FIRST_S, max_s=RETRY_PAUSE_MAX_S)

    def note_attempt(self, content: bytes) -> None:
        """This content has been tried, whoever asked for it."""
        if content != self._tried:
            self._tried = content
            self._again_at_s = NEVER
            self._pauses.reset()

    def note_failure(self, now_s: float) -> None:
        """What was tried last may succeed later: what it lacks (a key file, say) may come, what was slow may pass."""
        self._again_at_s = now_s + self._pauses.next_pause_s()

    def is_due(self, content: bytes, now_s: float) -> bool:
        """Look at a content; whether it should be tried now, which then counts as done."""
        before, self._seen = self._seen, content
        if content == NOT_WATCHED or content != before:
            return False
        if content == self._tried and now_s < self._again_at_s:
            return False
        self.note_attempt(content)
        self._again_at_s = NEVER
        return True


class ConfigFileWatcher:
    """Watches one file. ``interval_ms`` is asked before each look (0: do not look); ``on_change`` tries the content,
    and says whether it is done with that; else it is asked again.
    """

    def __init__(self, path: Path, interval_ms: Callable[[], int], on_change: Callable[[], Awaitable[bool]]) -> None:
        self._path = path
        self._interval_ms = interval_ms
        self._on_change = on_change
        self._detector = ChangeDetector()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            interval_ms = self._interval_ms()
            await trio.sleep(seconds(interval_ms) or DISABLED_POLL_S)
            if interval_ms and self._detector.is_due(await self._read_fingerprint(), trio.current_time()):
                done = await self._on_change()
                if not done:
                    self._detector.note_failure(trio.current_time())

    async def _read_fingerprint(self) -> bytes:
        """In a thread: nobody has asked for this, and a file system that hangs must not stop the supervisor."""
        return await trio.to_thread.run_sync(_fingerprint_in_thread, self._path, abandon_on_cancel=True)

    def note_reload(self) -> None:
        """Note that what is in the file now is being tried, since somebody has asked for it."""
        self._detector.note_attempt(fingerprint(self._path))


class ReloadMetrics:
    """What came of the last reload, under the names that Prometheus has for its own."""

    def __init__(self, registry: CollectorRegistry | None, unix_s: Callable[[], float]) -> None:
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
        """The configuration in the file is in force."""
        self._successful.set(1)
        self._success_timestamp.set(self._unix_s())

    def record_failure(self) -> None:
        """The configuration in the file is not in force."""
        self._successful.set(0)
