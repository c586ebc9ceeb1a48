"""The copy loop: a blind relay through user space, in both directions (PIP-1, steps 5 and 6).

Each direction ends by itself: its end of file is passed on once everything before it was delivered, and the other
direction goes on until it ends, too (half-close). A side that breaks is not written to any more, but what it sent
before is still delivered to the other side.
"""

import contextlib
from collections.abc import Callable

import trio

CHUNK_BYTES = 65536

Count = Callable[[int], None]


async def copy_streams(
    client: trio.abc.HalfCloseableStream,
    broker: trio.abc.HalfCloseableStream,
    *,
    first_to_broker: bytes,
    first_to_client: bytes,
    half_close_timeout_s: float,
    count_to_broker: Count,
    count_to_client: Count,
    client_read_scope: trio.CancelScope | None = None,
) -> None:
    """Copy bytes until both directions have ended; closes neither stream.

    ``client_read_scope`` is cancelled when nothing more may pass to the broker, which sees no end of stream then.
    ``first_to_broker`` and ``first_to_client`` were read ahead of the relay and are delivered before all else. Memory
    is bounded by one chunk a direction: a side that does not read stops the reading on the other.
    """
    half_close = _HalfClose(half_close_timeout_s)
    async with trio.open_nursery() as nursery:
        half_close.scope = nursery.cancel_scope
        nursery.start_soon(
            _copy_within, client_read_scope, client, broker, first_to_broker, count_to_broker, half_close
        )
        nursery.start_soon(_copy, broker, client, first_to_client, count_to_client, half_close)


class _HalfClose:
    """The idle timeout of a relay: once one direction has ended, the other goes on only as long as its bytes move."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ended = False
        self.scope: trio.CancelScope

    def on_direction_send_eof(self) -> None:
        self._ended = True
        self.on_moved()

    def on_moved(self) -> None:
        if self._ended:
            self.scope.deadline = trio.current_time() + self._timeout_s


async def _copy_within(  # noqa: PLR0917 -- as _copy
    scope: trio.CancelScope | None,
    source: trio.abc.HalfCloseableStream,
    sink: trio.abc.HalfCloseableStream,
    first: bytes,
    count: Count,
    half_close: _HalfClose,
) -> None:
    with scope or trio.CancelScope():
        await _copy(source, sink, first, count, half_close)


async def _copy(
    source: trio.abc.HalfCloseableStream,
    sink: trio.abc.HalfCloseableStream,
    first: bytes,
    count: Count,
    half_close: _HalfClose,
) -> None:
    try:
        if first:
            await sink.send_all(first)
            count(len(first))
        while data := await source.receive_some(CHUNK_BYTES):
            await sink.send_all(data)
            count(len(data))
            half_close.on_moved()
            del data  # a relay that waits keeps none
        await sink.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        # One of the two is gone. Where it is the source, this passes its end on; where it is the sink, this fails and
        # does nothing. What the other direction still holds gets through either way.
        await _send_eof(sink)
    finally:
        half_close.on_direction_send_eof()


async def _send_eof(stream: trio.abc.HalfCloseableStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_eof()
