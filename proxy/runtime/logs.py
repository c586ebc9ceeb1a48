"""Logs: one entry a line on standard error, with the process's role and number in each.

Entries are written for a tired operator: what happened, to whom, and what to do. Never log a credential: callers pass
roles, addresses and reasons, not data.
"""

import logging
import sys
from typing import Any

import structlog

from proto.roles import Role
from proxy.config.types import Log

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_KEY_ORDER = ["timestamp", "level", "role", "worker", "event"]


def configure_logs(config: Log, role: Role, worker: int) -> None:
    """Set up this process's logs. Before this is called structlog's defaults apply."""
    structlog.contextvars.bind_contextvars(role=role.value, worker=worker)
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if config.format == "json"
        else structlog.processors.LogfmtRenderer(key_order=_KEY_ORDER, drop_missing=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """A logger; entries take keyword arguments as their fields."""
    logger: Logger = structlog.get_logger()
    return logger
