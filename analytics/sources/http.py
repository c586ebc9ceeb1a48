"""Samples exactly as a Prometheus server stores them.

The API's `query_range` evaluates an expression at steps of its own: it repeats, skips and shifts samples. A range
selector in `/api/v1/query` returns the stored samples themselves, with their own timestamps. The API does not return
start timestamps, nor the schema of native histograms, which are therefore refused or skipped. Remote read has the
histograms, and the external labels that remote write has; not every store behind such an API supports it. Its answer's
series are encoded as remote write's.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql.datasource import InputPartition

from analytics.errors import AnalyticsError
from analytics.remote_write.bounds import CEILING
from analytics.remote_write.decode import Columns, Counts, decode_request
from analytics.remote_write.errors import DecodeError
from analytics.remote_write.series import Series, SeriesTable
from analytics.remote_write.series_interner import SeriesInterner
from analytics.remote_write.snappy import compress, decompress
from analytics.remote_write.splitting import split_request
from analytics.sources.options import BadOption, Options
from analytics.sources.selector import OPERATORS, Matcher

SERVER_OPTIONS = (
    "url",
    "match",
    "start",
    "end",
    "stepSeconds",
    "bearerTokenFile",
    "caFile",
    "timeoutSeconds",
    "maxResponseBytes",
    "skipHistograms",
)
ATTEMPTS_MAX = 5
BACKOFF_S = 1.0
"""Pause before the second attempt; doubled before each further one."""
PARTITIONS_MAX = 100_000
ERROR_BYTES_MAX = 4096
ANSWER_BOUNDS = replace(CEILING, fields=12_000_000)
"""Of remote read's answer to one query; a sample is three fields."""
READ_BYTES = 1 << 20
_RELATIVE = re.compile(r"-(\d{1,6})([smhd])", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_REMOTE_READ = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Read-Version": "0.1.0",
}
_RETRYABLE_STATUSES = {408, 429, 500, 502, 503, 504}


class QueryFailed(AnalyticsError):
    """A query without an answer, or with an error as the answer."""


