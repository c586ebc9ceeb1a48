"""Checks a request's body before it is committed: small requests in the event loop, large ones in a thread.

A thread for each request would cost some per cent of the receiver's throughput, and a body's size does not predict its
decoding time. So each request is first decoded within narrow bounds (INLINE_BOUNDS), far above a usual request's, that
keep the time near a usual request's. A request beyond them is decoded in a thread, within the configured bounds.
"""

import contextlib
from dataclasses import dataclass

import trio

from analytics.receiver.config import Limits
from analytics.receiver.fair_lock import FairLock
from analytics.receiver.metrics import Metrics
from analytics.remote_write.bounds import Bounds
from analytics.remote_write.decode import DecodedRequest, decode_request
from analytics.remote_write.errors import BoundError
from analytics.remote_write.series_validator import SeriesValidator
from analytics.remote_write.snappy import compress, decompress, decompressed_length
from analytics.remote_write.splitting import remove_series
from proxy.common.networks import network_of

INLINE_BYTES_MAX = 512 * 1024
INLINE_BOUNDS = Bounds(series=10_000, fields=100_000, series_fields=100, symbols=30_000, histograms=100, buckets=10_000)
CACHE_ENTRIES_MAX = 300_000
CACHE_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request. `body` is what to commit; empty if none of its series can be accepted."""

    request: DecodedRequest
    body: bytes
    decompressed_bytes: int


class RequestParser:
    """Decoder of write requests: one at a time in the event loop and one in a thread, shared fairly by senders."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._bytes_max = limits.max_decompressed_bytes
        self._metrics = metrics
        self._bounds = limits.bounds()
        self._inline_bounds = self._bounds.limited_by(INLINE_BOUNDS)
        self._checker = SeriesValidator(self._bounds)
        self._thread_checker = SeriesValidator(self._bounds)  # validators are not thread-safe
        self._thread_lock = FairLock(limits.decode_timeout_ms / 1000)

    async def parse_body(self, version: int, body: bytes, address: str) -> ParsedRequest:
        """Decode and check a request. Raises DecodeError, and LockTimeoutError if the request may be sent again."""
        if decompressed_length(body) <= INLINE_BYTES_MAX:
            with contextlib.suppress(BoundError):
                return self._decode(version, body, self._checker, self._inline_bounds)
        async with self._thread_lock.hold_for(network_of(address)):
            self._metrics.large_requests.inc()
            return await trio.to_thread.run_sync(self._decode, version, body, self._thread_checker, self._bounds)

    def _decode(self, version: int, body: bytes, checker: SeriesValidator, bounds: Bounds) -> ParsedRequest:
        if len(checker) > CACHE_ENTRIES_MAX or checker.cached_bytes > CACHE_BYTES_MAX:
            checker.clear_caches()
        raw = decompress(body, self._bytes_max)
        request = decode_request(raw, version, checker, bounds)
        if request.faults:
            rest = remove_series(raw, version, set(request.faults), bounds)
            body = compress(rest) if request.counts.samples + request.counts.histograms else b""
        return ParsedRequest(request, body, len(raw))
