"""The limit on open files of the cluster's processes: a relay needs two to four, and shells commonly allow 1,024."""

import contextlib
import resource
import sys

from proxy.common.logs import get_logger
from proxy.config.http import http_worker_count
from proxy.config.memory import forwarder_count
from proxy.config.types import Config
from proxy.runtime.shared.fd_store_channel import DESCRIPTORS_MAX

DESCRIPTORS_PER_RELAY = 4
"""Two sockets, and the two ends of a pipe where a receiver does not read."""

SPARE_DESCRIPTORS = 4096
"""Descriptors for everything else that a process has open."""

SPARE_DESCRIPTORS_PER_FORWARDER = 64
"""What a forwarder has in the fd store beside its relays: both ends of the pipes that it keeps ready."""

RESERVED_DESCRIPTORS = 64 + 256 + DESCRIPTORS_MAX
"""The supervisor's own: standard streams, event loop, log, lock, configuration, trial and fork server; operators'
connections at control.sock, each looked at through a pidfd; and one message of a forwarder, whose descriptors are
there before they can be refused.
"""

RESERVED_PER_LISTENER = 2
"""A listener, and another in its place at a reload. Each auth and lookup worker has a listening socket, too."""

RESERVED_PER_FORWARDER = 2
"""The memory of its relay table, and its table of addresses."""

RESERVED_PER_WORKER = 4 + 7
"""A running worker's channel, liveness pipe, pidfd, and the channel for listeners. While its successor is spawned,
three of that one's ends are here as well.
"""


def open_files_needed(config: Config) -> int:
    """Return the need of the process that needs most: the supervisor, whose fd store holds copies, or a worker."""
    for_http = config.http.max_connections + 2 * config.http.max_requests if config.http_listener else 0
    in_all, forwarders = config.limits.max_connections * DESCRIPTORS_PER_RELAY, forwarder_count(config)
    if not config.relay.crash_safe:
        return max(in_all // forwarders, for_http) + SPARE_DESCRIPTORS
    beside = supervisor_reserve(config, forwarders) + forwarders * SPARE_DESCRIPTORS_PER_FORWARDER
    return max(in_all + max(SPARE_DESCRIPTORS, beside), for_http + SPARE_DESCRIPTORS)


def supervisor_reserve(config: Config, forwarders: int) -> int:
    """Return how many descriptors of the supervisor no forwarder may take from it."""
    services = config.cluster.auth_workers + config.cluster.lookup_workers
    workers = 1 + services + forwarders + http_worker_count(config)  # and the admin worker
    return (
        RESERVED_DESCRIPTORS
        + RESERVED_PER_LISTENER * (len(config.listener) + len(config.http_listener) + services)
        + RESERVED_PER_FORWARDER * forwarders
        + RESERVED_PER_WORKER * workers
    )


def stored_descriptors_max(config: Config, forwarders: int) -> int:
    """Return how many descriptors one forwarder may have in the fd store: an equal part of what the reserve leaves."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = sys.maxsize
    return max(0, limit - supervisor_reserve(config, forwarders)) // forwarders


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
