"""Small helpers for Trio: closing streams, repeated work, counting work in flight, backoff."""

from collections.abc import Awaitable, Callable

import trio

from proxy.runtime.loop.tcp_stream import TcpStream


def seconds(milliseconds: int) -> float:
    """Convert milliseconds, as in the configuration, to seconds, as Trio wants them."""
    return milliseconds / 1000


def ignore(*_args: object) -> None:
    """Do nothing: a callback that is not set, or that is dropped since it leads back to what is over."""


async def close_gracefully(stream: trio.abc.HalfCloseableStream, *, linger_s: float = 1.0) -> None:
    """Close a stream so that the peer can read what was sent last, as ``read_to_the_end`` has it."""
    await read_to_the_end(stream, linger_s)
    await trio.aclose_forcefully(stream)


async def read_to_the_end(stream: trio.abc.HalfCloseableStream, linger_s: float) -> None:
    """End our direction, then read and drop what still comes for at most ``linger_s`` seconds; the stream stays open.

    To close a socket with unread input makes the kernel send a reset, and a reset makes the peer's kernel drop what it
    has not read yet: the very error that explains the close.
    """
    with trio.move_on_after(linger_s):
        try:
            await stream.send_eof()
            while await stream.receive_some(65536):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass


def close_socket_now(stream: trio.abc.AsyncResource) -> bool:
    """Close a stream that is a plain socket, without waiting; return True if it was one."""
    if isinstance(stream, TcpStream):
        stream.close_now()
        return True
    return False


async def close_forcefully(stream: trio.abc.AsyncResource) -> None:
    """Close a stream at once, even when cancelled. A plain socket needs no scope, shield or checkpoint."""
    if close_socket_now(stream):
        return
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)


async def run_every(interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Call ``work`` until cancelled, with a pause of ``interval_s`` seconds after each call."""
    while True:
        await work()
        await trio.sleep(interval_s)


class InFlightCounter:
    """A counter of work in flight, with a way to wait until there is none. As a context it counts one."""

    def __init__(self) -> None:
        self.count = 0
        self._empty: trio.Event | None = None

    def __enter__(self) -> None:
        self.increment()

    def __exit__(self, *_: object) -> None:
        self.decrement()

    def increment(self, count: int = 1) -> None:
        """Count work that starts; ``decrement`` must follow, from any task."""
        self.count += count

    def decrement(self, count: int = 1) -> None:
        """Count work that has ended."""
        self.count -= count
        if not self.count and self._empty is not None:
            self._empty.set()
            self._empty = None

    async def wait_until_empty(self, *, timeout_s: float) -> bool:
        """Wait until nothing is in flight, at most ``timeout_s`` seconds; return True if nothing is."""
        with trio.move_on_after(timeout_s):
            while self.count:
                if self._empty is None:
                    self._empty = trio.Event()
                await self._empty.wait()
        return self.count == 0


class Backoff:
    """Exponential backoff: pauses that double from one failure to the next, up to ``max_s`` seconds."""

    def __init__(self, *, initial_s: float, max_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._next_s = initial_s

    def next_pause_s(self) -> float:
        """Return the pause after one more failure."""
        pause, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return pause

    def reset(self) -> None:
        """Start again with the initial pause, after a success."""
        self._next_s = self._initial_s
