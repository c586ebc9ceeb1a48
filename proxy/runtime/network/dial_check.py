"""Check of a lookup worker's answer, before a worker dials it: the lookup worker may have been taken over.

The rules are those that the lookup worker itself has applied (proxy.runtime.network.dial_rules). What they need to know
of the brokers of ``brokers.service_url`` the worker that dials asks DNS itself, and only where a port or an address is
of no use otherwise.
"""

from collections.abc import Iterable

import trio

from proto.addresses import HostPort, parse_broker_url
from proxy.config.types import Brokers
from proxy.runtime.dns.resolver import ResolutionFailed, Resolver, is_address
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.dial_rules import Address, DialRules, TargetDenied, effective_address, forbidden_reason


class DialCheck:
    """Check of brokers and their addresses. DNS queries run in ``nursery``."""

    def __init__(self, config: Brokers, nursery: trio.Nursery) -> None:
        self._rules = DialRules(config)
        self._through_proxy = config.through_proxy
        self._url = parse_broker_url(config.service_url)
        self._hosts = list(self._url.hosts)
        """Those of SRV records, once DNS has said them. They, and their addresses, count while DNS fails, as in lookup
        workers.
        """
        self._found: dict[str, frozenset[Address]] = {}
        self._resolver = Resolver(
            nursery,
            timeout_s=seconds(config.connect_timeout_ms),
            ttl_max_s=seconds(config.dns_ttl_max_ms),
        )

    async def check_target(self, broker: HostPort, addresses: Iterable[str]) -> None:
        """Raise TargetDenied where a broker may not be dialled at one of these addresses, or at its port."""
        ports = {host.port for host in self._url.hosts}
        if not self._is_port_allowed(broker.port, ports) and not self._url.hosts:  # SRV records say which ports
            ports = {host.port for host in await self._own_hosts()}
        if not self._is_port_allowed(broker.port, ports):
            self._rules.check_port(broker, ports)
            raise TargetDenied("port", f"{broker}: its port is not that of the next proxy")
        try:
            for text in addresses:
                await self._check_address(broker, text)
        except ValueError as error:
            raise TargetDenied("malformed", f"{broker}: {error}") from None

    def _is_port_allowed(self, port: int, own_ports: set[int]) -> bool:
        return port in own_ports or (not self._through_proxy and self._rules.allows_port(port, own_ports))

    async def _check_address(self, broker: HostPort, text: str) -> None:
        reached, rules = effective_address(text), self._rules
        if not reached.is_loopback and forbidden_reason(reached) is None:
            return  # nearly always
        if not self._through_proxy:
            rules.check_not_forbidden(broker, text)
        if reached.is_loopback and not rules.is_other_loopback(text):
            return
        own = await self._own_addresses()
        # The next proxy is wherever the operator's name for it leads, and nowhere else.
        at_own = reached in own if self._through_proxy else any(address.is_loopback for address in own)
        if not at_own:
            rules.check_not_forbidden(broker, text)
            rules.check_loopback(broker, text, any_at_loopback=False)

    async def _own_hosts(self) -> list[HostPort]:
        """Return the hosts of ``brokers.service_url``, those of SRV records included; none while they are unknown."""
        for name in self._url.srv_names:
            try:
                services = await self._resolver.resolve_services(name)
            except ResolutionFailed:
                continue
            self._hosts = [service.target for service in services.services]
            break
        return self._hosts

    async def _own_addresses(self) -> set[Address]:
        """Return the addresses of these hosts."""
        for host in await self._own_hosts():
            name = host.host if self._url.hosts or is_address(host.host) else f"{host.host}."  # SRV: a whole name
            try:
                found = await self._resolver.resolve_addresses(name)
            except ResolutionFailed:
                continue
            self._found[host.host] = frozenset(map(effective_address, found.addresses))
        return {address for host in self._hosts for address in self._found.get(host.host, ())}
