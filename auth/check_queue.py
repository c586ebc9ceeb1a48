"""Queue of credential checks that take long: bounded, and fair between client addresses and users.

Any unauthenticated client can cause a check, so the queue is served round robin by client address: many checks for one
address do not delay the first one of another. An address at which a check has failed lately comes after those where
none has, and one at which a user has logged in lately before them. Where several addresses of a network have failed,
all others of it count as failed that have not seen a login: strangers would always have another one. When the queue is
full, those that failed give way. All this decides only the order of checks, never their outcome, and nothing is
remembered by a user's name that a client has merely claimed: it could be used to keep that user out, or to find out
whether there is one.

A client that brings the very credential with which its user logged in lately goes first, round robin by user: where all
clients have one address (behind a load balancer), this keeps unauthenticated ones from delaying returning users.
"""

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from secrets import token_bytes
from typing import Generic, NamedTuple, Never, TypeVar

import trio

from auth.state import AuthenticationDenied, ClientContext
from proto.addresses import client_network, wide_network
from proto.connect_rules import OVERLOADED, is_client_fault
from proxy.common.eager import enter_task
from proxy.runtime.fairness.fair_queue import FairQueue

CHECKS_PER_SLOT_MAX = 128
"""Running or waiting. With bcrypt's usual cost the last one of them still ends within a handshake's time."""

FAILED_ADDRESSES_MAX = 1024
FAILED_FOR_S = 60.0
FAILED_IN_NETWORK_MIN = 4
"""Addresses of a network that have to fail before the others of it count as failed."""

LOGIN_ADDRESSES_MAX = 4096
PROVED_USERS_MAX = 4096
PROVED_FOR_S = 600.0

TAG_BYTES = 2
"""Of what is kept of a credential: enough that guessing one is of no use, too little to find the password by it."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")


class ExpiringMap(Generic[KeyT, ValueT]):
    """Map whose values expire after ``lifetime_s``, bounded to the last ``entries_max`` keys."""

    def __init__(self, *, entries_max: int, lifetime_s: float) -> None:
        self._entries_max = entries_max
        self._lifetime_s = lifetime_s
        self._entries: OrderedDict[KeyT, tuple[ValueT, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember_value(self, key: KeyT, value: ValueT) -> None:
        """Remember a value from now on."""
        self._entries.pop(key, None)
        while len(self._entries) >= self._entries_max:
            self._entries.popitem(last=False)
        self._entries[key] = value, trio.current_time() + self._lifetime_s

    def recent_value(self, key: KeyT) -> ValueT | None:
        """Return the value remembered last, or None where it has expired or there is none."""
        value, until = self._entries.get(key, (None, 0.0))
        return value if until > trio.current_time() else None

    def forget_key(self, key: KeyT) -> None:
        """Forget a key's value."""
        self._entries.pop(key, None)


class _Priority(IntEnum):
    """Priority of an owner; lower values go first, and have more places."""

    PROVED = 0
    """A user whose credential was proved lately, or an address at which one has logged in and no check has failed."""
    ADDRESS = 1
    ADDRESS_THAT_FAILED = 2


class _Owner(NamedTuple):
    """Owner of a share: a user whose credential was proved lately, or else an address, in its wide network."""

    is_user: bool
    name: str
    wide_network: str = ""


@dataclass(slots=True, eq=False)
class _WaitingCheck:
    """One check that waits."""

    decided: trio.Event = field(default_factory=trio.Event)
    started: bool = False


