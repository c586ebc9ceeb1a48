"""`pulsar-proxy-analytics receive`: run the receiver in the foreground."""

import ctypes
import sys
from pathlib import Path
from typing import NoReturn

import click
import trio

from analytics.receiver.config import Log, load_config
from analytics.receiver.service import open_spool, serve
from analytics.spool.records import SpoolError
from proxy.common.errors import ConfigError
from proxy.common.logs import Throttle, configure_structlog

ENTRIES_PER_SECOND_MAX = 10

DROPPED_FIELD = "left_out_before"
"""The field that holds how many entries of the same event were dropped before this one."""

FREE_BYTES_RETAINED_MAX = 64 * 1024 * 1024
"""Free bytes that the heap retains."""

_MMAP_BYTES = 32 * 1024 * 1024  # the largest that mallopt takes; blocks from this size on are returned as before
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def configure_logs(config: Log) -> None:
    """Set up this process's logs: JSON lines on standard error, one entry for each thing an operator might ask about.

    Never log a credential or a body. What senders chose is escaped by JSON; entries of one event are written a few
    times a second at most, so that a storm of bad requests costs less than serving it.
    """
    configure_structlog(config.level, Throttle(ENTRIES_PER_SECOND_MAX, DROPPED_FIELD))


def retain_freed_memory() -> None:
    """Retain up to FREE_BYTES_RETAINED_MAX of freed memory for the next request. Does nothing without glibc.

    Each request needs a few hundred kilobytes for a moment. glibc trims the free end of the heap, so the next request
    faults every page in again, cleared by the kernel: about 200 faults and a quarter of a millisecond for each request.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, FREE_BYTES_RETAINED_MAX)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


@click.command()
@click.option(
    "--config", "config_file", required=True, type=click.Path(path_type=Path), help="The configuration, a TOML file."
)
def receive(config_file: Path) -> None:
    """Receive Prometheus's remote write, and keep it in a spool until `ingest` has read it."""
    try:
        config = load_config(config_file)
        configure_logs(config.log)
        writer = open_spool(config)
    except (ConfigError, SpoolError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"spool.directory: {error.filename or ''}: {error.strerror}")
    retain_freed_memory()
    try:
        trio.run(serve, config, writer)
    except ConfigError as error:
        _fail(str(error))
    finally:
        writer.close()


def _fail(text: str) -> NoReturn:
    click.echo(f"pulsar-proxy-analytics receive: {text}", err=True)
    sys.exit(2)
