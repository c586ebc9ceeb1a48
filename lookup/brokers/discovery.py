"""DNS discovery of the brokers of ``brokers.service_url``, repeated in the background.

Each address of a name is a broker of its own, as behind a headless service of Kubernetes; but one IPv4 and one IPv6
address belong to one broker. The last result counts while DNS fails: a name server that is down must not remove brokers
that are up.
"""

import enum
import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from lookup.brokers.configured import ConfiguredBrokers, configured_brokers
from proto.addresses import BrokerUrl, HostPort
from proxy.common.eager import enter_task
from proxy.common.logs import get_logger
from proxy.runtime.dns.resolver import Addresses, ResolutionFailed, Resolver, Service, Services, is_address

ENDPOINTS_MAX = 1024
"""Of more than these, the last ones found do not count."""
REFRESH_INTERVAL_MIN_S = 1.0
RETRY_INTERVAL_S = 2.0

WEIGHT_ZERO = 0.01
"""RFC 2782: a record of weight 0 has "a very small chance of being selected" among others."""

EndpointKey = tuple[HostPort, tuple[str, ...]]


class CredentialVerdict(enum.Enum):
    """A broker's verdict on the proxy's own credentials."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class BrokerHealth:
    """Health of one broker, kept by lookup.brokers.directory; times are Trio's."""

    priority: int = 0
    weight: float = 1.0
    reachable: bool | None = None
    reachable_since: float = -math.inf
    probed_at: float = -math.inf
    """When the last probe has ended."""
    detail: str = "not looked at yet"
    failures: int = 0
    ejections: int = 0
    ejected: bool = False
    ejected_until: float = -math.inf
    visible_to_probes: bool = True
    outlier_reason: str = ""
    """Why it is ejected by relays' failures; empty: it is not."""
    outlier_ejections: int = 0
    outlier_until: float = -math.inf
    """When its last ejection by relays' failures ends, or has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint(HostPort):
    """One broker: the name that its certificate is for, and the addresses (one, or one of each family) to dial.

    It is a HostPort wherever one is needed, but equal to itself only: two brokers may have one name. There is one
    object for a broker as long as it is found.
    """

    addresses: tuple[str, ...]
    health: BrokerHealth = field(default_factory=BrokerHealth, repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def name(self) -> HostPort:
        """Its host and port, which others may have too."""
        return HostPort(self.host, self.port)

    @property
    def key(self) -> EndpointKey:
        """What tells it from any other broker."""
        return self.name, self.addresses


@dataclass(frozen=True, slots=True)
class _FoundBroker:
    key: EndpointKey
    priority: int
    weight: float


class BrokerDiscovery:
    """Discovery of the brokers of one URL. ``on_change`` is called after each resolution of a name."""

    def __init__(self, url: BrokerUrl, resolver: Resolver, before: "BrokerDiscovery | None" = None) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self.failures: dict[str, str] = {}
        """Why a name of the URL is not resolved at the moment."""
        self._url = url
        self._resolver = resolver
        self.on_change: Callable[[], None] = lambda: None
        self._hosts = {str(host): host for host in url.hosts}
        self._sources = tuple(self._hosts) or url.srv_names[-1:]
        self.found: dict[str, tuple[_FoundBroker, ...]] = {}
        self.names: dict[str, str] = {}
        """The whole names under which hosts of the URL were found last."""
        self.by_key: dict[EndpointKey, Endpoint] = {}
        self.configured: ConfiguredBrokers = configured_brokers(url.hosts, (), ())
        """The brokers as relay targets, by what is known now."""
        self._configured_from: tuple[frozenset[str], tuple[EndpointKey, ...]] = frozenset(), ()
        self.changed_at: float = -math.inf if before is None else before.changed_at
        """When brokers were last found or lost, by Trio's clock."""
        self._unresolved = set(self._sources)
        self._changed = trio.Event()
        if before is not None:  # a reload: what was found, and what is thought of it, is still true
            self.by_key = before.by_key
            self.found = {name: before.found[name] for name in self._sources if name in before.found}
            self.names = {name: before.names[name] for name in self._sources if name in before.names}
        for name, host in self._hosts.items():
            if is_address(host.host):
                self.found[name] = _found_brokers(host, (host.host,))
                self._unresolved.discard(name)
        self._rebuild_endpoints()

    async def run(self) -> None:
        """Resolve names until cancelled; names that were not resolved by then count as resolved for those that wait."""
        try:
            async with trio.open_nursery() as nursery:
                for name in self._sources:
                    nursery.start_soon(self._refresh_name, name)
        finally:
            self._unresolved.clear()
            self._changed.set()

    async def wait_until_any_found(self) -> None:
        """Wait until there is a broker, or every name was resolved without one."""
        if not self.endpoints and self._unresolved:
            await enter_task()
        while not self.endpoints and self._unresolved:
            await self._changed.wait()

    async def wait_until_all_resolved(self) -> None:
        """Wait until the resolution of every name has ended, successful or not."""
        if self._unresolved:
            await enter_task()
        while self._unresolved:
            await self._changed.wait()

    def has_brokers(self, name: str) -> bool:
        """Return True if a name of the URL has brokers."""
        return bool(self.found.get(name))

    async def _refresh_name(self, name: str) -> None:
        while True:
            expires_at = await self._resolve_name(name)
            await trio.sleep_until(max(expires_at, trio.current_time() + REFRESH_INTERVAL_MIN_S))

    async def _resolve_name(self, name: str) -> float:
        """Resolve one name, apply the result, and return when to resolve it again."""
        host = self._hosts.get(name)
        try:
            if host is None:
                places, expires_at = await self._resolve_services(name)
            else:
                answer = await self._resolver.resolve_addresses(host.host)
                places, expires_at = _found_brokers(host, answer.addresses), answer.expires_at
                if answer.name:
                    self.names[name] = answer.name
        except ResolutionFailed as error:
            expires_at = trio.current_time() + RETRY_INTERVAL_S
            self._record_failure(name, str(error))
        else:
            if self.failures.pop(name, None) is not None:
                get_logger().info("brokers' names are resolved again", name=name)
            if places != self.found.get(name):
                get_logger().info("found brokers", name=name, at=_describe(places))
            self.found[name] = places
        self._unresolved.discard(name)
        self._rebuild_endpoints()
        self._changed.set()
        self._changed = trio.Event()
        return expires_at

    def _record_failure(self, name: str, reason: str) -> None:
        if name not in self.failures:
            get_logger().error(
                "brokers' names are not resolved; going on with what they were before",
                name=name,
                before=_describe(self.found.get(name, ())),
                reason=reason,
            )
        self.failures[name] = reason

    # ---- SRV

    async def _resolve_services(self, name: str) -> tuple[tuple[_FoundBroker, ...], float]:
        """Resolve the brokers behind the SRV records. Raises ResolutionFailed."""
        services = await self._query_services()
        answers: dict[Service, Addresses | ResolutionFailed] = {}

        async def ask(service: Service) -> None:
            try:  # the final dot: it is a whole name, whatever the search domains are
                answers[service] = await self._resolver.resolve_addresses(_absolute(service.target.host))
            except ResolutionFailed as error:
                answers[service] = error

        async with trio.open_nursery() as nursery:
            for service in services.services:
                nursery.start_soon(ask, service)
        places: list[_FoundBroker] = []
        failures = [answer for answer in answers.values() if isinstance(answer, ResolutionFailed)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        expires_at = services.expires_at
        for service in services.services:
            answer = answers[service]
            if isinstance(answer, ResolutionFailed):
                get_logger().warning("a broker of an SRV record is not resolved", name=name, reason=str(answer))
                places.extend(place for place in self.found.get(name, ()) if place.key[0] == service.target)
                expires_at = min(expires_at, trio.current_time() + RETRY_INTERVAL_S)
            else:
                places.extend(_found_brokers(service.target, answer.addresses, service.priority, service.weight))
                expires_at = min(expires_at, answer.expires_at)
        return tuple(places), expires_at

    async def _query_services(self) -> Services:
        """Return the records of the first of the names that has any. Raises ResolutionFailed."""
        failures = []
        for name in self._url.srv_names:
            try:
                return await self._resolver.resolve_services(name)
            except ResolutionFailed as error:
                failures.append(str(error))
        raise ResolutionFailed("; ".join(failures))

    # ---- endpoints

    def endpoints_at(self, addresses: tuple[str, ...], port: int) -> list[Endpoint]:
        """Return the brokers at these addresses, under any name; none where not all of the addresses are theirs."""
        wanted = set(addresses)
        found = [one for one in self.endpoints if one.port == port and not wanted.isdisjoint(one.addresses)]
        return found if wanted <= {address for one in found for address in one.addresses} else []

    def _rebuild_endpoints(self) -> None:
        places: dict[EndpointKey, _FoundBroker] = {}
        for name in self._sources:
            for place in self.found.get(name, ()):
                places.setdefault(place.key, place)
        endpoints = []
        for where, place in list(places.items())[:ENDPOINTS_MAX]:
            endpoint = self.by_key.get(where) or Endpoint(where[0].host, where[0].port, where[1])
            endpoint.health.priority, endpoint.health.weight = place.priority, place.weight
            endpoints.append(endpoint)
        self.endpoints = tuple(endpoints)
        known, self.by_key = self.by_key, {one.key: one for one in endpoints}
        if known.keys() != self.by_key.keys():
            self.changed_at = trio.current_time()
        # The hosts of SRV records are whole names.
        names = frozenset(self.names.values() if self._hosts else (_normalized(one.host) for one in endpoints))
        if (names, tuple(self.by_key)) != self._configured_from:
            self._configured_from = names, tuple(self.by_key)
            self.configured = configured_brokers(self._url.hosts, names, self.by_key)
        self.on_change()


def _found_brokers(
    host: HostPort, addresses: tuple[str, ...], priority: int = 0, weight: int | None = None
) -> tuple[_FoundBroker, ...]:
    """Group a name's addresses into brokers.

    A record's weight is shared by them; without one, each counts as much as any other.
    """
    groups = _group_addresses(addresses)
    share = 1.0 if weight is None else (weight or WEIGHT_ZERO) / len(groups)
    return tuple(_FoundBroker((host, group), priority, share) for group in groups)


def _group_addresses(addresses: tuple[str, ...]) -> list[tuple[str, ...]]:
    families = [ipaddress.ip_address(address.partition("%")[0]).version for address in addresses]
    if sorted(families) == [4, 6]:
        return [addresses]
    return [(address,) for address in sorted(addresses)]


def _absolute(host: str) -> str:
    return host if is_address(host) else f"{host}."


def _normalized(host: str) -> str:
    return "" if is_address(host) else host.lower().removesuffix(".")


def _describe(places: tuple[_FoundBroker, ...]) -> str:
    return ", ".join(f"{place.key[0]} at {' and '.join(place.key[1])}" for place in places)
