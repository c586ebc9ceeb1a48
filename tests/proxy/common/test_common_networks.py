"""proxy.common.networks: what counts as one address, and which addresses clients may have."""

from __future__ import annotations

import pytest

from proxy.common.networks import NetworkRules, network_of


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::/64", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_an_ipv6_address_counts_as_its_64_bit_network(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("allowed", "denied", "address", "expected"),
    [
        ([], [], "no address", True),
        (["10.0.0.0/8"], [], "10.1.2.3", True),
        (["10.0.0.0/8"], [], "11.1.2.3", False),
        (["10.0.0.0/8"], [], "::ffff:10.1.2.3", True),
        (["10.0.0.0/8"], [], "::FFFF:0a01:0203", True),
        (["10.0.0.0/8"], [], "::10.1.2.3", False),
        (["10.0.0.0/8"], [], "64:ff9b::10.1.2.3", False),
        (["10.0.0.0/8"], [], "2001:db8::1", False),
        (["10.0.0.0/8"], [], "no address", False),
        (["10.0.0.0/8"], [], "", False),
        (["10.0.0.0/8"], [], "010.1.2.3", False),
        (["::ffff:10.0.0.0/104"], [], "10.1.2.3", True),
        (["::/0"], [], "10.1.2.3", False),
        (["::/0"], [], "::ffff:10.1.2.3", False),
        (["10.0.0.0/8"], ["10.1.0.0/16"], "10.1.2.3", False),
        (["10.0.0.0/8"], ["10.1.0.0/16"], "10.2.2.3", True),
        ([], ["10.1.0.0/16"], "10.1.2.3", False),
        ([], ["10.1.0.0/16"], "::ffff:10.1.2.3", False),
        ([], ["10.1.0.0/16"], "2001:db8::1", True),
        ([], ["10.1.0.0/16"], "no address", False),
        (["fe80::/10"], [], "fe80::1%eth0", True),
        ([], ["fe80::/10"], "fe80::1%10.0.0.1", False),
    ],
)
def test_networks_of_clients(allowed: list[str], denied: list[str], address: str, *, expected: bool) -> None:
    assert NetworkRules(allowed, denied).allows(address) is expected
