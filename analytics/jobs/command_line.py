"""What the jobs' commands have in common: options, progress, errors in words."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

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


class Progress:
    """Lines on standard error about long work: what was done, and how fast."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    def tell(self, text: str, *, samples: int | None = None) -> None:
        """One line; with `samples` also how long it took since the last line, and samples per second."""
        now = time.monotonic()
        took_s, self._last = now - self._last, now
        if samples is not None:
            text += f" in {took_s:.1f} s ({samples / max(took_s, 1e-9):,.0f} samples/s)"
        click.echo(text, file=sys.stderr)

    def end(self, text: str) -> None:
        """The last line."""
        click.echo(f"{text}, {time.monotonic() - self._started:.1f} s altogether", file=sys.stderr)
