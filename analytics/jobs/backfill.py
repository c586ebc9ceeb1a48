"""The job `backfill`: copies samples from a Prometheus server to the tables.

For periods without a running receiver. It may be repeated and may overlap with ingested samples: samples that the
tables have are skipped. It runs in batches of some hours, each one change, so a kill loses at most the current batch.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from analytics.jobs.command_line import job_session, replica_option, tables_option
from analytics.jobs.progress import Progress
from analytics.jobs.quiet import verbose_option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH_HOURS = 6


def run(
    spark: SparkSession, root: str, options: dict[str, str], *, start: datetime, end: datetime, batch_hours: int
) -> int:
    """Add the missing samples between start and end; return their number. `options` are the source's."""
    from analytics.jobs.batches import KnownSeries, write_batch
    from analytics.sources.http import PrometheusHttp
    from analytics.tables.store import Tables

    spark.dataSource.register(PrometheusHttp)
    tables = Tables.open(spark, root)
    known, progress = KnownSeries(tables), Progress()
    total, begin = 0, start
    while start < end:
        until = min(start + timedelta(hours=batch_hours), end)
        span = {"start": start.isoformat(), "end": until.isoformat()}
        rows = spark.read.format("prometheus_http").options(**options, **span, table="all").load()
        figures = write_batch(tables, known, rows)
        total += figures.samples
        progress.print_line(
            f"{start:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}: {figures.samples:,} samples, {figures.new_series:,} "
            f"new series, {figures.duplicates:,} were there",
            samples=figures.samples,
            left=progress.remaining_text(
                (until - begin).total_seconds(),
                (end - begin).total_seconds(),
                f"{(end - until).total_seconds() / 3600:.4g} hours left",
            ),
        )
        start = until
    progress.print_summary(f"{total:,} samples added")
    return total


@click.command("backfill")
@tables_option
@click.option("--url", required=True, help="Of the server, up to what /api/v1/query follows.")
@click.option("--match", required=True, help='A plain selector: {__name__=~"pulsar_proxy_.+"}.')
@click.option("--start", required=True, type=click.DateTime(), help="UTC, included.")
@click.option("--end", required=True, type=click.DateTime(), help="UTC, not included.")
@click.option("--step-seconds", type=click.IntRange(1, 86_400), default=3600, show_default=True, help="Of one query.")
@click.option("--batch-hours", type=click.IntRange(1, 24 * 31), default=BATCH_HOURS, show_default=True)
@click.option("--bearer-token-file", type=click.Path(), help="The same path on every executor.")
@click.option("--ca-file", type=click.Path(), help="Trusted authorities, PEM. Default: the system's.")
@click.option("--skip-histograms", is_flag=True, help="Leave native histograms out instead of failing.")
@replica_option
@verbose_option
def command(  # noqa: PLR0917 -- click's manner
    root: str,
    url: str,
    match: str,
    start: datetime,
    end: datetime,
    step_seconds: int,
    batch_hours: int,
    bearer_token_file: str | None,
    ca_file: str | None,
    skip_histograms: bool,  # noqa: FBT001
    replica_labels: tuple[str, ...],
) -> None:
    """Copy what a Prometheus server stores to the tables."""
    from analytics.sources.http import Settings
    from analytics.sources.options import BadOption

    options = {"url": url, "match": match, "stepSeconds": str(step_seconds), "skipHistograms": str(skip_histograms)}
    options |= {"bearerTokenFile": bearer_token_file} if bearer_token_file else {}
    options |= {"caFile": ca_file} if ca_file else {}
    options |= {"replicaLabels": ",".join(replica_labels)} if replica_labels else {}
    first, last = start.replace(tzinfo=UTC), end.replace(tzinfo=UTC)
    try:  # before Spark starts, which takes seconds
        Settings.parse_options(options | {"start": first.isoformat(), "end": last.isoformat()})
    except BadOption as error:
        raise click.UsageError(str(error)) from None
    with job_session("backfill") as session:
        run(session, root, options, start=first, end=last, batch_hours=batch_hours)


if __name__ == "__main__":
    command()
