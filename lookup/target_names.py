"""Which names of targets are the brokers' own, and which a client may have invented: the latter may be slow, and many.

The names in ``brokers.service_url`` are looked after by the discovery, and nearly always known already. Names below
them, and names that brokers have said (in answers, in redirects, in SRV records), are known: there are only so many of
them, and the operator's own name servers answer for them. All others may be anybody's.
"""

from collections import OrderedDict
from typing import Protocol

from proto.addresses import AddressInvalid, BrokerUrl, parse_service_url
from proxy.runtime.dns.resolver import Addresses, Resolver, is_address

LEARNED_MAX = 1024


class BrokerNames:
    """What brokers are called. What was learned goes on from one configuration to the next by ``before``."""

    def __init__(self, url: BrokerUrl, before: "BrokerNames | None" = None) -> None:
        hosts = {_plain(host.host) for host in url.hosts if not is_address(host.host)}
        # Of _pulsar._tcp.name and name the latter: brokers have names below it.
        domains = hosts | {_plain(name) for name in url.srv_names[-1:]}
        self._configured = frozenset(hosts)
        self._suffixes = tuple(f".{domain}" for domain in domains)
        self._learned: OrderedDict[str, None] = OrderedDict()
        if before is not None:
            self._learned = before._learned  # noqa: SLF001 -- another of this class

    def learn(self, host: str) -> None:
        """Remember a name that a broker, or an SRV record, has said; of more than LEARNED_MAX the last ones."""
        if is_address(host):
            return
        self._learned[_plain(host)] = None
        self._learned.move_to_end(_plain(host))
        if len(self._learned) > LEARNED_MAX:
            self._learned.popitem(last=False)

    def learn_url(self, url: str) -> None:
        """Remember the names in a broker's own URL; one that is no URL says nothing."""
        try:
            for broker in parse_service_url(url):
                self.learn(broker.host)
        except AddressInvalid:
            return

    def is_configured(self, host: str) -> bool:
        """Whether it is a name of ``brokers.service_url``."""
        return _plain(host) in self._configured

    def is_known(self, host: str) -> bool:
        """Whether it is below one of these, or was said by a broker."""
        plain = _plain(host)
        return plain in self._learned or plain.endswith(self._suffixes)


class ResolvesTargets(Protocol):
    """Where the addresses of targets come from."""

    async def resolve_addresses(self, host: str, *, owner: str = "") -> Addresses:
        """A host's addresses; ``owner``: for whom. Raises ResolutionFailed."""
        ...


class TargetResolver:
    """Resolves targets: the configured brokers' names, known ones, and the others with a group of queries each.

    A target's addresses may have just expired: they are checked each time, and a relay need not wait for DNS.
    """

    def __init__(self, names: BrokerNames, *, configured: Resolver, known: Resolver, others: Resolver) -> None:
        self._names = names
        self._configured = configured
        self._known = known
        self._others = others

    async def resolve_addresses(self, host: str, *, owner: str = "") -> Addresses:
        """A host's addresses; ``owner``: for whom, whose names have turns of their own. Raises ResolutionFailed."""
        if self._names.is_configured(host):  # the operator's: as many as there are in the configuration
            return await self._configured.resolve_addresses(host, may_be_stale=True)
        resolver = self._known if self._names.is_known(host) else self._others
        return await resolver.resolve_addresses(host, owner=owner, may_be_stale=True)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
