"""Spark's own log is off by default: the console has only the job's lines, and what Python workers report.

A log configuration of the user's stays in force: nothing is changed if spark-submit started the JVM, or if Spark's
configuration directory has a log4j2.properties. `--verbose` leaves the log as Spark has it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIGURATION: Final = Path(__file__).with_name("quiet.log4j2.properties")
_VERBOSE: Final = "analytics.verbose"
_OPTIONS: Final = "SPARK_SUBMIT_OPTS"


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--verbose`."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 -- click's signature
        context.meta[_VERBOSE] = value

    return click.option(
        "--verbose", is_flag=True, expose_value=False, callback=remember, help="Show Spark's own log as well."
    )(function)


def is_verbose() -> bool:
    """Return True if the running command has `--verbose`, and outside of a command."""
    context = click.get_current_context(silent=True)
    return context is None or bool(context.meta.get(_VERBOSE))


@contextmanager
def log_off() -> Iterator[None]:
    """Give the JVM that the block starts a configuration without a log, unless the user has one or wants the log."""
    home, before = os.environ.get("SPARK_HOME"), os.environ.get(_OPTIONS)
    directory = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    asked = any("log4j" in os.environ.get(name, "") for name in (_OPTIONS, "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"))
    asked |= directory is not None and Path(directory, "log4j2.properties").exists()
    if asked or is_verbose() or "PYSPARK_GATEWAY_PORT" in os.environ:
        yield
        return
    os.environ[_OPTIONS] = f"{before or ''} -Dlog4j2.configurationFile={CONFIGURATION.as_uri()}".strip()
    try:
        yield
    finally:
        del os.environ[_OPTIONS]
        os.environ |= {_OPTIONS: before} if before is not None else {}
