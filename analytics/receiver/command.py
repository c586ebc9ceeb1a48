"""`pulsar-proxy-analytics receive`: run the receiver in the foreground."""

import sys
from pathlib import Path
from typing import NoReturn

import click
import trio

from analytics.receiver.config import load_config
from analytics.receiver.logs import configure_logs
from analytics.receiver.memory import retain_freed_memory
from analytics.receiver.service import open_spool, serve
from analytics.spool.records import SpoolError
from proxy.common.errors import ConfigError


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
