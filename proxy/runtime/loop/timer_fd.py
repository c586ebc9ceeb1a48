"""A timer that an epoll can wait for: timerfd (timerfd_create(2)).

epoll_wait's own timeout arms and disarms a timer of the kernel's at each call, which in a virtual machine costs more
than all else of a wake-up. One timer for many calls does not. (Python 3.13 has these calls in os.)
"""

import ctypes
import os
import time

_NS_PER_S = 1_000_000_000
_libc = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _ITimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class TimerFd:
    """A timer whose descriptor becomes readable when it fires. Raises OSError where the kernel has no timerfd."""

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
