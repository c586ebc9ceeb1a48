"""The limit on open files of a worker by role (RLIMIT_NOFILE): a captured worker fills no table of the kernel.

There is no limit on threads and none on memory, for the reasons in docs/security.md.
"""

import resource

from proto.roles import Role

OPEN_FILES_MAX: dict[Role, int] = {
    Role.ADMIN: 1024,
    Role.AUTH: 8192,
    Role.LOOKUP: 32_768,
}
"""Open files by role, each at least twice what the role's own bounds allow in an unusual cluster. No limit for
forwarders, whose number of connections is a setting: they keep the supervisor's limit.

* Admin: 256 connections (``proxy.admin.http.CONNECTIONS_MAX``), and as many again that are being closed.
* Auth: a connection from each forwarder and lookup worker, at most 512 of them and their 512 successors (four of each
  that was captured). A connection to each issuer or KDC, 16 threads of the system's resolver, 64 DNS queries, files
  that are read: a few hundred.
* Lookup: 2.5 times ``brokers.pooled_connections_max``, which is at most 10,000 (pooled, isolated, and those that take
  no more requests). Its callers as above, 64 probes and 32 logins, DNS as above.
"""


def limit_open_files(role: Role) -> None:
    """Lower this process's limit on open files to its role's, for good unless it is root's. Raises OSError."""
    if role not in OPEN_FILES_MAX:
        return
    limit = OPEN_FILES_MAX[role]
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > limit:
        hard = limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
