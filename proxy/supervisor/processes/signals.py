"""The supervisor's signals, and threads that receive none of them."""

import signal
from collections.abc import Callable
from typing import TypeVar

import trio

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that the supervisor handles; blocked during the exec, while no program receives them."""

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


async def in_thread_without_signals(
    read: Callable[[ArgumentT], ResultT], argument: ArgumentT, *, limiter: trio.CapacityLimiter | None = None
) -> ResultT:
    """Read files in a thread that receives no signals: a file system that hangs must not stop the supervisor.

    The thread outlives a cancelled call, and a signal that it received during an exec, which only blocks the main
    thread's signals, would be lost.
    """

    def in_thread() -> ResultT:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return read(argument)

    return await trio.to_thread.run_sync(in_thread, abandon_on_cancel=True, limiter=limiter)
