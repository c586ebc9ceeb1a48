"""POST /api/v1/write: authenticates, limits, checks and commits one remote-write request.

The response is 2xx only for requests that are on the disk. Requests that can never be accepted get a 4xx, since senders
do not retry those; requests that may succeed later get 429 or 503 with Retry-After. Of a request with some invalid
series the valid ones are committed, and the response is 400 with the number of samples written (the specification's
partial write).
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

import trio

from analytics.receiver.config import Limits
from analytics.receiver.fair_lock import LockTimeoutError
from analytics.receiver.group_commit import GroupCommit, NotCommittedError
from analytics.receiver.http_server import Headers, RequestHead, Response
from analytics.receiver.metrics import Metrics
from analytics.receiver.request_parser import ParsedRequest, RequestParser
from analytics.receiver.tokens import Digests
from analytics.remote_write.decode import Counts
from analytics.remote_write.errors import BoundError, BoundFault, DecodeError, TooLargeError
from analytics.remote_write.negotiation import UnsupportedError, protocol_version
from analytics.spool.records import pack_record
from proxy.common.bearer_tokens import is_authorized
from proxy.common.logs import get_logger
from proxy.common.reloading_file import ReloadingFile

PATH = "/api/v1/write"
RETRY_AFTER_S = {"slow": 5, "full": 30, "failed": 30, "busy": 5}
FAULTS_REPORTED_MAX = 3

_DIGITS_MAX = 19
_NOTHING = Counts()


class TokenBucket:
    """Token bucket of one second's capacity. A request may overdraw it; then all wait until the debt is repaid.

    So a single request larger than the bucket is accepted, and the long-term rate still holds. A rate of 0 means no
    limit.
    """

    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._level = float(per_second)
        self._at = clock()

    def wait_s(self) -> float:
        """Return the seconds until the next request is allowed; 0 means now."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._level = min(self._per_second, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, -self._level / self._per_second)

    def withdraw(self, amount: int) -> None:
        """Withdraw tokens, even more than there are."""
        if self._per_second:
            self._level -= amount


class _Rejection(Exception):
    """A response other than 2xx. `written`: the counts of what was committed nevertheless."""

    def __init__(self, reason: str, status: int, text: str, *, wait_s: int = 0, written: Counts = _NOTHING) -> None:
        super().__init__(text)
        headers = [("Retry-After", str(wait_s))] if wait_s else []
        self.response = Response(status, text, headers, reason)
        self.written = written


def _retry_later(reason: str) -> _Rejection:
    return _Rejection(reason, 503, _PUBLIC_REASONS[reason], wait_s=RETRY_AFTER_S[reason])


