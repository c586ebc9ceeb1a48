"""Rules for relay targets, the ``proxy_to_broker_url`` of a CONNECT (PIP-1, step 1).

A client names the broker it wants, and the broker is shown the proxy's own credentials: so these rules guard against
giving them to any other machine, and against using the proxy to reach anything else. A target is allowed if it is a
broker of ``brokers.service_url`` (lookup.brokers.configured), or if the operator's further rules have it. Each target
is checked each time (PIP-307): the port, then the host and every address that it resolves to. The caller dials exactly
an address that was checked, so no second answer of a name server can lead elsewhere. A name's addresses are kept for
their TTL, and may be used for as long again (10 s at most) while they are resolved in the background.

A client may name the other port of a broker, which has TLS where ``brokers.service_url`` has none, or the reverse
(lookup.brokers.port_pairs). The port that belongs to it on the same host is then checked and dialled instead, by the
same rules as if the client had named it: no host and no port becomes a target that was none before. So it is safe that
Pulsar's own pair, 6650 and 6651, needs no setting.

A target that is a broker only by its address is dialled under the name by which the operator knows that broker: behind
an address that many share, the name (TLS's server_name) decides which machine answers, and a certificate for a client's
own name proves nothing.

Rules that hold whatever the target's name is (ports, addresses that are never dialled, loopback) are
proxy.runtime.network.dial_rules: a forwarder applies them once more.
"""

import fnmatch
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lookup.brokers.configured import LABELS_MIN, ConfiguredBrokers, exact_address
from lookup.brokers.discovery import BrokerDiscovery, Endpoint
from lookup.brokers.port_pairs import PortPairs
from lookup.targets.name_resolver import TargetResolver
from proto.addresses import AddressInvalid, HostPort, PortMissing, parse_host_port
from proxy.config import types
from proxy.runtime.dns.resolver import ResolutionFailed, is_address
from proxy.runtime.network.dial_rules import Address, DialRules, TargetDenied, effective_address, port_denied


@dataclass(frozen=True, slots=True)
class Target:
    """A broker that may be dialled, at these addresses and no others."""

    broker: HostPort
    addresses: tuple[str, ...]


ANY_BROKER_MAX = 5
"""How many brokers are named to a client that takes any: each but the first is tried where those before it failed."""

LocateBroker = Callable[[], Awaitable[Target]]
"""Where a broker is to be dialled, and under which name. May raise TargetDenied."""


class KnownBrokers(Protocol):
    """What the rules need to know of the configured brokers: a BrokerDirectory, or the hosts of an HTTP upstream."""

    port_pairs: PortPairs
    discovery: BrokerDiscovery

    @property
    def none_known_reason(self) -> str: ...  # noqa: D102 -- see BrokerDirectory, here and below
    def listed_brokers(self) -> Sequence[HostPort]: ...  # noqa: D102
    def brokers_in_order(self) -> list[Endpoint]: ...  # noqa: D102
    def next_broker(self) -> Endpoint | None: ...  # noqa: D102