@dataclass
class Span(InputPartition):
    """Partition of the samples with start_ms <= timestamp < end_ms."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True)
class Settings:
    """Validated options."""

    url: str
    match: str
    start_ms: int
    end_ms: int
    step_ms: int
    bearer_token_file: str | None
    ca_file: str | None
    timeout_s: int
    response_bytes_max: int
    skip_histograms: bool

    @classmethod
    def parse_server(cls, options: Options, match: str, span: Span) -> Settings:
        """Parse what a server is asked for. Raises BadOption."""
        settings = cls(
            url=_url(options.text("url")),
            match=match,
            start_ms=span.start_ms,
            end_ms=span.end_ms,
            step_ms=1000 * options.integer("stepSeconds", 3600, least=1, most=86_400),
            bearer_token_file=options.text("bearerTokenFile", "") or None,
            ca_file=options.text("caFile", "") or None,
            timeout_s=options.integer("timeoutSeconds", 120, least=1, most=3600),
            response_bytes_max=options.integer("maxResponseBytes", 256 << 20, least=1, most=4 << 30),
            skip_histograms=options.flag("skipHistograms", default=False),
        )
        settings.plan(span)
        return settings

    def plan(self, span: Span) -> list[InputPartition]:
        """Return a partition for each step of a span, on the grid of steps from its start. Raises BadOption."""
        starts = range(span.start_ms, span.end_ms, self.step_ms)
        if len(starts) > PARTITIONS_MAX:
            raise BadOption(f"{self.url}: more than {PARTITIONS_MAX} steps: use a larger stepSeconds")
        return [Span(start, min(start + self.step_ms, span.end_ms)) for start in starts]


def _url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadOption("url must be http://… or https://…, up to what /api/v1/query follows")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadOption("no password or query in url, where plans and logs would show it: use bearerTokenFile")
    return text.rstrip("/")


def parse_span(options: Options, start: str | None = None, end: str | None = None) -> Span:
    """Parse the options `start` and `end`, with these defaults. Raises BadOption."""
    span = Span(_moment_ms(options.text("start", start), "start"), _moment_ms(options.text("end", end), "end"))
    if span.start_ms >= span.end_ms:
        raise BadOption("start must be before end")
    return span


def _moment_ms(text: str, name: str) -> int:
    """Parse `2026-11-21T08:00:00Z`, seconds since 1970, or `-6h`, a time before now. Raises BadOption."""
    if before := _RELATIVE.fullmatch(text):
        return round((time.time() - int(before[1]) * _UNIT_S[before[2]]) * 1000)
    try:
        try:
            return round(float(text) * 1000)
        except ValueError:
            moment = datetime.fromisoformat(text)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise BadOption(f"{name} is {text!r}, and must be a time as 2026-11-21T08:00:00Z, or -6h") from None


def query_samples(settings: Settings, span: Span, sleep: Callable[[float], None] = time.sleep) -> Columns:
    """Return the stored samples of a span from the API. Retries temporary failures; raises QueryFailed."""
    # A selector holds what is after (Prometheus 3) or not before (Prometheus 2) its beginning, and not after its end.
    selector = f"{settings.match}[{span.end_ms - span.start_ms}ms]"
    form = {"query": selector, "time": f"{(span.end_ms - 1) / 1000:.3f}", "timeout": f"{settings.timeout_s}s"}
    request = urllib.request.Request(  # noqa: S310 -- http or https, which the options' validation ensures
        f"{settings.url}/api/v1/query", data=urllib.parse.urlencode(form).encode()
    )
    result = _parse_result(_ask(settings, span, request, sleep), settings)
    try:
        return _columns(result, settings, span)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise QueryFailed(f"{settings.url}: an answer whose series are not those of a Prometheus API") from None


def read_samples(
    settings: Settings, matchers: tuple[Matcher, ...], span: Span, sleep: Callable[[float], None] = time.sleep
) -> Columns:
    """Return the stored samples and histograms of a span by remote read. Retries; raises QueryFailed."""
    matching = b"".join(
        _bytes_field(
            3, bytes([0x08, OPERATORS.index(op)]) + _bytes_field(2, name.encode()) + _bytes_field(3, value.encode())
        )
        for name, op, value in matchers
    )
    query = b"\x08" + _varint(span.start_ms) + b"\x10" + _varint(span.end_ms - 1) + matching
    request = urllib.request.Request(  # noqa: S310 -- as above
        f"{settings.url}/api/v1/read", data=compress(_bytes_field(1, query)), headers=_REMOTE_READ
    )
    answer = _ask(settings, span, request, sleep)
    interner = SeriesInterner(SeriesTable(), ANSWER_BOUNDS)
    try:
        # A response's only field is its queries' results, and a result's only one its series: as a request's.
        results = split_request(decompress(answer, settings.response_bytes_max), 1, replace(ANSWER_BOUNDS, series=1))
        found = decode_request(b"".join(results.timeseries), 1, interner)
    except DecodeError as error:
        raise QueryFailed(f"{settings.url}: its answer cannot be read ({error}): use a smaller stepSeconds") from None
    if found.faults:
        raise QueryFailed(f"{settings.url}: a series of its answer is invalid: {next(iter(found.faults.values()))}")
    columns = (interner.table.series(), found.series, found.ts_ms, found.start_ts_ms, found.value)
    return Columns(*columns, found.histograms, found.counts)


def _ask(settings: Settings, span: Span, request: urllib.request.Request, sleep: Callable[[float], None]) -> bytes:
    """Return the body of the answer. Retries temporary failures; raises QueryFailed."""
    failure = ""
    for attempt in range(ATTEMPTS_MAX):
        if attempt:
            sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            return _fetch(settings, request)
        except urllib.error.HTTPError as error:
            failure = f"{error.code} {error.reason}: {_error_text(error, settings)}"
            if error.code not in _RETRYABLE_STATUSES:
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            failure = str(getattr(error, "reason", None) or error)
    first, last = (datetime.fromtimestamp(ms / 1000, UTC).isoformat() for ms in (span.start_ms, span.end_ms))
    raise QueryFailed(f"{settings.url}: {settings.match} from {first} to {last}: {failure}")


def _varint(value: int) -> bytes:
    parts = [value >> shift & 0x7F | 0x80 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*parts[:-1], parts[-1] & 0x7F])


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, which would send the token to a host that the options do not name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch(settings: Settings, request: urllib.request.Request) -> bytes:
    if settings.bearer_token_file:
        token = Path(settings.bearer_token_file).read_text(encoding="utf-8").strip()
        if not token.isprintable() or not token.isascii():  # http.client's own error would show it
            raise QueryFailed(f"{settings.bearer_token_file} has no token of one line of ASCII")
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    context = ssl.create_default_context(cafile=settings.ca_file)
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=settings.timeout_s + 5) as answer:
        data = _read_at_most(answer, settings.response_bytes_max + 1, settings)
    if len(data) > settings.response_bytes_max:
        raise QueryFailed(
            f"{settings.url}: an answer of more than {settings.response_bytes_max} bytes: use a smaller stepSeconds, "
            "a narrower match or a larger maxResponseBytes"
        )
    if answer.length:  # None: it has no length
        raise ConnectionResetError("an answer that was cut off")
    return data


def _read_at_most(answer: Any, size: int, settings: Settings) -> bytes:
    """Read a body up to a size. Raises TimeoutError: the socket's own timeout begins again with each byte."""
    data, until = bytearray(), time.monotonic() + settings.timeout_s + 5
    while len(data) < size and (part := answer.read1(min(size - len(data), READ_BYTES))):
        data += part
        if time.monotonic() > until:
            raise TimeoutError(f"an answer that is not complete after {settings.timeout_s + 5} s")
    return bytes(data)


