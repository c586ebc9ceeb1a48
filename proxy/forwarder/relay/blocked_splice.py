"""A watch over splices that block: for connections that another process has passed, and may have a copy of.

O_NONBLOCK is the open socket's, not a descriptor's: a process that has a copy may take it away, and the next splice
from or to that socket waits, with all relays of this process, until the supervisor ends it; the successor has the same
relay then. So while there are such relays, a thread looks each second at where the loop is. Where it is in a portion of
one of them several times running, and has used next to no CPU time in between, ``on_blocked`` is called, in that
thread.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from proxy.forwarder.relay.relay import Direction

LOOK_S: Final = 1.0
LOOKS: Final = 5
CPU_PART_MAX: Final = 0.02
"""A loop that is not blocked, and uses so little, is in such a portion at so few looks: five running are no chance."""

FRAMES_MAX: Final = 4
"""How far a splice is below the function that has the direction."""


class BlockedSpliceWatch:
    """A thread that watches the one that makes this object, between ``start`` and ``stop``."""

    def __init__(self, on_blocked: Callable[[], None]) -> None:
        self._on_blocked = on_blocked
        self._watched = threading.get_ident()
        self._stop: threading.Event | None = None

    def start(self) -> None:
        """Start to watch. May be repeated."""
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._run, args=(self._stop,), name="splice-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer. May be repeated."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _run(self, stop: threading.Event) -> None:
        looks, clock = 0, time.pthread_getcpuclockid(self._watched)
        used_s = time.clock_gettime(clock)
        while not stop.wait(LOOK_S):
            before_s, used_s = used_s, time.clock_gettime(clock)
            is_idle = used_s - before_s <= LOOK_S * CPU_PART_MAX
            frame = sys._current_frames().get(self._watched)  # noqa: SLF001 -- there is no other way
            looks = looks + 1 if is_idle and _is_in_passed_relay(frame) else 0
            del frame
            if looks >= LOOKS:
                self._on_blocked()
                looks = 0


def _is_in_passed_relay(frame: FrameType | None) -> bool:
    """Return whether a stack is that of moving a portion of a relay that was passed."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        direction = frame.f_locals.get("direction")
        if isinstance(direction, Direction):
            return direction.relay.record.passed
        frame = frame.f_back
    return False
