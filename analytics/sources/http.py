"""`spark.read.format("prometheus_http")`: samples exactly as a Prometheus server stores them, for backfill.

The API's `query_range` evaluates an expression at steps of its own: it repeats, skips and shifts samples. A range
selector in `/api/v1/query` returns the stored samples themselves, with their own timestamps. (Remote read would, too,
and histograms with their schema; not every store behind such an API supports it.) The API does not return start
timestamps, nor the schema of native histograms, which are therefore refused or skipped.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from analytics.errors import AnalyticsError
from analytics.remote_write.decode import Columns, Counts
from analytics.remote_write.series import Series
from analytics.sources.options import BadOption, Options
from analytics.sources.rows import SCHEMAS, RowBuilder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

OPTIONS = (
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
    "table",
    "replicaLabels",
)
ATTEMPTS_MAX = 5
BACKOFF_S = 1.0
"""Pause before the second attempt; doubled before each further one."""
PARTITIONS_MAX = 100_000
ERROR_BYTES_MAX = 4096
_RETRYABLE_STATUSES = {408, 429, 500, 502, 503, 504}


class QueryFailed(AnalyticsError):
    """A query without an answer, or with an error as the answer."""


@dataclass
class Span(InputPartition):
    """Partition of the samples with start_ms <= timestamp < end_ms."""

    start_ms: int
    end_ms: int


class PrometheusHttp(DataSource):
    """Spark data source `prometheus_http`; `docs/analytics.md` lists its options."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._settings = Settings.parse_options(options)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "prometheus_http"

    def schema(self) -> StructType:
        """Return the schema of the option `table`, the same as the spool's."""
        return SCHEMAS[self._settings.table]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """Return a reader with one query for each step, in the executors."""
        return Reader(self._settings)


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
    table: str
    replica_labels: tuple[str, ...]

    @classmethod
    def parse_options(cls, given: Any) -> Settings:
        """Parse the options from Spark. Raises BadOption."""
        options = Options("prometheus_http", given, OPTIONS)
        settings = cls(
            url=_url(options.text("url")),
            match=options.text("match"),
            start_ms=_moment_ms(options.text("start"), "start"),
            end_ms=_moment_ms(options.text("end"), "end"),
            step_ms=1000 * options.integer("stepSeconds", 3600, least=1, most=86_400),
            bearer_token_file=options.text("bearerTokenFile", "") or None,
            ca_file=options.text("caFile", "") or None,
            timeout_s=options.integer("timeoutSeconds", 120, least=1, most=3600),
            response_bytes_max=options.integer("maxResponseBytes", 256 << 20, least=1, most=4 << 30),
            skip_histograms=options.flag("skipHistograms", default=False),
            table=options.table(),
            replica_labels=options.replica_labels(),
        )
        if settings.start_ms >= settings.end_ms:
            raise BadOption("prometheus_http: start must be before end")
        if (settings.end_ms - settings.start_ms) // settings.step_ms > PARTITIONS_MAX:
            raise BadOption(f"prometheus_http: more than {PARTITIONS_MAX} steps: use a larger stepSeconds")
        return settings


def _url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadOption("prometheus_http: url must be http://… or https://…, up to what /api/v1/query follows")
    if parts.username or parts.password:
        raise BadOption("prometheus_http: no password in url, where plans and logs would show it: use bearerTokenFile")
    return text.rstrip("/")


def _moment_ms(text: str, name: str) -> int:
    """Parse `2026-11-21T08:00:00Z`, or seconds since 1970. Raises BadOption."""
    try:
        return round(float(text) * 1000)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(f"prometheus_http: {name} is {text!r}, and must be a time as 2026-11-21T08:00:00Z") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


class Reader(DataSourceReader):
    """Reader that plans on the driver without a query; the queries run in executors."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each step."""
        settings = self._settings
        starts = range(settings.start_ms, settings.end_ms, settings.step_ms)
        return [Span(start, min(start + settings.step_ms, settings.end_ms)) for start in starts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run one query and yield its rows. Raises QueryFailed."""
        assert isinstance(partition, Span)
        rows = RowBuilder(self._settings.table, self._settings.replica_labels)
        yield from rows.build_batches(_columns(query_samples(self._settings, partition), self._settings, partition))
        yield from rows.build_series_rows()


def query_samples(settings: Settings, span: Span, sleep: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Return the stored samples of a span: the API's `result`. Retries temporary failures; raises QueryFailed."""
    failure = ""
    for attempt in range(ATTEMPTS_MAX):
        if attempt:
            sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            return _parse_result(_fetch(settings, span), settings)
        except urllib.error.HTTPError as error:
            failure = f"{error.code} {error.reason}: {_error_text(error)}"
            if error.code not in _RETRYABLE_STATUSES:
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            failure = str(getattr(error, "reason", None) or error)
    first, last = (datetime.fromtimestamp(ms / 1000, UTC).isoformat() for ms in (span.start_ms, span.end_ms))
    raise QueryFailed(f"{settings.url}: {settings.match} from {first} to {last}: {failure}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, which would send the token to a host that the options do not name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fetch(settings: Settings, span: Span) -> bytes:
    # A selector holds what is after (Prometheus 3) or not before (Prometheus 2) its beginning, and not after its end.
    selector = f"{settings.match}[{span.end_ms - span.start_ms}ms]"
    form = {"query": selector, "time": f"{(span.end_ms - 1) / 1000:.3f}", "timeout": f"{settings.timeout_s}s"}
    request = urllib.request.Request(  # noqa: S310 -- http or https, which the options' validation ensures
        f"{settings.url}/api/v1/query", data=urllib.parse.urlencode(form).encode()
    )
    if settings.bearer_token_file:
        token = Path(settings.bearer_token_file).read_text(encoding="utf-8").strip()
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    context = ssl.create_default_context(cafile=settings.ca_file)
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
    with opener.open(request, timeout=settings.timeout_s + 5) as answer:
        data: bytes = answer.read(settings.response_bytes_max + 1)
    if len(data) > settings.response_bytes_max:
        raise QueryFailed(
            f"{settings.url}: an answer of more than {settings.response_bytes_max} bytes: use a smaller stepSeconds, "
            "a narrower match or a larger maxResponseBytes"
        )
    return data


def _error_text(error: urllib.error.HTTPError) -> str:
    text = error.read(ERROR_BYTES_MAX).decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "no further word"


def _parse_result(data: bytes, settings: Settings) -> list[dict[str, Any]]:
    try:
        answer = json.loads(data)
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
    except (ValueError, KeyError, TypeError):
        raise QueryFailed(f"{settings.url}: what answers there is no Prometheus API") from None
    if kind != "matrix":
        raise QueryFailed(f'{settings.url}: {settings.match!r} must be a plain selector, as {{__name__=~"pulsar_.+"}}')
    return list(result)


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
