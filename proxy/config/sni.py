"""Listeners that pass TLS through to the broker that the client's TLS names (PIP-60), and the port that is dialled."""

from proto.addresses import parse_broker_url, speaks_tls
from proxy.config.types import Brokers, Config


def routes_sni(config: Config) -> bool:
    """Return whether a listener passes TLS through."""
    return any(listener.routing == "sni" for listener in config.listener)


def tls_port(brokers: Brokers, port: int) -> int | None:
    """Return the port with TLS of a broker, given its port in ``brokers.service_url``; None: it is not configured.

    What brokers say of their ports does not count here: only ``brokers.port_pairs`` does.
    """
    if speaks_tls(brokers.service_url):
        return port
    return next((with_tls for plain, with_tls in brokers.port_pairs if plain == port), None)


def has_tls_port(brokers: Brokers) -> bool:
    """Return whether a broker of ``brokers.service_url`` has a port with TLS, or may have one by SRV records."""
    if hosts := parse_broker_url(brokers.service_url).hosts:
        return any(tls_port(brokers, host.port) is not None for host in hosts)
    return speaks_tls(brokers.service_url) or bool(brokers.port_pairs)
