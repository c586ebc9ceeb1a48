"""What the jobs' commands have in common: options, the session, errors in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# As a traceback ends: ours with their module, built-in ones without. Java's have dots, and are not the cause.
_PYTHON_EXCEPTION = re.compile(r"(?:analytics\.[\w.]*\.(?=\w+:)|(?=\w+Error:))(?P<name>\w+): (?P<said>.+)")

tables_option = click.option(
    "--tables",
    "root",
    required=True,
    metavar="PATH",
    help="Where the tables are: any Hadoop path (file:///data/metrics, hdfs://…, s3a://bucket/metrics).",
)


def replica_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--replica-label`, as often as needed."""
    return click.option(
        "--replica-label",
        "replica_labels",
        multiple=True,
        metavar="NAME",
        help="A label that only tells two Prometheus servers apart; may be repeated. "
        "Default: prometheus_replica and __replica__.",
    )(function)


@contextmanager
def job(name: str) -> Iterator[SparkSession]:
    """Give the job of this name a session, with signs of life while it works; errors are told in words."""
    from analytics.jobs.progress import heartbeats
    from analytics.jobs.session import spark_session

    with errors_in_words():
        session = spark_session(f"pulsar-proxy-analytics {name}")
        with heartbeats(session):
            yield session


@contextmanager
def errors_in_words() -> Iterator[None]:
    """An error that an operator can do something about becomes one line and exit status 1, without a stack trace."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from analytics.spool.records import SpoolError
    from analytics.tables.commits import BrokenCommit, ChangedMeanwhile
    from analytics.tables.filesystem import FilesystemError
    from analytics.tables.manifest import NewerTables
    from analytics.tables.store import NoSnapshot, NoTables

    known = (FilesystemError, NewerTables, NoTables, NoSnapshot, BrokenCommit, ChangedMeanwhile, SpoolError)
    try:
        yield
    except known as error:
        raise click.ClickException(str(error)) from error
    except PySparkException as error:
        raise click.ClickException(spark_reason(str(error))) from error
    except Py4JJavaError as error:
        raise click.ClickException(spark_reason(str(error.java_exception.toString()))) from error


def spark_reason(text: str) -> str:
    """Of what Spark says, the part that names the cause: the last Python exception in it, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    python = [match for line in lines if (match := _PYTHON_EXCEPTION.fullmatch(line))]
    if python:
        return f"{python[-1]['name']}: {python[-1]['said']}"
    return lines[0] if lines else "Spark said nothing"