class TargetRules:
    """The operator's rules for targets, compiled from the configuration."""

    def __init__(self, config: types.Brokers, resolver: TargetResolver, brokers: KnownBrokers) -> None:
        self._dial_rules = rules = DialRules(config)
        self._further, self._further_ports = rules.has_further_targets, rules.further_ports
        self._networks = rules.networks
        self._hosts = [re.compile(fnmatch.translate(pattern.lower())) for pattern in config.allowed_hosts]
        self._any_address = "*" in config.allowed_addresses or not config.allowed_addresses
        self._resolver = resolver
        self._brokers = brokers
        self._through_proxy = config.through_proxy

    async def check_target(self, text: str, owner: str = "") -> Target:
        """Return where to dial for the target that a client names. Raises TargetDenied. ``owner``: see check_broker."""
        try:
            broker = parse_host_port(text)
        except PortMissing as error:
            raise TargetDenied("no_port", f"{error}: a target is host:port") from None
        except AddressInvalid as error:
            raise TargetDenied("malformed", str(error)) from None
        if not self._brokers.discovery.configured.hosts:  # SRV records say which ports there are
            await self._brokers.discovery.wait_until_all_resolved()
        return await self.check_broker(self._at_port_to_dial(broker), owner)

    async def check_server_name(self, name: str, owner: str = "") -> Target:
        """Return where to dial for the host that a client's TLS names (SNI). Raises TargetDenied. ``owner``: as above.

        The port is the one that ``brokers.service_url`` has with this host, else the first of its ports. The client's
        TLS goes on as it is, name and all: so a name that is a broker's only by its address is denied, since behind an
        address that many share it would choose among machines that are no brokers.
        """
        if not self._brokers.discovery.configured.hosts:  # SRV records say which ports there are
            await self._brokers.discovery.wait_until_all_resolved()
        port = self._port_of(name)
        if port is None:
            raise TargetDenied("unknown_host", self._brokers.none_known_reason)
        target = await self.check_broker(HostPort(name, port), owner)
        if target.broker.host != name:
            raise TargetDenied("host", f"{name!r} is a broker's name only by its address, where TLS is passed through")
        return target

    def _port_of(self, host: str) -> int | None:
        """Return the port of a host's broker, in the kind of ``brokers.service_url``; None while none is known."""
        by_host: dict[str, int] = {}
        for broker in self._brokers.listed_brokers():
            by_host.setdefault(broker.host.lower(), broker.port)
        return by_host.get(host, next(iter(by_host.values()), None))

    async def check_broker(self, broker: HostPort, owner: str = "") -> Target:
        """Return where to dial for a broker, whose port is of the kind that the proxy dials. Raises TargetDenied.

        ``owner``: the owner of the DNS query; empty for a redirect. With ``brokers.through_proxy`` the result is a
        proxy of the operator's, which checks the target's addresses itself.
        """
        self.check_port(broker)
        if self._through_proxy:
            return await self._next_proxy(broker)
        try:
            found = await self._resolver.resolve_addresses(broker.host, owner=owner)
        except ResolutionFailed as error:
            raise TargetDenied("unknown_host", str(error)) from None
        if not self._brokers.discovery.configured.has_host(broker.host):
            await self._brokers.discovery.wait_until_all_resolved()
        return self._allowed_target(
            _TargetQuery(broker, found.name, self._brokers.discovery.configured), found.addresses
        )

    def _allowed_target(self, asked: "_TargetQuery", addresses: Iterable[str]) -> Target:
        """Return a target at its allowed addresses; raise TargetDenied where it has none."""
        denied: TargetDenied | None = None
        allowed: dict[HostPort, list[str]] = {}
        for address in addresses:
            try:
                allowed.setdefault(self._check_address(asked, address), []).append(address)
            except TargetDenied as error:
                denied = denied or error
        if not allowed:
            raise denied or TargetDenied("unknown_host", f"{asked.broker} has no address")
        name, chosen = next(iter(allowed.items()))  # of several brokers the first
        return Target(name, tuple(chosen))

    async def targets_for_any_broker(self) -> list[Target]:
        """Return brokers for a client that takes any of them (Pulsar 5), at most ANY_BROKER_MAX, in the order to try
        them.

        They take turns, and ejected ones come last. Their addresses are checked by the same rules as those of a target.
        Raises TargetDenied where none is left.
        """
        await self._brokers.discovery.wait_until_any_found()
        denied: TargetDenied | None = None
        targets = []
        for endpoint in self._brokers.brokers_in_order():
            try:
                targets.append(self._configured_target(endpoint))
            except TargetDenied as error:
                denied = denied or error
        if not targets:
            raise denied or TargetDenied("unknown_host", self._brokers.none_known_reason)
        return targets[:ANY_BROKER_MAX]

    def _configured_target(self, endpoint: Endpoint) -> Target:
        """Return a configured broker at its allowed addresses; raise TargetDenied where it has none."""
        if self._through_proxy:
            return Target(*endpoint.key)
        whole_name = endpoint.host.lower().removesuffix(".")
        asked = _TargetQuery(endpoint.name, whole_name, self._brokers.discovery.configured)
        return self._allowed_target(asked, endpoint.addresses)

    async def _next_proxy(self, broker: HostPort) -> Target:
        """Return the next proxy of the operator's: no byte goes anywhere else, whatever the client named."""
        if self._hosts and not self._has_host(broker.host):
            raise TargetDenied("host", f"{broker}: its host is not in brokers.allowed_hosts")
        await self._brokers.discovery.wait_until_any_found()
        proxy = self._brokers.next_broker()
        if proxy is None:
            raise TargetDenied("unknown_host", self._brokers.none_known_reason)
        return Target(*proxy.key)

    def _at_port_to_dial(self, broker: HostPort) -> HostPort:
        """Return a client's target, at the port to dial where the client named the broker's other one.

        A port of ``brokers.service_url`` is of its kind, so it is dialled as it is; a pair that leads to no broker's
        port does not count. Another proxy gets the client's own words, and does this itself.
        """
        configured = self._brokers.discovery.configured
        if self._through_proxy or broker.port in configured.ports:
            return broker
        port = self._brokers.port_pairs.port_to_dial(broker)
        if port is None or not self._dial_rules.allows_port(port, configured.ports):
            return broker
        return HostPort(broker.host, port)

    def check_port(self, broker: HostPort) -> None:
        """Apply the rule that needs no name server; raise TargetDenied."""
        self._dial_rules.check_port(broker, self._brokers.discovery.configured.ports)

    def _check_address(self, asked: "_TargetQuery", text: str) -> HostPort:
        """Return the name under which to dial one address of a target; raise TargetDenied."""
        self._dial_rules.check_not_forbidden(asked.broker, text)
        name = self._apply_operator_rules(asked, text)
        self._dial_rules.check_loopback(asked.broker, text, any_at_loopback=asked.configured.any_at_loopback)
        return name

    def _apply_operator_rules(self, asked: "_TargetQuery", text: str) -> HostPort:
        """Return the name under which to dial an address by the operator's rules; raise TargetDenied."""
        broker = asked.broker
        is_own_port = self._dial_rules.is_broker_port(broker.port, asked.configured.ports)
        is_own = asked.configured.has_host(broker.host) or asked.configured.has_name(asked.name)
        if is_own and is_own_port:
            return broker
        further = self._further and self._has_host(broker.host, asked.name) and self._has_address(text)
        if further and self._hosts and broker.port in self._further_ports:
            return broker
        known = asked.configured.broker_at(text, broker.port)
        if known is not None and is_own_port:
            return HostPort(known.host, broker.port)
        if not further and not is_own and known is None:
            raise self._denial_with_advice(asked, text)
        if not further or broker.port not in self._further_ports:
            raise TargetDenied("port", port_denied(broker))
        return broker

    def _has_host(self, *names: str) -> bool:
        """Return True if brokers.allowed_hosts is empty, or has a host by one of its names."""
        plain = [name.lower().removesuffix(".") for name in names if name]
        return not self._hosts or any(pattern.match(name) for pattern in self._hosts for name in plain)

    def _has_address(self, text: str) -> bool:
        """Return True if brokers.allowed_addresses is empty, or has an address.

        Of a tunnel's address both ends must be allowed: by public routes for 2002::/16 and 2001::/32 any machine may
        answer.
        """
        if self._any_address:
            return True
        reached, exact = effective_address(text), exact_address(text)
        both = {reached, exact} if _is_tunnel(exact) else {reached}
        return all(any(address in network for network in self._networks) for address in both)

    def _denial_with_advice(self, asked: "_TargetQuery", text: str) -> TargetDenied:
        """Make the denial, with the settings to change if the target is a broker of the operator's all the same."""
        broker, literal = asked.broker, is_address(asked.broker.host)
        host_good = self._has_host(broker.host, asked.name)
        keys = []
        if not host_good or not (self._further or literal):
            keys.append(
                _config_line("allowed_hosts", host_pattern_for(asked.name or broker.host), further=bool(self._hosts))
            )
        if (literal and not self._further) or not self._has_address(text):
            address = text.partition("%")[0]
            keys.append(_config_line("allowed_addresses", address, further=bool(self._networks)))
        where = f"{broker} is at {text}, no broker's of brokers.service_url (its hosts, below them, at their addresses)"
        if self._further:
            where += f", and not in brokers.{'allowed_addresses' if host_good else 'allowed_hosts'}"
        advice = f"if it is a broker of yours, set {' and '.join(keys)}"
        return TargetDenied("address" if self._further and host_good else "host", f"{where}; {advice}")


@dataclass(frozen=True, slots=True)
class _TargetQuery:
    """A target, the whole name that its host was found under, and the brokers that are known then."""

    broker: HostPort
    name: str
    configured: ConfiguredBrokers


def _config_line(key: str, value: str, *, further: bool) -> str:
    """Write a key with one more value as an operator would."""
    return f'brokers.{key} = [{"…, " if further else ""}"{value}"]'


def host_pattern_for(host: str) -> str:
    """Return what to write into brokers.allowed_hosts for a broker of this host.

    It covers all names below the same parent, where that is so long that others have no names there; otherwise the host
    alone.
    """
    parent = host.lower().removesuffix(".").partition(".")[2]
    return f"*.{parent}" if parent.count(".") + 1 >= LABELS_MIN and not is_address(host) else host


def _is_tunnel(address: Address) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and bool(address.sixtofour or address.teredo)
