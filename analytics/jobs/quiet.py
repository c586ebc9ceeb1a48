"""Filter of Spark's own output, on by default: the console has only the job's lines.

Two sources write there: Spark's log, which gets a configuration of ours, and the JVM itself, which warns of modules
that Spark's own launcher requests; no option turns that off, so the JVM's standard error is read, and known noise
dropped. Everything else is copied: Python workers' reports of damaged records come this way, too.

A log configuration of the user's stays in force: nothing is changed if spark-submit started the JVM, or if Spark's
configuration directory has a log4j2.properties. `--verbose` turns the filter off.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from py4j.java_gateway import JavaGateway

CONFIGURATION: Final = Path(__file__).with_name("quiet.log4j2.properties")
NOISE: Final = (
    "WARNING: Using incubator modules: ",
    "NOTE: Picked up JDK_JAVA_OPTIONS: ",
    "Picked up JAVA_TOOL_OPTIONS: ",
)
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


def launch_quietly() -> JavaGateway | None:
    """Start the JVM with filtered output; return None if it runs already or its output is not to be filtered."""
    if is_verbose() or "PYSPARK_GATEWAY_PORT" in os.environ or _has_own_configuration():
        return None
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:  # noqa: SLF001 -- there is no public name
        return None
    before = os.environ.get(_OPTIONS)
    os.environ[_OPTIONS] = f"{before or ''} -Dlog4j2.configurationFile={CONFIGURATION.as_uri()}".strip()
    reading, writing = os.pipe()
    try:
        gateway: JavaGateway = launch_gateway(popen_kwargs={"stderr": writing})  # type: ignore[no-untyped-call]
    finally:
        os.close(writing)
        if before is None:
            del os.environ[_OPTIONS]
        else:
            os.environ[_OPTIONS] = before
        source = os.fdopen(reading, "r", encoding="utf-8", errors="replace")
        threading.Thread(
            target=copy_without_noise, args=(source, sys.stderr), daemon=True, name="stderr of the JVM"
        ).start()
    return gateway


def copy_without_noise(source: IO[str], target: IO[str]) -> None:
    """Copy all lines except NOISE to `target`, until the source ends."""
    with source:
        for line in source:
            if not line.startswith(NOISE):
                target.write(line)
                target.flush()


def _has_own_configuration() -> bool:
    """Return True if the user has configured Spark's log."""
    asked = any("log4j" in os.environ.get(name, "") for name in (_OPTIONS, "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"))
    home = os.environ.get("SPARK_HOME")
    directory = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    return asked or (directory is not None and Path(directory, "log4j2.properties").exists())
