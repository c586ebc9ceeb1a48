"""proxy.runtime.fairness.members_by_owner: order within an owner, and the owner with most."""

from __future__ import annotations

from proxy.runtime.fairness.members_by_owner import MembersByOwner


def test_members_of_an_owner_keep_their_order_and_no_owner_stays_without_any() -> None:
    members: MembersByOwner[int] = MembersByOwner()
    assert (members.owner_with_most(), members.oldest(""), members.newest("a")) == ("", None, None)
    for number in range(3):
        members.add("a", number)
    members.add("b", 7)
    assert (members.owner_with_most(), members.oldest("a"), members.newest("a"), members.count) == ("a", 0, 2, 4)
    for number in (1, 2, 0):
        members.remove("a", number)
    assert (members.owner_with_most(), members.most, members.count_of("a"), members.count) == ("b", 1, 0, 1)
    members.remove("b", 7)
    assert (members.most, members.count, members._members, members._owners_with) == (0, 0, {}, {})
