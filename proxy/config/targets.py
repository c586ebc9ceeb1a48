"""Check that the operator's rules for targets do not leak the proxy's credentials.

A client names its target, so a rule that an attacker's own host matches sends the credentials there. TLS does not help:
the attacker has a certificate for that host.
"""

import ipaddress
from collections.abc import Iterator

from proxy.common.errors import ConfigError
from proxy.config.methods import forwards_credentials
from proxy.config.types import Config

FIXED_LABELS_MIN = 2
"""This many whole labels at the end of a pattern are a registered domain; with fewer, strangers can register one."""
IPV4_PREFIX_MIN = 8
IPV6_PREFIX_MIN = 16
"""Shorter prefixes belong to no single organisation: registries give out no larger networks."""
_PRIVATE_IPV6 = ipaddress.IPv6Network("fc00::/7")


def check_targets(config: Config) -> None:
    """Refuse all hosts at all addresses, where there are credentials to lose. Raises ConfigError.

    Another proxy (``through_proxy``) is the only one that gets them, whatever the target is.
    """
    brokers = config.brokers
    secret = _credentials_at_risk(config)
    if secret is None or brokers.through_proxy or not (brokers.allowed_hosts or brokers.allowed_addresses):
        return
    hosts = next((pattern for pattern in brokers.allowed_hosts if is_publicly_registrable(pattern)), None)
    addresses = next(_overbroad_networks(brokers.allowed_addresses), None)
    if (brokers.allowed_hosts and hosts is None) or (brokers.allowed_addresses and addresses is None):
        return
    key, value = ("allowed_addresses", addresses) if hosts is None else ("allowed_hosts", hosts)
    other = "allowed_addresses" if key == "allowed_hosts" else "allowed_hosts"
    raise ConfigError(
        f'brokers.{key}: with "{value}", and no narrower brokers.{other}, any client may name a host of its own as the '
        f"broker (proxy_to_broker_url) and be sent {secret}. Leave both keys out: brokers of brokers.service_url need "
        'no entry. Or name the brokers, as in brokers.allowed_hosts = ["*.pulsar-broker.ns.svc.cluster.local"] or '
        'brokers.allowed_addresses = ["10.0.0.0/8"]'
    )


def _credentials_at_risk(config: Config) -> str | None:
    """Return which credentials a target would receive; None where there are none."""
    brokers = config.brokers
    if brokers.credentials is not None:
        return "the proxy's own credentials (brokers.credentials)"
    if brokers.tls.certificate:
        return "the proof of the proxy's own certificate (brokers.tls.certificate)"
    if forwards_credentials(config):
        return "clients' credentials (brokers.forward_authorization_credentials)"
    return None


def is_publicly_registrable(pattern: str) -> bool:
    """Return True if anyone can register a host name that a pattern of ``allowed_hosts`` matches."""
    last = max(pattern.rfind(character) for character in "*?]")
    if last < 0:
        return False
    whole_labels = pattern[last + 1 :].split(".")[1:]
    return sum(map(bool, whole_labels)) < FIXED_LABELS_MIN


def _overbroad_networks(networks: tuple[str, ...]) -> Iterator[str]:
    """Yield the networks of ``allowed_addresses``, merged, that are wider than any single organisation's."""
    if "*" in networks:
        yield "*"
        return
    parsed = [ipaddress.ip_network(network) for network in networks]
    for v4 in ipaddress.collapse_addresses(one for one in parsed if isinstance(one, ipaddress.IPv4Network)):
        if v4.prefixlen < IPV4_PREFIX_MIN:
            yield str(v4)
    for v6 in ipaddress.collapse_addresses(one for one in parsed if isinstance(one, ipaddress.IPv6Network)):
        if v6.prefixlen < IPV6_PREFIX_MIN and not v6.subnet_of(_PRIVATE_IPV6):
            yield str(v6)
