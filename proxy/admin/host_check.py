"""Check of the ``Host`` of requests: the admin port answers for its own names and addresses only.

A page that an operator's browser shows can give its own host name the admin port's address (DNS rebinding). The browser
then lets it read what the port answers, as of one origin; it sends that name as ``Host``.
"""

import fnmatch
import re

from proto.addresses import AddressInvalid, parse_host_port
from proxy.config.types import Admin
from proxy.runtime.dns.resolver import is_address

_HTTP_PORT = 80


class HostCheck:
    """Checks the ``Host`` of requests against ``admin.allowed_hosts``."""

    def __init__(self, config: Admin) -> None:
        names = ("localhost", parse_host_port(config.bind).host, *config.allowed_hosts)
        self._names = [re.compile(fnmatch.translate(name.lower().removesuffix("."))) for name in names]

    def is_own_host(self, host: bytes) -> bool:
        """Return True for an IP address, an allowed name, or no ``Host`` at all, with or without a port.

        No page can take an IP address for its name, and every browser sends ``Host``; probes of load balancers by
        HTTP/1.0 do not.
        """
        if not host:
            return True
        try:
            name = parse_host_port(host.decode("latin-1"), default_port=_HTTP_PORT).host.lower().removesuffix(".")
        except AddressInvalid:
            name = ""  # only `*` allows it
        return is_address(name) or any(pattern.match(name) for pattern in self._names)
