"""From a body to what is committed. What is small is decoded at once, all else in a thread, so that others are served.

A thread for each request would cost some per cent of all that the receiver can do, and the decoder's time is not in its
bytes: so a request is first decoded within narrow bounds (INLINE), which a usual one is far from, and within which none
takes much longer than a usual one. One that is beyond them goes to the thread, with the bounds of the configuration.
"""

import contextlib
from dataclasses import dataclass

import trio

from analytics.receiver.config import Limits
from analytics.receiver.metrics import Metrics
from analytics.receiver.turns import Turns
from analytics.remote_write.bounds import Bounds
from analytics.remote_write.checking import Checker
from analytics.remote_write.decode import Request, decode_request
from analytics.remote_write.errors import BoundError
from analytics.remote_write.snappy import compress, decompress, decompressed_length
from analytics.remote_write.splitting import without_series
from proxy.common.networks import network_of

INLINE_BYTES_MAX = 512 * 1024
INLINE = Bounds(series=10_000, fields=100_000, series_fields=100, symbols=30_000, histograms=100, buckets=10_000)
INTERNED_MAX = 300_000
INTERNED_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True)
class Parsed:
    """A request that was checked; `body` is as it is committed, and empty if no series of it can be accepted."""

    request: Request
    body: bytes
    decompressed_bytes: int


class Parser:
    """Decodes requests: one at a time here, and one in the thread, for which senders take turns."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._bytes_max = limits.max_decompressed_bytes
        self._metrics = metrics
        self._bounds = limits.bounds()
        self._inline_bounds = self._bounds.at_most(INLINE)
        self._checker = Checker(self._bounds)
        self._thread_checker = Checker(self._bounds)  # a checker is one thread's
        self._turns = Turns(limits.decode_timeout_ms / 1000)

    async def parse(self, version: int, body: bytes, address: str) -> Parsed:
        """Check a request; raises DecodeError, and WaitedTooLongError if it may be sent again later."""
        if decompressed_length(body) <= INLINE_BYTES_MAX:
            with contextlib.suppress(BoundError):
                return self._parse(version, body, self._checker, self._inline_bounds)
        async with self._turns.turn(network_of(address)):
            self._metrics.large_requests.inc()
            return await trio.to_thread.run_sync(self._parse, version, body, self._thread_checker, self._bounds)

    def _parse(self, version: int, body: bytes, checker: Checker, bounds: Bounds) -> Parsed:
        if len(checker) > INTERNED_MAX or checker.held_bytes > INTERNED_BYTES_MAX:
            checker.forget()
        raw = decompress(body, self._bytes_max)
        request = decode_request(raw, version, checker, bounds)
        if request.faults:
            rest = without_series(raw, version, set(request.faults), bounds)
            body = compress(rest) if request.counts.samples + request.counts.histograms else b""
        return Parsed(request, body, len(raw))
