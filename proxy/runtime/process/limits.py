"""The limit on open files of a worker by role (RLIMIT_NOFILE): a captured worker does not fill the kernel's tables, or
keep the supervisor from passing descriptors.

There is no limit on threads and none on memory, for the reasons in docs/security.md.
"""

import resource
import sys

from proto.roles import Role

OPEN_FILES_MAX: dict[Role, int] = {
    Role.ADMIN: 1024,
    Role.AUTH: 8192,
    Role.LOOKUP: 32_768,
    Role.HTTP: 32_768,
}
"""Open files by role, above what the role's own bounds allow in the largest cluster. Forwarders are not here, since
their number of connections is a setting: they keep the supervisor's limit but for IN_FLIGHT_DESCRIPTORS.

* Admin: 256 connections (``proxy.common.http_server.CONNECTIONS_MAX``), and as many again that are being closed.
* Auth: a connection from each forwarder and lookup worker, at most 512 of them and their 512 successors (four of each
  that was captured). A connection to each issuer or KDC, 64 DNS queries, files that
  are read: a few hundred.
* Lookup: 2.5 times ``brokers.pooled_connections_max``, which is at most 10,000 (pooled, isolated, and those that take
  no more requests). Its callers as above, 64 probes and 32 logins, DNS as above.
* HTTP: `http.max_connections` of clients and a connection to an upstream for each of `http.max_requests`, at most
  10,000 each, and as many idle ones to upstreams as there are requests.
"""

IN_FLIGHT_DESCRIPTORS = 512
"""By how much a worker's limit is lower than the supervisor's. The kernel counts the descriptors that are on their way
through Unix sockets by user, and compares the number with the limit of the process that sends more (unix(7),
ETOOMANYREFS). A worker with the supervisor's limit could send so many to itself that the supervisor can pass none, and
so fork no worker. The last message of a worker may exceed its limit by 253, and so may another one that is sent
at the same moment. Many threads that send at the same moment may exceed it by more: that is not held.
"""


def limit_open_files(role: Role) -> None:
    """Lower this process's limit on open files to its role's, for good unless it is root's. Raises OSError."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = sys.maxsize
    limit = min(hard - min(IN_FLIGHT_DESCRIPTORS, hard // 4), OPEN_FILES_MAX.get(role, sys.maxsize))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
