"""Stand-ins for unknown users: what a client sees of one (a cost in time, iterations, a salt) is like a real user's.

An unknown name follows one entry of the users' file, chosen by hashes of the name that are keyed by the entries
themselves (rendezvous hashing, weighted). So unknown names have each cost as often as the file does, and all workers,
replicas and restarts agree without a key to share: a random one would give an unknown user, but no real one, another
salt in each replica. When an entry is changed, added or removed, only the names that follow it change with it, about as
many of the unknown as of the real ones. One key for all would tell them apart: at its change only real users would stay
as they are, and without one only real users would ever change.
"""

import hashlib
import math
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

CANDIDATES_PER_SHAPE_MAX = 16
"""Entries of one shape that names may follow: bounds the hashes for each login, not the shapes."""

_KEY_BYTES = 32
_HASH_BYTES = 8
_HASH_UNIT = 2.0 ** (-8 * _HASH_BYTES)

EntryT = TypeVar("EntryT")


class StandIn(NamedTuple, Generic[EntryT]):
    """The entry that a name follows, and a key that is derived from its secret."""

    entry: EntryT
    key: bytes


class StandIns(Generic[EntryT]):
    """Choice of a stand-in for each name, in steps that depend on the file alone."""

    def __init__(self, entries: Iterable[tuple[EntryT, Hashable, bytes]]) -> None:
        """``entries``: each with its shape, which is all that a client can see of it, and a secret of it."""
        by_shape: dict[Hashable, list[StandIn[EntryT]]] = {}
        for entry, shape, secret in entries:
            key = hashlib.blake2b(secret, digest_size=_KEY_BYTES, person=b"stand-ins").digest()
            by_shape.setdefault(shape, []).append(StandIn(entry, key))
        self._candidates: list[tuple[StandIn[EntryT], float, hashlib.blake2b]] = []
        for alike in by_shape.values():
            # The smallest keys: a sample that one changed entry changes little.
            chosen = sorted(alike, key=lambda stand_in: stand_in.key)[:CANDIDATES_PER_SHAPE_MAX]
            for stand_in in chosen:
                keyed = hashlib.blake2b(key=stand_in.key, digest_size=_HASH_BYTES)
                self._candidates.append((stand_in, len(alike) / len(chosen), keyed))

    def choose(self, name: str) -> StandIn[EntryT]:
        """Return the stand-in of a name: each entry's share of the names is its weight."""
        data = name.encode()
        nearest, stand_in = math.inf, self._candidates[0][0]
        for candidate, weight, keyed in self._candidates:
            hashed = keyed.copy()
            hashed.update(data)
            number = int.from_bytes(hashed.digest()) + 1
            distance = -math.log(number * _HASH_UNIT) / weight  # exponentially distributed
            if distance < nearest:
                nearest, stand_in = distance, candidate
        return stand_in
