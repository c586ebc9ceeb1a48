"""Name resolution: /etc/hosts, then DNS, in the background, cached until the TTL has passed.

Each group of names has a Resolver of its own, with bounds of its own: names that clients choose may be many and slow,
and must not keep the operator's names from being resolved. Within a group concurrent requests for a name share one
query, and queries are sent round robin by owner (proxy.runtime.dns.queries).

No other source of nsswitch.conf is used: the C library reads files for them, which a worker cannot.
"""

import io
import ipaddress
import math
import socket
from collections.abc import Callable
from typing import Any, Literal

import dns.asyncresolver
import dns.exception
import dns.resolver
import trio

from proto.addresses import AddressInvalid, parse_host_port
from proxy.common.files import read_file
from proxy.common.reloading_file import ReloadingFile
from proxy.config.files import HOSTS, RESOLV_CONF
from proxy.runtime.dns.answers import Addresses, Answer, ResolutionFailed, Service, Services
from proxy.runtime.dns.queries import FAILED_TTL_S, QueryCache

__all__ = [
    "Addresses",
    "ResolutionFailed",
    "Resolver",
    "Service",
    "Services",
    "is_address",
]

SERVICES_MAX = 256
"""SRV records of one name that are used; further ones are ignored."""

TTL_MIN_S = 1.0
DEFAULT_TTL_S = 5.0
"""TTL of an answer that has none: from /etc/hosts."""
OTHER_FAMILY_WAIT_S = 0.5
"""Time that the other family's addresses are awaited once those of one family are known (RFC 8305, 3)."""

UNKNOWN = "is not known, or has no address"

Family = Literal["AAAA", "A"]
FAMILIES = 2


class Resolver:
    """A resolver for one group of names. Queries run in ``nursery``; ``on_failure`` is called for each that fails.

    ``timeout_s``: for one name, from its request on.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        timeout_s: float,
        ttl_max_s: float,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._ttl_max_s = ttl_max_s
        self._servers = ReloadingFile("dns", (RESOLV_CONF,), _read_resolv_conf)
        self._hosts = ReloadingFile("hosts", (HOSTS,), _read_hosts)
        self._cache = QueryCache(nursery, self._resolve, timeout_s=timeout_s, on_failure=on_failure)

    async def resolve_addresses(self, host: str, *, owner: str = "", may_be_stale: bool = False) -> Addresses:
        """Return all IP addresses of a host, each once; for an IP address itself. Raises ResolutionFailed.

        ``owner``: the owner that the query counts for; empty: the operator. ``may_be_stale``: accept an answer that has
        just expired.
        """
        if is_address(host):
            return Addresses((str(ipaddress.ip_address(host)),), math.inf)
        listed = (await self._hosts.current_value()).get(_normalized(host))
        if listed is not None:
            # Without the name: the table does not say that names below this one have the same owner.
            return Addresses(listed, trio.current_time() + DEFAULT_TTL_S)
        answer = await self._cache.get_answer("addresses", host, owner, may_be_stale=may_be_stale)
        assert isinstance(answer, Addresses)
        return answer

    async def resolve_services(self, name: str) -> Services:
        """Return the SRV records of a name; none if the only one is ".", no service. Raises ResolutionFailed."""
        answer = await self._cache.get_answer("services", name, "", may_be_stale=False)
        assert isinstance(answer, Services)
        return answer

    # ---- sources of answers

    async def _resolve(self, kind: str, name: str) -> Answer:
        return await (self._services(name) if kind == "services" else self._addresses(name))

    async def _addresses(self, name: str) -> Addresses:
        servers = await self._servers.current_value()
        if servers is None:
            raise ResolutionFailed(f"is not in {HOSTS}, and there is no name server in {RESOLV_CONF}")
        return await _query_addresses(servers, name, self._timeout_s, self._ttl_max_s)

    async def _services(self, name: str) -> Services:
        servers = await self._servers.current_value()
        if servers is None:
            raise ResolutionFailed(f"SRV records need a name server in {RESOLV_CONF}")
        answer = await _query(servers, name, "SRV", self._timeout_s)
        if answer is None:
            raise ResolutionFailed("has no SRV records")
        services = tuple(service for record in answer if (service := _service(record)) is not None)
        ttl_s = _bounded(answer.chaining_result.minimum_ttl, self._ttl_max_s)
        return Services(services[:SERVICES_MAX], trio.current_time() + ttl_s)


async def _query_addresses(
    servers: dns.asyncresolver.Resolver, name: str, timeout_s: float, ttl_max_s: float
) -> Addresses:
    """Query a name's IPv6 and IPv4 addresses. Raises ResolutionFailed."""
    answers: dict[Family, dns.resolver.Answer | None] = {}
    failures: list[str] = []

    async def ask(family: Family) -> None:
        try:
            answer = answers[family] = await _query(servers, name, family, timeout_s)
        except ResolutionFailed as error:
            failures.append(str(error))
            return
        if answer is not None:
            nursery.cancel_scope.deadline = trio.current_time() + OTHER_FAMILY_WAIT_S

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "AAAA")
        nursery.start_soon(ask, "A")
    found = _of_one_name(answers)
    if not found:
        raise ResolutionFailed("; ".join(dict.fromkeys(failures)) or UNKNOWN)
    addresses = tuple(dict.fromkeys(record.to_text() for answer in found for record in answer))
    ttl_s = _bounded(min(answer.chaining_result.minimum_ttl for answer in found), ttl_max_s)
    whole = len(answers) == FAMILIES
    name = _normalized(found[0].qname.to_text())
    return Addresses(addresses, trio.current_time() + (ttl_s if whole else min(ttl_s, FAILED_TTL_S)), name)


