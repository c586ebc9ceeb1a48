"""Resolution of relay targets' names, with a group of DNS queries for each degree of trust in a name.

The names of ``brokers.service_url`` are resolved by discovery, and nearly always known already. Names below them, and
names that brokers have said (in answers, in redirects, in SRV records), are known names (lookup.brokers.names): they
are bounded in number, and the operator's own name servers answer for them. A client may have invented any other name:
these may be slow, and many.
"""

from lookup.brokers.names import BrokerNames
from proxy.runtime.dns.resolver import Addresses, Resolver


class TargetResolver:
    """Resolver of relay targets, with a group of queries each for configured, known and other names.

    A target's addresses may have just expired: they are checked each time, and a relay need not wait for DNS.
    """

    def __init__(self, names: BrokerNames, *, configured: Resolver, known: Resolver, others: Resolver) -> None:
        self._names = names
        self._configured = configured
        self._known = known
        self._others = others

    async def resolve_addresses(self, host: str, *, owner: str = "") -> Addresses:
        """Return a host's addresses. Raises ResolutionFailed.

        ``owner``: the owner of the query (proxy.runtime.fairness.owners); queries are sent for owners in turn.
        """
        if self._names.is_configured(host):  # the operator's: as many as there are in the configuration
            return await self._configured.resolve_addresses(host, may_be_stale=True)
        resolver = self._known if self._names.is_known(host) else self._others
        return await resolver.resolve_addresses(host, owner=owner, may_be_stale=True)
