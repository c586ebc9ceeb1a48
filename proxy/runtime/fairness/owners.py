"""Owners of a fair share: the name under which clients count together, wherever a worker shares something fairly.

A principal is one owner, over all of its connections. A client without one, or with the anonymous role, which any
client may have, counts by its IP address. Principals choose their names and addresses have a form of their own, so each
kind has a name space of its own: a principal that is named like an address shares nothing with that address.
"""

from functools import lru_cache

from proto.addresses import client_network

ADDRESSES_MAX = 4096
"""Clients' IP addresses of which the network is remembered: they send many requests, by many connections."""

ADDRESS_CHARACTERS_MAX = 256
"""Of a client's address, which a captured forwarder can make as long as an RPC frame."""

_PRINCIPAL = "principal "


def owner_of(principal: str, client_address: str, anonymous_role: str = "") -> str:
    """Name the owner of what a client takes: its principal, or its IP address (of IPv6 its /64 network).

    ``principal``: empty where the client is not, or not yet, authenticated. ``client_address``: with its port.
    ``anonymous_role``: ``authentication.anonymous_role``; empty where there is none.
    """
    if principal and principal != anonymous_role:
        return f"{_PRINCIPAL}{principal}"
    client_address = client_address[:ADDRESS_CHARACTERS_MAX]
    return f"address {_network_of(client_address.rpartition(':')[0]) or client_address}"


def name_of_principal(owner: str) -> str | None:
    """Return the principal that an owner is; None: it is an address."""
    return owner.removeprefix(_PRINCIPAL) if owner.startswith(_PRINCIPAL) else None


@lru_cache(ADDRESSES_MAX)
def _network_of(host: str) -> str:
    """Return the network of a client's IP address; empty if it is none."""
    address = f"{host}:"
    network = client_network(address)
    return "" if network == address else network
