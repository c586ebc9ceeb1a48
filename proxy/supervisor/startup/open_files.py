"""The limit on open files of the cluster's processes: a relay needs two to four, and shells commonly allow 1,024."""

import contextlib
import resource

from proxy.common.logs import get_logger
from proxy.config.memory import forwarder_count
from proxy.config.types import Config

DESCRIPTORS_PER_RELAY = 4
"""Two sockets, and the two ends of a pipe where a receiver does not read."""

SPARE_DESCRIPTORS = 4096
"""Descriptors for everything else that a process has open."""


def open_files_needed(config: Config) -> int:
    """Return the need of the process that needs most: the supervisor, whose fd store holds copies, or a forwarder."""
    in_all = config.limits.max_connections * DESCRIPTORS_PER_RELAY
    return (in_all if config.relay.crash_safe else in_all // forwarder_count(config)) + SPARE_DESCRIPTORS


def raise_open_file_limit(config: Config) -> None:
    """Raise the soft limit to the hard one, and that to what is needed where this is allowed; workers inherit both.

    Logs a warning where the limit stays too low for the settings.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(config)
    if hard != resource.RLIM_INFINITY and hard < needed:
        with contextlib.suppress(ValueError, PermissionError, OSError):  # needs CAP_SYS_RESOURCE
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            return
        get_logger().warning(
            "a process may open fewer files than limits.max_connections needs; raise ulimit -n",
            limit=hard,
            needed=needed,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