class CheckQueue:
    """Queue of checks of one kind, ``slots`` at a time; ``key`` names the setting that an overloaded operator may
    raise.
    """

    def __init__(self, *, slots: int, key: str) -> None:
        self._key = key
        self._queue: FairQueue[_Owner, _WaitingCheck] = FairQueue(
            slots=slots,
            waiting_max=slots * (CHECKS_PER_SLOT_MAX - 1),
            rank=self._priority_of,
            rank_max=max(_Priority),
        )
        self._failed: ExpiringMap[str, bool] = ExpiringMap(entries_max=FAILED_ADDRESSES_MAX, lifetime_s=FAILED_FOR_S)
        self._failed_in_network: ExpiringMap[str, frozenset[str]] = ExpiringMap(
            entries_max=FAILED_ADDRESSES_MAX, lifetime_s=FAILED_FOR_S
        )
        self._logins: ExpiringMap[str, bool] = ExpiringMap(entries_max=LOGIN_ADDRESSES_MAX, lifetime_s=PROVED_FOR_S)
        self._proved: ExpiringMap[str, bytes] = ExpiringMap(entries_max=PROVED_USERS_MAX, lifetime_s=PROVED_FOR_S)
        self._tag_key = token_bytes(32)

    @property
    def waiting_count(self) -> int:
        """How many checks wait."""
        return self._queue.waiting_count

    async def run_check(
        self, client: ClientContext, check: Callable[[], Awaitable[ResultT]], *, proved_user: str = ""
    ) -> ResultT:
        """Run a check once it is first in the queue.

        ``proved_user``: the user of a credential that ``matches_recent_proof``. Raises AuthenticationDenied where too
        many checks wait, or as the check does, which is remembered of the address.
        """
        await enter_task()
        owner = _Owner(True, proved_user) if proved_user else _address_owner(client)
        turn = _WaitingCheck()
        dropped = self._queue.enqueue(owner, turn)
        if dropped is not None:
            dropped[1].decided.set()
        self._start_waiting_checks()
        try:
            await turn.decided.wait()
            return await (check() if turn.started else self._refuse_check(owner))
        except AuthenticationDenied as denied:
            if is_client_fault(denied.reason):  # before the slot is given back: it decides who is next
                self._remember_failure(_address_owner(client))
            raise
        finally:
            if turn.started:
                self._queue.release_slot(owner)
            else:
                self._queue.remove_waiting(owner, turn)
            self._start_waiting_checks()

    def _start_waiting_checks(self) -> None:
        while (taken := self._queue.start_next()) is not None:
            _, turn = taken
            turn.started = True
            turn.decided.set()

    def _priority_of(self, owner: _Owner) -> _Priority:
        if owner.is_user:
            return _Priority.PROVED
        if self._failed.recent_value(owner.name):
            return _Priority.ADDRESS_THAT_FAILED
        if self._logins.recent_value(owner.name):
            return _Priority.PROVED
        failed = self._failed_in_network.recent_value(owner.wide_network) or ()
        return _Priority.ADDRESS if len(failed) < FAILED_IN_NETWORK_MIN else _Priority.ADDRESS_THAT_FAILED

    async def _refuse_check(self, owner: _Owner) -> Never:
        whose = "for this user" if owner.is_user else f"from {owner.name}"
        mine = self._queue.count_waiting(owner)
        text = (
            f"{self._queue.waiting_count} checks wait, {mine} of them {whose}; see {self._key} and cluster.auth_workers"
        )
        raise AuthenticationDenied(OVERLOADED, text)

    # ---- what is remembered

    def _remember_failure(self, address: _Owner) -> None:
        self._failed.remember_value(address.name, True)
        failed = self._failed_in_network.recent_value(address.wide_network) or frozenset()
        if len(failed) < FAILED_IN_NETWORK_MIN:
            failed |= {address.name}
        self._failed_in_network.remember_value(address.wide_network, failed)

    def remember_login(self, client: ClientContext) -> None:
        """Remember that a user has logged in at the client's address."""
        self._logins.remember_value(client_network(client.address), True)

    def remember_proof(self, user: str, secret: bytes) -> None:
        """Remember that this is the user's credential."""
        self._proved.remember_value(user, self._tag(user, secret))

    def matches_recent_proof(self, user: str, secret: bytes) -> bool:
        """Return True if this looks like the user's credential of lately: no proof, only good for a higher priority."""
        tag = self._tag(user, secret)  # of whatever user, for the time that it takes
        return hmac.compare_digest(self._proved.recent_value(user) or b"", tag)

    def forget_proof(self, user: str, secret: bytes) -> None:
        """Forget a proof that a wrong credential matched: the user's entry in the file has changed."""
        if self.matches_recent_proof(user, secret):
            self._proved.forget_key(user)

    def _tag(self, user: str, secret: bytes) -> bytes:
        return hashlib.blake2b(user.encode() + b"\0" + secret, key=self._tag_key, digest_size=TAG_BYTES).digest()


def _address_owner(client: ClientContext) -> _Owner:
    network = client_network(client.address)
    return _Owner(False, network, wide_network(network))
