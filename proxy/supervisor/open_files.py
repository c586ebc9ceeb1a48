"""How many files the cluster's processes may open: a relay needs two to six, and shells commonly allow 1,024."""

import resource

from proxy.config.load import forwarder_count
from proxy.config.types import Config
from proxy.runtime.logs import get_logger

DESCRIPTORS_PER_RELAY = 4  # two sockets, and a pipe where a receiver does not read
SPARE = 1024
"""For everything else that a process has open."""


def allow_open_files(config: Config) -> None:
    """Raise the soft limit to the hard one; workers inherit it. Warn where even that is too low for the settings."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = config.limits.max_connections * DESCRIPTORS_PER_RELAY // forwarder_count(config) + SPARE
    if hard != resource.RLIM_INFINITY and hard < needed:
        get_logger().warning(
            "a forwarder may open fewer files than its share of limits.max_connections needs; raise ulimit -n",
            limit=hard,
            needed=needed,
        )
