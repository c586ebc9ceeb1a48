"""The receiver's logs: JSON lines on standard error, one entry for each thing that an operator might ask about.

Never log a credential or a body. What senders chose is escaped by JSON; entries of one event are written a few times a
second at most, so that a storm of bad requests costs less than serving it.
"""

from analytics.receiver.config import Log
from proxy.common.logs import Throttle, configure_structlog

ENTRIES_PER_SECOND_MAX = 10

DROPPED_FIELD = "left_out_before"
"""The field that holds how many entries of the same event were dropped before this one."""


def configure_logs(config: Log) -> None:
    """Set up this process's logs."""
    configure_structlog(config.level, Throttle(ENTRIES_PER_SECOND_MAX, DROPPED_FIELD))
