"""proxy.runtime.fairness.owners: which clients count together, and that names and addresses never meet."""

import pytest

from proxy.runtime.fairness.owners import ADDRESS_CHARACTERS_MAX, owner_of


@pytest.mark.parametrize(
    ("principal", "address", "owner"),
    [
        ("alice", "192.0.2.1:4000", "principal alice"),
        ("", "192.0.2.1:4000", "address 192.0.2.1"),
        ("", "[2001:db8:0:1:a:b:c:d]:4000", "address 2001:db8:0:1::/64"),
        ("", "[2001:db8:0:1::2]:4001", "address 2001:db8:0:1::/64"),
        ("", "[::ffff:192.0.2.1]:4001", "address 192.0.2.1"),
        ("", "", "address "),
    ],
)
def test_the_owner_is_the_principal_or_without_one_the_client_network(principal: str, address: str, owner: str) -> None:
    """Security: without authentication a machine counts once, however many connections it opens."""
    assert owner_of(principal, address) == owner


def test_the_anonymous_role_counts_by_address() -> None:
    """Security: any client may have the anonymous role, so it is no principal that shares something as one."""
    assert owner_of("guest", "192.0.2.1:4000", "guest") == owner_of("", "192.0.2.1:4001") == "address 192.0.2.1"
    assert owner_of("alice", "192.0.2.1:4000", "guest") == "principal alice"


@pytest.mark.parametrize("principal", ["192.0.2.1", "2001:db8:0:1::/64", "address 192.0.2.1", "address "])
def test_a_principal_that_is_named_like_an_address_is_another_owner(principal: str) -> None:
    """Security: such a principal would use up the share of an address, or hide behind it."""
    addresses = ("192.0.2.1:4000", "[2001:db8:0:1::2]:4000", "")
    assert owner_of(principal, "198.51.100.1:4000") not in {owner_of("", address) for address in addresses}


def test_of_an_address_that_a_captured_forwarder_invents_only_the_beginning_is_remembered() -> None:
    """Security: owners are cached, and an RPC frame has room for an address of megabytes."""
    assert owner_of("", "a" * 1_000_000) == f"address {'a' * ADDRESS_CHARACTERS_MAX}"
