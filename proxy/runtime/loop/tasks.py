"""Small Trio pieces that several rooms need."""

from collections.abc import Awaitable, Callable

import trio


def seconds(milliseconds: int) -> float:
    """Milliseconds of the configuration as Trio's seconds."""
    return milliseconds / 1000


async def close_gracefully(stream: trio.abc.HalfCloseableStream, *, linger_s: float = 1.0) -> None:
    """Close so that the peer gets to read what was sent last.

    To close a socket with unread input makes the kernel send a reset, and a reset makes the peer's kernel throw away
    what it has not read yet: the very error that explains the close. So: end our direction, read and drop what still
    comes for a bounded time, then close.
    """
    with trio.move_on_after(linger_s):
        try:
            await stream.send_eof()
            while await stream.receive_some(65536):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass
    await trio.aclose_forcefully(stream)


def close_socket_now(stream: trio.abc.AsyncResource) -> bool:
    """Close a plain socket without a word, which needs no waiting; whether it was one."""
    if isinstance(stream, trio.SocketStream):
        stream.socket.close()
        return True
    return False


async def close_forcefully(stream: trio.abc.AsyncResource) -> None:
    """Close without a word. A plain socket needs no scope, no shield and no checkpoint for it."""
    if close_socket_now(stream):
        return
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)


async def run_every(interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do something now and then again and again, with a pause after each time."""
    while True:
        await work()
        await trio.sleep(interval_s)


class InFlightCounter:
    """How many pieces of work are under way, and a way to wait until none is."""

    def __init__(self) -> None:
        self.count = 0
        self._empty: trio.Event | None = None

    def __enter__(self) -> None:
        self.increment()

    def __exit__(self, *_: object) -> None:
        self.decrement()

    def increment(self, count: int = 1) -> None:
        """One more, or several; for work that somebody else will end."""
        self.count += count

    def decrement(self, count: int = 1) -> None:
        """One less, or several."""
        self.count -= count
        if not self.count and self._empty is not None:
            self._empty.set()
            self._empty = None

    async def wait_until_empty(self, *, timeout_s: float) -> bool:
        """Wait, for a bounded time; whether nothing is under way then."""
        with trio.move_on_after(timeout_s):
            while self.count:
                if self._empty is None:
                    self._empty = trio.Event()
                await self._empty.wait()
        return self.count == 0


class Backoff:
    """Pauses that double from one failure to the next, up to a bound; a success starts over."""

    def __init__(self, *, initial_s: float, max_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._next_s = initial_s

    def next_pause_s(self) -> float:
        """The pause after one more failure."""
        pause, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return pause

    def reset(self) -> None:
        """Forget the failures."""
        self._next_s = self._initial_s
