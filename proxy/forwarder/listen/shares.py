"""Shares of the connections that a forwarder may have: where all are taken, the owner with most gives way.

An owner alone may take them all, as long as no other wants in. A newcomer whose owner has fewer then gets in by a
connection of the owner with most: the one that came last. An owner that holds no more than 1 / KEPT_PARTS of the
places loses none, however many others come: many addresses, or many principals of one issuer, cannot drive it out. So
it takes KEPT_PARTS owners together to keep all others out.
"""

from collections.abc import Callable

from proxy.runtime.fairness.members_by_owner import MembersByOwner

KEPT_PARTS = 8


class Place:
    """A place that an owner holds, "" once it is left; ``give_way`` closes the connection for another owner's."""

    __slots__ = ("give_way", "owner")

    def __init__(self, owner: str, give_way: Callable[[], None]) -> None:
        self.owner = owner
        self.give_way = give_way


class ConnectionShares:
    """The places of one forwarder, for connections of which the owner is known."""

    def __init__(self, places: int) -> None:
        self._held: MembersByOwner[Place] = MembersByOwner()
        self.resize(places)

    def resize(self, places: int) -> None:
        """Change the number of places; those that are held stay."""
        self._places = places
        self._kept = max(1, places // KEPT_PARTS)

    def can_make_room(self, owner: str = "") -> bool:
        """Return whether some connection would give way to one of ``owner``; "": of any owner but the one with most."""
        held = self._held
        return held.most > self._kept and held.most > held.count_of(owner) + 1

    def take_place(self, owner: str, give_way: Callable[[], None]) -> Place | None:
        """Take a place for an owner, another's if none is free; return None if none gives way."""
        if self._held.count >= self._places:
            if not self.can_make_room(owner):
                return None
            largest = self._held.newest(self._held.owner_with_most())
            assert largest is not None  # the owner with most has some
            self.leave_place(largest)  # first: to close it may take its time
            largest.give_way()
        return self.adopt_place(owner, give_way)

    def adopt_place(self, owner: str, give_way: Callable[[], None]) -> Place:
        """Take a place for a connection that has been let in before, whatever is free."""
        place = Place(owner, give_way)
        self._held.add(owner, place)
        return place

    def leave_place(self, place: Place) -> None:
        """Leave a place, if it has not been taken away."""
        if place.owner:
            self._held.remove(place.owner, place)
            place.owner = ""
