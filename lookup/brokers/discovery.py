"""Where the brokers of ``brokers.service_url`` are: asked for again and again, in the background.

Each address of a name is a broker of its own, as behind a headless service of Kubernetes; but one IPv4 and one IPv6
address are the two of one broker. What was found last goes on counting while DNS fails: a name server that is down
must not take brokers away that are up.
"""

import enum
import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from lookup.brokers.configured import OwnBrokers, known
from proto.addresses import BrokerUrl, HostPort
from proxy.common.logs import get_logger
from proxy.runtime.dns.resolver import Addresses, ResolutionFailed, Resolver, Service, Services, is_address

ENDPOINTS_MAX = 1024
"""Of more than these, the last ones found do not count."""
ASK_AGAIN_MIN_S = 1.0
ASK_AGAIN_AFTER_FAILURE_S = 2.0

WEIGHT_ZERO = 0.01
"""RFC 2782: a record of weight 0 has "a very small chance of being selected" among others."""

Where = tuple[HostPort, tuple[str, ...]]


class Verdict(enum.Enum):
    """What a broker thinks of the proxy's own credentials."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class BrokerHealth:
    """What is thought of a broker; see lookup.brokers.directory."""

    priority: int = 0
    share: float = 1.0
    reachable: bool | None = None
    reachable_since: float = -math.inf
    detail: str = "not looked at yet"
    failures: int = 0
    ejections: int = 0
    set_aside: bool = False
    set_aside_until: float = -math.inf
    seen_by_a_look: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint(HostPort):
    """One broker: the name that its certificate is for, and the addresses (one, or one of each family) to dial.

    It is a HostPort wherever one is needed, but equal to itself only: two brokers may have one name. There is one
    object for a broker as long as it is found.
    """

    addresses: tuple[str, ...]
    standing: BrokerHealth = field(default_factory=BrokerHealth, repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class _Place:
    where: Where
    priority: int
    share: float


class Discovery:
    """See the module. ``on_change`` is called whenever a name was asked for."""

    def __init__(self, url: BrokerUrl, resolver: Resolver, before: "Discovery | None" = None) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self.failures: dict[str, str] = {}
        """Why a name of the URL is not resolved at the moment."""
        self._url = url
        self._resolver = resolver
        self.on_change: Callable[[], None] = lambda: None
        self._hosts = {str(host): host for host in url.hosts}
        self._sources = tuple(self._hosts) or url.srv_names[-1:]
        self.found: dict[str, tuple[_Place, ...]] = {}
        self.names: dict[str, str] = {}
        """The whole names under which hosts of the URL were found last."""
        self.by_place: dict[Where, Endpoint] = {}
        self.own: OwnBrokers = known(url.hosts, (), ())
        self._own_made_of: tuple[frozenset[str], tuple[Where, ...]] = frozenset(), ()
        self._untried = set(self._sources)
        self._news = trio.Event()
        if before is not None:  # a reload: what was found, and what is thought of it, is still true
            self.by_place = before.by_place
            self.found = {name: before.found[name] for name in self._sources if name in before.found}
            self.names = {name: before.names[name] for name in self._sources if name in before.names}
        for name, host in self._hosts.items():
            if is_address(host.host):
                self.found[name] = _places(host, (host.host,))
                self._untried.discard(name)
        self._rebuild()

    async def run(self) -> None:
        """Look for brokers until cancelled; what was not asked for by then will not be, and nobody waits for it."""
        try:
            async with trio.open_nursery() as nursery:
                for name in self._sources:
                    nursery.start_soon(self._follow, name)
        finally:
            self._untried.clear()
            self._news.set()

    async def any_found(self) -> None:
        """Wait until there is a broker, or every name was asked for."""
        while not self.endpoints and self._untried:
            await self._news.wait()

    async def all_tried(self) -> None:
        """Wait until every name was asked for."""
        while self._untried:
            await self._news.wait()

    def has_brokers(self, name: str) -> bool:
        """Whether a name of the URL has brokers."""
        return bool(self.found.get(name))

    async def _follow(self, name: str) -> None:
        while True:
            expires_at = await self._look_for(name)
            await trio.sleep_until(max(expires_at, trio.current_time() + ASK_AGAIN_MIN_S))

    async def _look_for(self, name: str) -> float:
        """Ask for one name, and take over what is there now; gives when to ask again."""
        host = self._hosts.get(name)
        try:
            if host is None:
                places, expires_at = await self._of_services(name)
            else:
                answer = await self._resolver.resolve_addresses(host.host)
                places, expires_at = _places(host, answer.addresses), answer.expires_at
                if answer.name:
                    self.names[name] = answer.name
        except ResolutionFailed as error:
            expires_at = trio.current_time() + ASK_AGAIN_AFTER_FAILURE_S
            self._failed(name, str(error))
        else:
            if self.failures.pop(name, None) is not None:
                get_logger().info("brokers' names are resolved again", name=name)
            if places != self.found.get(name):
                get_logger().info("found brokers", name=name, at=_shown(places))
            self.found[name] = places
        self._untried.discard(name)
        self._rebuild()
        self._news.set()
        self._news = trio.Event()
        return expires_at

    def _failed(self, name: str, reason: str) -> None:
        if name not in self.failures:
            get_logger().error(
                "brokers' names are not resolved; going on with what they were before",
                name=name,
                before=_shown(self.found.get(name, ())),
                reason=reason,
            )
        self.failures[name] = reason

    # ---- SRV

    async def _of_services(self, name: str) -> tuple[tuple[_Place, ...], float]:
        """The brokers behind the SRV records. Raises ResolutionFailed."""
        services = await self._services()
        answers: dict[Service, Addresses | ResolutionFailed] = {}

        async def ask(service: Service) -> None:
            try:  # the final dot: it is a whole name, whatever the search domains are
                answers[service] = await self._resolver.resolve_addresses(_absolute(service.target.host))
            except ResolutionFailed as error:
                answers[service] = error

        async with trio.open_nursery() as nursery:
            for service in services.services:
                nursery.start_soon(ask, service)
        places: list[_Place] = []
        failures = [answer for answer in answers.values() if isinstance(answer, ResolutionFailed)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        expires_at = services.expires_at
        for service in services.services:
            answer = answers[service]
            if isinstance(answer, ResolutionFailed):
                get_logger().warning("a broker of an SRV record is not resolved", name=name, reason=str(answer))
                places.extend(place for place in self.found.get(name, ()) if place.where[0] == service.target)
                expires_at = min(expires_at, trio.current_time() + ASK_AGAIN_AFTER_FAILURE_S)
            else:
                places.extend(_places(service.target, answer.addresses, service.priority, service.weight))
                expires_at = min(expires_at, answer.expires_at)
        return tuple(places), expires_at

    async def _services(self) -> Services:
        """The records of the first of the names that has any. Raises ResolutionFailed."""
        failures = []
        for name in self._url.srv_names:
            try:
                return await self._resolver.resolve_services(name)
            except ResolutionFailed as error:
                failures.append(str(error))
        raise ResolutionFailed("; ".join(failures))

    # ---- endpoints

    def _rebuild(self) -> None:
        places: dict[Where, _Place] = {}
        for name in self._sources:
            for place in self.found.get(name, ()):
                places.setdefault(place.where, place)
        endpoints = []
        for where, place in list(places.items())[:ENDPOINTS_MAX]:
            endpoint = self.by_place.get(where) or Endpoint(where[0].host, where[0].port, where[1])
            endpoint.standing.priority, endpoint.standing.share = place.priority, place.share
            endpoints.append(endpoint)
        self.endpoints = tuple(endpoints)
        self.by_place = {(HostPort(one.host, one.port), one.addresses): one for one in endpoints}
        # The hosts of SRV records are whole names.
        names = frozenset(self.names.values() if self._hosts else (_plain(one.host) for one in endpoints))
        if (names, tuple(self.by_place)) != self._own_made_of:
            self._own_made_of = names, tuple(self.by_place)
            self.own = known(self._url.hosts, names, self.by_place)
        self.on_change()


def _places(
    host: HostPort, addresses: tuple[str, ...], priority: int = 0, weight: int | None = None
) -> tuple[_Place, ...]:
    """The brokers at a name's addresses. A record's weight is shared by them; without one, each counts as much as any
    other.
    """
    groups = _brokers_at(addresses)
    share = 1.0 if weight is None else (weight or WEIGHT_ZERO) / len(groups)
    return tuple(_Place((host, group), priority, share) for group in groups)


def _brokers_at(addresses: tuple[str, ...]) -> list[tuple[str, ...]]:
    families = [ipaddress.ip_address(address.partition("%")[0]).version for address in addresses]
    if sorted(families) == [4, 6]:
        return [addresses]
    return [(address,) for address in sorted(addresses)]


def _absolute(host: str) -> str:
    return host if is_address(host) else f"{host}."


def _plain(host: str) -> str:
    return "" if is_address(host) else host.lower().removesuffix(".")


def _shown(places: tuple[_Place, ...]) -> str:
    return ", ".join(f"{place.where[0]} at {' and '.join(place.where[1])}" for place in places)
