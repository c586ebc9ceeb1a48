"""Common parts of the jobs' commands: options, the Spark session, error messages."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from analytics.jobs.defaults import KEEP_SPOOL_FOREVER, KEEP_SPOOL_HOURS, LATENESS_HOURS, SILENT_HOURS
from analytics.jobs.progress import heartbeats
from analytics.report.prices import BadPrices, Prices, read_prices

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The last line of a traceback: our exceptions with a module, built-in ones without. Java's have dots, and are not the
# cause.
_PYTHON_EXCEPTION = re.compile(r"(?:analytics\.[\w.]*\.(?=\w+:)|(?=\w+Error:))(?P<name>\w+): (?P<said>.+)")

STDERR_FILENO: Final = 2
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells report it."""


def number_option(names: str, type_: click.ParamType[Any], default: float, text: str) -> Callable[[Any], Any]:
    """Return an option of a number that has a default. `names`: the option's, and the parameter's if it is another."""
    return click.option(*names.split(), type=type_, default=default, show_default=True, help=text)


tables_option = click.option(
    "--tables",
    "root",
    required=True,
    metavar="PATH",
    help="Root of the tables: any Hadoop path (file:///data/metrics, hdfs://…, s3a://bucket/metrics).",
)
spool_option: Final = click.option(
    "--spool", required=True, type=click.Path(exists=True, file_okay=False), help="The receiver's spool directory."
)
keep_spool_option: Final = number_option(
    "--keep-spool-hours keep_hours",
    click.IntRange(min=KEEP_SPOOL_FOREVER),
    KEEP_SPOOL_HOURS,
    "Remove spool segments that are in the tables after this time; -1: never.",
)
lateness_option: Final = number_option(
    "--lateness-hours",
    click.FloatRange(min=0),
    LATENESS_HOURS,
    "An hour closes when all instances have samples from this long after its end. Later ones are left out.",
)
silent_option: Final = number_option(
    "--silent-hours",
    click.FloatRange(min=0),
    SILENT_HOURS,
    "An instance that sent nothing for this long, while others of its cluster did, is gone.",
)
jobs_option: Final = click.option(
    "--job",
    "jobs",
    multiple=True,
    metavar="NAME",
    help="Scrape jobs (label `job`) whose counters are billed; may be repeated. "
    "Default: proxy, pulsar-proxy and pulsar-trio-proxy.",
)


def _read_prices(_context: click.Context, _option: click.Parameter, path: Path | None) -> Prices | None:
    try:
        return None if path is None else read_prices(path)
    except BadPrices as error:
        raise click.BadParameter(str(error)) from error


prices_option: Final = click.option(
    "--prices",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_read_prices,
    metavar="FILE",
    help="Prices, tenants and budgets (TOML): the page has costs then.",
)

replica_option: Final = click.option(
    "--replica-label",
    "replica_labels",
    multiple=True,
    metavar="NAME",
    help="A label that only distinguishes two Prometheus servers; may be repeated. "
    "Default: prometheus_replica and __replica__.",
)


@contextmanager
def job_session(name: str) -> Iterator[SparkSession]:
    """Run the block with a Spark session, heartbeats on the console, and errors as messages."""
    from analytics.jobs.session import spark_session

    with errors_as_messages():
        session = spark_session(f"pulsar-proxy-analytics {name}")
        with ending_at_interrupt(), heartbeats(session):
            yield session


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """End the process at Ctrl-C at once, with status 130, as a kill may; the JVM ends with it.

    PySpark's own handler calls the JVM in the middle of another call to it, and prints tracebacks of that.
    """

    def end(_number: int, _frame: object) -> None:
        # Not by CONSOLE: the interrupted code may hold its lock.
        os.write(STDERR_FILENO, b"\nstopped; what is committed stays, and the next run does the rest\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def errors_as_messages(before: str = "") -> Iterator[None]:
    """Turn errors that an operator can act on into a line that begins with `before`, and exit status 1."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from analytics.jobs.batches import TooManyHours
    from analytics.jobs.usage import CannotReopen
    from analytics.sources.spool import LostSegments
    from analytics.spool.records import SpoolError
    from analytics.tables.errors import TablesError

    known = (TablesError, SpoolError, LostSegments, TooManyHours, CannotReopen)
    try:
        yield
    except known as error:
        raise click.ClickException(before + str(error)) from error
    except PySparkException as error:
        raise click.ClickException(before + spark_reason(str(error))) from error
    except Py4JJavaError as error:
        raise click.ClickException(before + spark_reason(str(error.java_exception.toString()))) from error


def spark_reason(text: str) -> str:
    """Return the cause in Spark's message: the last Python exception in it, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    python = [match for line in lines if (match := _PYTHON_EXCEPTION.fullmatch(line))]
    if python:
        return f"{python[-1]['name']}: {python[-1]['said']}"
    return lines[0] if lines else "Spark said nothing"


def check_output(option: str, output: str) -> None:
    """Raise click.UsageError if a local page's directory is not there."""
    if ":/" not in output and not (directory := Path(output).absolute().parent).is_dir():
        raise click.UsageError(f"{option}: there is no directory {directory}")
