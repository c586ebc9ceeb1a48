"""How many files the cluster's processes may open: a relay needs two to four, and shells commonly allow 1,024."""

import contextlib
import resource

from proxy.common.logs import get_logger
from proxy.config.memory import forwarder_count
from proxy.config.types import Config

DESCRIPTORS_PER_RELAY = 4
"""Two sockets, and a pipe where a receiver does not read."""

SPARE_DESCRIPTORS = 4096
"""For everything else that a process has open."""


def open_files_needed(config: Config) -> int:
    """By the process that needs the most: the supervisor, whose fd store copies everything, or else a forwarder."""
    in_all = config.limits.max_connections * DESCRIPTORS_PER_RELAY
    return (in_all if config.relay.crash_safe else in_all // forwarder_count(config)) + SPARE_DESCRIPTORS


def raise_open_file_limit(config: Config) -> None:
    """Raise the limit as far as it goes, at least to what is needed where that is allowed; workers inherit it. Warn
    where it stays too low for the settings.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(config)
    if hard != resource.RLIM_INFINITY and hard < needed:
        with contextlib.suppress(ValueError, PermissionError, OSError):  # only for those with CAP_SYS_RESOURCE
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            return
        get_logger().warning(
            "a process may open fewer files than limits.max_connections needs; raise ulimit -n",
            limit=hard,
            needed=needed,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
