"""Commands that bring samples into the tables: `ingest`, `backfill`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from analytics.commands.command_line import (
    job_session,
    keep_spool_option,
    number_option,
    replica_option,
    spool_option,
    tables_option,
)
from analytics.jobs.defaults import BACKFILL_BATCH_HOURS, MAX_BYTES_PER_BATCH
from analytics.jobs.quiet import verbose_option


@click.command("ingest")
@spool_option
@tables_option
@click.option(
    "--follow",
    "follow_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Run forever, polling for new samples this often. Default: ingest what there is, and exit.",
)
@number_option(
    "--max-bytes-per-batch max_bytes",
    click.IntRange(min=1),
    MAX_BYTES_PER_BATCH,
    "Of the spool; it becomes about ten times as much in memory.",
)
@keep_spool_option
@replica_option
@verbose_option
def ingest(**options: Any) -> None:
    """Copy what the receiver stored to the tables."""
    from analytics.jobs import ingest

    with job_session("ingest") as session:
        ingest.run(session, **options)


@click.command("backfill")
@tables_option
@click.option("--url", required=True, help="Of the server, up to what /api/v1/query follows.")
@click.option("--match", required=True, help='A plain selector: {__name__=~"pulsar_proxy_.+"}.')
@click.option("--start", required=True, type=click.DateTime(), help="UTC, included.")
@click.option("--end", required=True, type=click.DateTime(), help="UTC, not included.")
@click.option(
    "--step-seconds",
    "stepSeconds",
    type=click.IntRange(1, 86_400),
    default=3600,
    show_default=True,
    help="Of one query.",
)
@click.option("--batch-hours", type=click.IntRange(1, 24 * 31), default=BACKFILL_BATCH_HOURS, show_default=True)
@click.option("--bearer-token-file", "bearerTokenFile", type=click.Path(), help="The same path on every executor.")
@click.option("--ca-file", "caFile", type=click.Path(), help="Trusted authorities, PEM. Default: the system's.")
@click.option(
    "--skip-histograms", "skipHistograms", is_flag=True, help="Leave native histograms out instead of failing."
)
@replica_option
@verbose_option
def backfill(
    root: str, start: datetime, end: datetime, batch_hours: int, replica_labels: tuple[str, ...], **given: Any
) -> None:
    """Copy what a Prometheus server stores to the tables."""
    from analytics.jobs import backfill
    from analytics.sources.options import BadOption
    from analytics.sources.prometheus import Prometheus

    options = {name: str(value) for name, value in given.items() if value is not None}  # they have the source's names
    options |= {"replicaLabels": ",".join(replica_labels)} if replica_labels else {}
    first, last = start.replace(tzinfo=UTC), end.replace(tzinfo=UTC)
    try:  # before Spark starts, which takes seconds
        Prometheus(options | {"start": first.isoformat(), "end": last.isoformat()})
    except BadOption as error:
        raise click.UsageError(str(error)) from None
    with job_session("backfill") as session:
        backfill.run(session, root, options, start=first, end=last, batch_hours=batch_hours)