def _bounded(ttl_s: float, ttl_max_s: float) -> float:
    return max(TTL_MIN_S, min(ttl_s, ttl_max_s))


async def _query(
    servers: dns.asyncresolver.Resolver, name: str, kind: Family | Literal["SRV"], timeout_s: float
) -> dns.resolver.Answer | None:
    """Query the records of one kind; return None where there are none. Raises ResolutionFailed."""
    try:
        answer = await servers.resolve(name, kind, search=True, raise_on_no_answer=False, lifetime=timeout_s)
    except dns.resolver.NXDOMAIN:
        return None
    except Exception as error:  # noqa: BLE001 -- a name server's bytes may make the library raise anything
        raise ResolutionFailed(f"{kind}: {error}") from None
    return answer if answer.rrset is not None else None


def _of_one_name(answers: dict[Family, dns.resolver.Answer | None]) -> list[dns.resolver.Answer]:
    """Return the answers with records, IPv6 first (RFC 8305, 4). With search domains they may be for different names;
    then only IPv4's is returned, since hosts must not be mixed.
    """
    v6, v4 = answers.get("AAAA"), answers.get("A")
    if v6 is not None and v4 is not None and v6.qname != v4.qname:
        return [v4]
    return [answer for answer in (v6, v4) if answer is not None]


def _service(record: Any) -> Service | None:
    """Convert an SRV record; return None where its target is no host, as "." is: the service does not exist there."""
    try:
        target = parse_host_port(f"{record.target.to_text(omit_final_dot=True)}:{record.port}")
    except AddressInvalid:
        return None
    return Service(target, record.priority, record.weight)


# ---- files


def _read_resolv_conf() -> dns.asyncresolver.Resolver | None:
    """Read name servers, search domains and options; return None where there are none."""
    try:
        return dns.asyncresolver.Resolver(io.StringIO(read_file(RESOLV_CONF).decode(errors="replace")))
    except (OSError, dns.exception.DNSException, ValueError):
        return None


def _read_hosts() -> dict[str, tuple[str, ...]]:
    """Read each name's addresses, in the file's order (hosts(5))."""
    try:
        text = read_file(HOSTS).decode(errors="replace")
    except OSError:
        return {}
    table: dict[str, dict[str, None]] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if is_address(address):
            for name in names:
                table.setdefault(_normalized(name), {})[str(ipaddress.ip_address(address))] = None
    return {name: tuple(addresses) for name, addresses in table.items()}


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def is_address(host: str) -> bool:
    """Return True if a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
