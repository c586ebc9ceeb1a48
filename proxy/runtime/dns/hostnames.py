"""Trio's own look-ups of names, which HTTP clients make, by a Resolver instead of the C library."""

import ipaddress
import socket
from typing import Any

import trio

from proxy.runtime.dns.answers import ResolutionFailed
from proxy.runtime.dns.resolver import Resolver


class Hostnames(trio.abc.HostnameResolver):
    """The names of a worker's connections to others than brokers (``trio.socket.set_custom_hostname_resolver``)."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def getaddrinfo(  # noqa: PLR0917 -- the interface's
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002 -- the interface's
        proto: int = 0,
        flags: int = 0,  # noqa: ARG002 -- the interface's
    ) -> list[Any]:
        """Return a name's addresses as socket.getaddrinfo does, for TCP. Raises socket.gaierror."""
        try:
            found = await self._resolver.resolve_addresses((host or b"").decode())
        except (ResolutionFailed, UnicodeError) as error:
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
        results: list[Any] = []
        for address in found.addresses:
            if ipaddress.ip_address(address).version == 4:  # noqa: PLR2004 -- of IP
                results.append((socket.AF_INET, type, proto, "", (address, int(port or 0))))
            else:
                results.append((socket.AF_INET6, type, proto, "", (address, int(port or 0), 0, 0)))
        return [result for result in results if family in {socket.AF_UNSPEC, result[0]}]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:  # noqa: ARG002 -- the interface's
        """Return the numbers: no caller needs the name of an address."""
        await trio.lowlevel.checkpoint()
        return str(sockaddr[0]), str(sockaddr[1])