class WriteEndpoint:
    """Endpoint of the senders' listener: remote write."""

    def __init__(
        self,
        commit: GroupCommit,
        tokens: ReloadingFile[Digests] | None,
        limits: Limits,
        metrics: Metrics,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.body_bytes_max = limits.max_compressed_bytes
        self.authenticates = tokens is not None
        self._commit = commit
        self._tokens = tokens
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._parser = RequestParser(limits, metrics)
        self._samples_bucket = TokenBucket(limits.max_samples_per_second, clock)
        self._bytes_bucket = TokenBucket(limits.max_bytes_per_second, clock)

    # ---- before the body

    async def check_head(self, head: RequestHead) -> Response | None:
        """Check a request before its body is read: authentication, path, method, content type and length.

        Return None to read the body, or a response, after which the connection is closed.
        """
        if self._tokens is not None and not await self._is_authorized(self._tokens, head):
            return Response(401, "a bearer token is needed", [("WWW-Authenticate", "Bearer")])
        if head.path != PATH:
            return Response(404, f"remote write is at {PATH}")
        if head.method != "POST":
            return Response(405, "remote write is by POST", [("Allow", "POST")])
        try:
            _protocol_version(head)
        except UnsupportedError as error:
            return Response(415, str(error))
        length = head.header("content-length")[:_DIGITS_MAX]
        if length.isdecimal() and int(length) > self.body_bytes_max:
            return Response(413, f"the body is larger than {self.body_bytes_max} bytes")
        return None

    async def _is_authorized(self, tokens: ReloadingFile[Digests], head: RequestHead) -> bool:
        return is_authorized(head.headers.get(b"authorization", b""), await tokens.current_value())

    def on_refusal(self, head: RequestHead | None, response: Response) -> Response:
        """Account for a response sent without the body (`head` is None for malformed HTTP); return it as to be sent."""
        try:
            version = None if head is None else _protocol_version(head)
        except UnsupportedError:
            version = None
        return self._accounted(response, version, head.address if head is not None else "")

    def _accounted(self, response: Response, version: int | None, address: str, written: Counts = _NOTHING) -> Response:
        """Count a response, log a refusal, and return the response with 2.0's headers."""
        if response.status != HTTPStatus.NO_CONTENT:
            self._metrics.rejected.labels(response.reason or _REASON_BY_STATUS.get(response.status, "other")).inc()
            get_logger().warning("refused a request", sender=address, status=response.status, reason=response.body)
        self._metrics.requests.labels(str(version or "unknown"), str(response.status)).inc()
        return Response(response.status, response.body, response.headers + _written_headers(version, written))

    # ---- with the body

    async def respond(self, head: RequestHead, body: bytes) -> Response:
        """Commit a write request and return 204, or the response that says why not."""
        version, started_at = _protocol_version(head), self._clock()
        try:
            response, written = Response(204), await self._commit_body(version, body, head.address)
        except _Rejection as rejection:
            response, written = rejection.response, rejection.written
        self._metrics.request_seconds.observe(self._clock() - started_at)
        return self._accounted(response, version, head.address, written)

    async def _commit_body(self, version: int, body: bytes, address: str) -> Counts:
        """Check and commit a body; return the counts of what was written. Raises _Rejection."""
        wait_s = max(self._samples_bucket.wait_s(), self._bytes_bucket.wait_s())
        if wait_s > 0:
            raise _Rejection("rate", 429, "too much is sent at a time", wait_s=math.ceil(wait_s))
        self._bytes_bucket.withdraw(len(body))
        parsed = await self._parse(version, body, address)
        faults, counts = parsed.request.faults, parsed.request.counts
        self._samples_bucket.withdraw(counts.samples + counts.histograms)
        if not parsed.body:
            raise _Rejection("faulty", 400, _faults_text(faults, counts))
        try:
            await self._commit.commit_record(pack_record(version, time.time_ns() // 1_000_000, parsed.body))
        except NotCommittedError as error:
            raise _retry_later(error.reason) from None
        self._count_committed(version, len(body), parsed)
        if faults:
            raise _Rejection("partly_faulty", 400, _faults_text(faults, counts), written=counts)
        return counts

    async def _parse(self, version: int, body: bytes, address: str) -> ParsedRequest:
        """Decode and check a request, and count what exceeds a bound. Raises _Rejection."""
        try:
            parsed = await self._parser.parse_body(version, body, address)
        except TooLargeError as error:
            raise _Rejection("too_large", 413, str(error)) from None
        except BoundError as error:
            self._metrics.beyond_bounds.labels(error.bound).inc()
            raise _Rejection("beyond_bound", 400, str(error)) from None
        except DecodeError as error:
            raise _Rejection("malformed", 400, str(error)) from None
        except LockTimeoutError:
            raise _retry_later("busy") from None
        faults = parsed.request.faults
        self._metrics.faulty_series.inc(len(faults))
        for bound, count in Counter(one.bound for one in faults.values() if isinstance(one, BoundFault)).items():
            self._metrics.beyond_bounds.labels(bound).inc(count)
        return parsed

    def _count_committed(self, version: int, compressed_bytes: int, parsed: ParsedRequest) -> None:
        metrics, counts, label = self._metrics, parsed.request.counts, str(version)
        metrics.samples.labels(label).inc(counts.samples)
        metrics.histograms.labels(label).inc(counts.histograms)
        metrics.exemplars.labels(label).inc(counts.exemplars)
        metrics.compressed_bytes.labels(label).inc(compressed_bytes)
        metrics.decompressed_bytes.labels(label).inc(parsed.decompressed_bytes)


_REASON_BY_STATUS = {401: "unauthorized", 413: "too_large", 415: "unsupported", 503: "late"}

_PUBLIC_REASONS = {
    "slow": "the disk does not keep up; send it again later",
    "full": "there is no room in the spool; send it again later",
    "failed": "the spool cannot be written to; send it again later",
    "busy": "large requests are decoded one at a time, and this one waited too long; send it again later",
}
"""Texts for senders by reason; paths and causes are only in the log."""


def _protocol_version(head: RequestHead) -> int:
    return protocol_version(head.header("content-type"), head.header("content-encoding"))


def _written_headers(version: int | None, counts: Counts) -> Headers:
    """Return 2.0's headers, which every response to a 2.0 request has."""
    if version != 2:  # noqa: PLR2004 -- the protocol's
        return []
    numbers = {"Samples": counts.samples, "Histograms": counts.histograms, "Exemplars": counts.exemplars}
    return [(f"X-Prometheus-Remote-Write-{name}-Written", str(number)) for name, number in numbers.items()]


def _faults_text(faults: dict[int, str], counts: Counts) -> str:
    """Return which series are invalid and why, without their labels, since senders log responses."""
    shown = [f"series {place}: {why}" for place, why in sorted(faults.items())[:FAULTS_REPORTED_MAX]]
    written = f"{counts.samples} samples and {counts.histograms} histograms of the others were written"
    return f"{len(faults)} series cannot be accepted, {written}; {'; '.join(shown)}"
