"""An epoll that one Trio task drains in batches: the event loop of the reactor and of the relay engine.

Trio waits on the epoll's own descriptor (epolls nest), so one wake-up of Trio serves a whole batch of sockets, and no
epoll_ctl is made per event. To wake a Trio task for each socket costs several times what its event does.
"""

import ctypes
import os
import select
import time
from collections.abc import Callable, Sized

import trio

EVENTS_PER_BATCH = 64
LINGER_S = 0.001
"""How long a busy loop polls for the next events without Trio: by little more it delays the process's other tasks."""
BUSY_GAP_S = 0.0003
"""How closely events must follow each other for such polling to be worth it."""

Events = list[tuple[int, int]]
"""Descriptors that are ready, each with its mask (EPOLLIN, EPOLLOUT, ...)."""

_NS_PER_S = 1_000_000_000
_libc = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _ITimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class TimerFd:
    """A timer whose descriptor becomes readable when it fires. Raises OSError where the kernel has no timerfd.

    epoll_wait's own timeout arms and disarms a timer of the kernel's at each call, which in a virtual machine costs
    more than all else of a wake-up. One timer for many calls does not. (Python 3.13 has these calls in os.)
    """

    def __init__(self) -> None:
        self._descriptor: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        """Return the descriptor. Wait for it edge-triggered (EPOLLET), since it is never read."""
        return self._descriptor

    def arm(self, seconds: float) -> None:
        """Fire once after ``seconds``; this replaces an earlier setting."""
        whole, nanoseconds = divmod(max(1, int(seconds * _NS_PER_S)), _NS_PER_S)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(whole, nanoseconds))
        _libc.timerfd_settime(self._descriptor, 0, ctypes.byref(spec), None)

    def fire_now(self) -> None:
        """Fire at once."""
        self.arm(0)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class EpollLoop:
    """One epoll and the task that drains it.

    ``process`` handles one batch of events, which may be empty, and part of ``run_queue``: the loop goes on without
    waiting as long as that is not empty. ``may_linger`` tells whether no other task of this process is in a hurry,
    which a batch may change; the owner sets it. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        process: Callable[[Events], None],
        run_queue: Sized = (),
        *,
        may_linger: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoll = select.epoll()
        self._timer = TimerFd()
        self.epoll.register(self._timer, select.EPOLLIN | select.EPOLLET)
        self._process = process
        self._run_queue = run_queue
        self.may_linger = may_linger
        self._clock = clock
        self._processed_at = 0.0
        self._is_processing = False
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether events were processed within the last BUSY_GAP_S."""
        return self._clock() - self._processed_at < BUSY_GAP_S

    def wake(self) -> None:
        """Have the run queue processed although no event arrives."""
        # While a batch is processed the queue is looked at anyway, and to ring would replace the timer of the polling.
        if not self._is_processing:
            self._timer.fire_now()

    def process_once(self, process: Callable[[Events], None] | None = None, events_max: int = EVENTS_PER_BATCH) -> None:
        """Process one batch of what is ready, for a caller that is another task of the same Trio loop.

        ``process``: in place of the loop's own; it may leave the run queue as it is.
        """
        if self._is_processing or self._is_stopped or self.epoll.closed:
            return
        self._is_processing = True
        try:
            (process or self._process)(self.epoll.poll(0, events_max))
        finally:
            self._is_processing = False
        if self._run_queue:
            self._timer.fire_now()

    def stop(self) -> None:
        """Process nothing more, even if ``run`` has been woken already; to end it is the caller's, by cancelling."""
        self._is_stopped = True

    async def run(self) -> None:
        """Process events until cancelled or stopped; closes the epoll."""
        try:
            while not self._is_stopped:
                if self._run_queue:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self.epoll.fileno())
                if not self._is_stopped:
                    self._process_ready()
        finally:
            self.epoll.close()
            self._timer.close()

    def _process_ready(self) -> None:
        """Process ready events and the run queue; under load, busy-poll for up to LINGER_S.

        A wake-up by way of Trio costs more than most events do. Where batches follow each other closely, and no other
        task is in a hurry, the next one is therefore waited for here.
        """
        clock, process, run_queue, epoll = self._clock, self._process, self._run_queue, self.epoll
        now = clock()
        until = now + LINGER_S
        lingers = now - self._processed_at < BUSY_GAP_S and self.may_linger()
        if lingers:
            self._timer.arm(LINGER_S)
        events = epoll.poll(0, EVENTS_PER_BATCH)
        self._is_processing = True
        while events or run_queue:
            process(events)
            now = clock()
            if now >= until:
                break
            waits = lingers and not run_queue and self.may_linger()
            events = epoll.poll(-1 if waits else 0, EVENTS_PER_BATCH)  # without a timeout: see TimerFd
        self._is_processing = False
        self._processed_at = now
