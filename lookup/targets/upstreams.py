"""The upstreams of HTTP requests: where their own hosts are, and which of their redirects may be followed.

An upstream redirects a request to the broker that owns a topic, for example. The request goes there with all that
proves who its client is, so the rules are those for relay targets (lookup.targets.rules), with the upstream's URL in
place of ``brokers.service_url``: a redirect leads to one of the upstream's hosts, below one of them, to an address of
them, or to where ``brokers.allowed_hosts`` and ``brokers.allowed_addresses`` allow; at a port of the URL, or of
``brokers.allowed_ports``. It does not change between http and https: that would be without TLS where the operator has
set it, or by TLS where no certificate was provided for.

The hosts are not probed. The HTTP workers themselves see which of them cannot be reached.
"""

from collections.abc import Callable, Sequence

import trio

from lookup.brokers.discovery import BrokerDiscovery, Endpoint
from lookup.brokers.names import BrokerNames
from lookup.brokers.port_pairs import PortPairs
from lookup.targets.name_resolver import TargetResolver
from lookup.targets.rules import Target, TargetRules
from proto.addresses import BrokerUrl, HostPort
from proxy.config.types import Config
from proxy.config.upstreams import HttpUpstream, http_upstreams
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dial_rules import TargetDenied


class UpstreamHosts:
    """The hosts of one upstream, as TargetRules needs to know them; they take turns."""

    def __init__(self, upstream: HttpUpstream, resolver: Resolver, before: "UpstreamHosts | None") -> None:
        self._hosts = upstream.hosts
        url = BrokerUrl(hosts=upstream.hosts)
        self.names: BrokerNames = BrokerNames(url)
        self.port_pairs: PortPairs = PortPairs(upstream.brokers)
        self.discovery: BrokerDiscovery = BrokerDiscovery(url, resolver, None if before is None else before.discovery)
        self._turn = -1

    @property
    def none_known_reason(self) -> str:
        """Why no host is known, for the log."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.discovery.failures.items()) or "no host is known"

    def listed_brokers(self) -> Sequence[HostPort]:
        """Return the hosts as the URL lists them."""
        return self._hosts

    def brokers_in_order(self) -> list[Endpoint]:
        """Return all hosts that are found, the one whose turn it is first."""
        endpoints = self.discovery.endpoints
        self._turn = turn = (self._turn + 1) % max(1, len(endpoints))
        return [*endpoints[turn:], *endpoints[:turn]]

    def next_broker(self) -> Endpoint | None:
        """Return the host whose turn it is; None where none is found."""
        return next(iter(self.brokers_in_order()), None)


class UpstreamRules:
    """The rules for one upstream."""

    def __init__(self, upstream: HttpUpstream, hosts: UpstreamHosts, resolver: TargetResolver) -> None:
        self.hosts = hosts
        self._key = upstream.key
        self._tls = upstream.tls
        self._rules = TargetRules(upstream.brokers, resolver, hosts)

    async def own_targets(self) -> list[Target]:
        """Return the upstream's own hosts, in the order to try them. Raises TargetDenied."""
        try:
            return await self._rules.targets_for_any_broker()
        except TargetDenied as denied:
            raise self._named(denied) from None

    async def check_redirect(self, target: str, owner: str, *, tls: bool) -> Target:
        """Return where to dial for a redirect of this upstream to ``host:port``. Raises TargetDenied.

        ``tls``: the redirect is to https. ``owner``: of the DNS query, as for a relay's target.
        """
        if tls is not self._tls:
            schemes = f"{_scheme(tls=self._tls)} to {_scheme(tls=tls)}"
            raise TargetDenied("scheme", f"{target}: a redirect of {self._key} from {schemes}")
        try:
            return await self._rules.check_target(target, owner)
        except TargetDenied as denied:
            raise self._named(denied) from None

    def _named(self, denied: TargetDenied) -> TargetDenied:
        """Return a denial that names the key of this upstream's URL."""
        return TargetDenied(denied.reason, str(denied).replace("brokers.service_url", self._key))


class HttpUpstreams:
    """The upstreams of a configuration, by URL.

    ``own``: resolves their hosts. ``resolver_for``: makes a resolver of redirects' names. ``before``: those of the
    configuration before: their addresses carry over, and HTTP workers that are still to be told of the new one may ask
    for them.
    """

    def __init__(
        self,
        config: Config,
        own: Resolver,
        resolver_for: Callable[[BrokerNames], TargetResolver],
        before: "HttpUpstreams | None" = None,
    ) -> None:
        self._before: dict[str, UpstreamRules] = {} if before is None else before.by_url
        self.by_url: dict[str, UpstreamRules] = {}
        self._scope = trio.CancelScope()
        for upstream in http_upstreams(config).values():
            if upstream.url not in self.by_url:
                known = self._before.get(upstream.url)
                hosts = UpstreamHosts(upstream, own, None if known is None else known.hosts)
                self.by_url[upstream.url] = UpstreamRules(upstream, hosts, resolver_for(hosts.names))

    async def run(self) -> None:
        """Resolve the hosts again and again until ``stop``."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                for one in self.by_url.values():
                    nursery.start_soon(one.hosts.discovery.run)

    def stop(self) -> None:
        """Stop the resolution of hosts."""
        self._scope.cancel()

    def rules_of(self, url: str) -> UpstreamRules:
        """Return the rules of an upstream. Raises TargetDenied for a URL that is in no configuration."""
        rules = self.by_url.get(url) or self._before.get(url)
        if rules is None:
            raise TargetDenied("unknown_upstream", f"{url[:256]!r} is not in the configuration")
        return rules


def _scheme(*, tls: bool) -> str:
    return "https" if tls else "http"