def _error_text(error: urllib.error.HTTPError, settings: Settings) -> str:
    try:
        text = _read_at_most(error, ERROR_BYTES_MAX, settings).decode(errors="replace")
    except OSError:
        text = ""
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.strip()[:200] or "no further word"


def _parse_result(data: bytes, settings: Settings) -> list[dict[str, Any]]:
    try:
        answer = json.loads(data)
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise QueryFailed(f"{settings.url}: what answers there is no Prometheus API") from None
    if kind != "matrix":
        raise QueryFailed(f'{settings.url}: {settings.match!r} must be a plain selector, as {{__name__=~"pulsar_.+"}}')
    if not isinstance(result, list) or not all(isinstance(series, dict) for series in result):
        raise QueryFailed(f"{settings.url}: an answer whose result is no list of series")
    return result


def _columns(result: list[dict[str, Any]], settings: Settings, span: Span) -> Columns:
    if not settings.skip_histograms and any(series.get("histograms") for series in result):
        raise QueryFailed(
            f"{settings.url}: {settings.match} has native histograms, whose schema the API does not return: exclude "
            "them by the selector, or set skipHistograms to leave them out"
        )
    points = [
        (number, round(float(at) * 1000), float(value))
        for number, series in enumerate(result)
        for at, value in series.get("values", ())
    ]
    if not all(isinstance(value, str) for series in result for value in series["metric"].values()):
        raise TypeError("a label's value is no text")
    number, ts_ms, values = (np.array([point[i] for point in points]) for i in range(3))
    inside = (ts_ms >= span.start_ms) & (ts_ms < span.end_ms)
    return Columns(
        series=[Series(tuple(sorted(series["metric"].items())), None) for series in result],
        sample_series=number.astype(np.int64)[inside],
        sample_ts_ms=ts_ms.astype(np.int64)[inside],
        sample_start_ts_ms=np.zeros(int(inside.sum()), np.int64),
        sample_value=values.astype(np.float64)[inside],
        histograms=[],
        counts=Counts(),
    )
