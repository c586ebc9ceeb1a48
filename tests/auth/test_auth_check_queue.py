"""Whose check is next: addresses in turn, those that failed behind, proved users ahead; and what is remembered."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from auth import check_queue as checks
from auth.check_queue import (
    CHECKS_PER_SLOT_MAX,
    FAILED_ADDRESSES_MAX,
    FAILED_FOR_S,
    FAILED_IN_NETWORK_MIN,
    LOGIN_ADDRESSES_MAX,
    PROVED_FOR_S,
    PROVED_USERS_MAX,
    TAG_BYTES,
    CheckQueue,
    ExpiringMap,
)
from auth.state import AuthenticationDenied, ClientContext


def at(address: str, port: int = 1000) -> ClientContext:
    return ClientContext(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")


async def fail(made: CheckQueue, address: str, reason: str = "bad_password") -> None:
    """One check that fails."""

    async def check() -> None:
        await trio.lowlevel.checkpoint()
        raise AuthenticationDenied(reason)

    with pytest.raises(AuthenticationDenied, match=reason):
        await made.run_check(at(address, 7), check)


async def failed_at(address: str) -> CheckQueue:
    made = CheckQueue(slots=1, key="some.key")
    await fail(made, address)
    return made


class Line:
    """Checks that wait behind one that is running, and the order in which they were made."""

    def __init__(self, nursery: trio.Nursery, made: CheckQueue | None = None) -> None:
        self.checks = made or CheckQueue(slots=1, key="some.key")
        self.order: list[str] = []
        self.denied: dict[str, str] = {}
        self._nursery = nursery
        self._go = trio.Event()
        nursery.start_soon(self.checks.run_check, at("192.0.2.99"), self._go.wait)

    async def add(self, name: str, address: str, *, proved_user: str = "") -> trio.CancelScope:
        scope = trio.CancelScope()
        await trio.testing.wait_all_tasks_blocked()
        self._nursery.start_soon(partial(self._run, scope, name, at(address), proved_user=proved_user))
        await trio.testing.wait_all_tasks_blocked()
        return scope

    async def _run(self, scope: trio.CancelScope, name: str, client: ClientContext, *, proved_user: str) -> None:
        async def check() -> None:
            self.order.append(name)
            await trio.lowlevel.checkpoint()

        with scope:
            try:
                await self.checks.run_check(client, check, proved_user=proved_user)
            except AuthenticationDenied as denied:
                self.denied[name] = f"{denied.reason}: {denied}"

    async def go(self) -> list[str]:
        self._go.set()
        await trio.testing.wait_all_tasks_blocked()
        return self.order


async def test_addresses_in_turn(nursery: trio.Nursery) -> None:
    line = Line(nursery)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await line.add(name, f"10.0.0.{ord(name[0])}")
    assert await line.go() == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_network_of_ipv6_is_one_address(nursery: trio.Nursery) -> None:
    """Whoever has one address of it has 2^64."""
    line = Line(nursery)
    for name, address in (
        ("a1", "2001:db8::1"),
        ("a2", "2001:db8::2"),
        ("a3", "2001:db8:0:0:f::"),
        ("b", "2001:db8:0:1::1"),
    ):
        await line.add(name, address)
    assert await line.go() == ["a1", "b", "a2", "a3"]


async def test_an_address_that_failed_comes_behind_those_that_did_not(nursery: trio.Nursery) -> None:
    line = Line(nursery, await failed_at("10.0.0.1"))
    for name, address in (("a1", "10.0.0.1"), ("a2", "10.0.0.1"), ("b1", "10.0.0.2"), ("b2", "10.0.0.2")):
        await line.add(name, address)
    assert await line.go() == ["b1", "b2", "a1", "a2"]


async def test_an_address_that_failed_has_its_turn_all_the_same(nursery: trio.Nursery) -> None:
    line = Line(nursery, await failed_at("10.0.0.1"))
    await line.add("failed", "10.0.0.1")
    for number in range(10):
        await line.add(f"other{number}", f"10.0.1.{number}")
    assert (await line.go()).index("failed") == 3


@pytest.mark.parametrize("reason", ["timeout", "bad_keytab", "issuer_unavailable"])
async def test_a_failure_of_ours_is_not_the_addresss(nursery: trio.Nursery, reason: str) -> None:
    made = CheckQueue(slots=1, key="some.key")
    await fail(made, "10.0.0.1", reason)
    line = Line(nursery, made)
    for name, address in (("a1", "10.0.0.1"), ("b1", "10.0.0.2")):
        await line.add(name, address)
    assert await line.go() == ["a1", "b1"]


async def test_failures_are_forgotten(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    line = Line(nursery, await failed_at("10.0.0.1"))
    await trio.sleep(FAILED_FOR_S + 0.1)
    for name, address in (("a1", "10.0.0.1"), ("b1", "10.0.0.2")):
        await line.add(name, address)
    assert await line.go() == ["a1", "b1"]


async def test_users_with_a_proved_credential_go_first_and_in_turn(nursery: trio.Nursery) -> None:
    line = Line(nursery)
    await line.add("stranger", "10.0.0.1")
    for name in ("alice1", "alice2", "bob1"):
        await line.add(name, "10.0.0.1", proved_user=name[:-1])
    assert await line.go() == ["alice1", "bob1", "alice2", "stranger"]


async def test_users_that_come_back_do_not_keep_newcomers_out(nursery: trio.Nursery) -> None:
    line = Line(nursery)
    await line.add("newcomer", "10.0.0.1")
    for number in range(10):
        await line.add(f"alice{number}", "10.0.0.2", proved_user="alice")
    assert (await line.go()).index("newcomer") == 3


async def test_a_user_is_no_address(nursery: trio.Nursery) -> None:
    """Whoever may choose names must not get another's turns by it."""
    line = Line(nursery)
    await line.add("a", "10.0.0.1", proved_user="10.0.0.1")
    await line.add("b", "10.0.0.1")
    assert len(line.checks._queue._waiting) == 2


# ---- bounds


async def test_a_newcomer_takes_the_place_of_the_newest_of_the_address_with_most(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS_PER_SLOT_MAX", 4)
    line = Line(nursery)
    for name in ("a1", "a2", "a3", "a4"):
        await line.add(name, "10.0.0.1")
    assert list(line.denied) == ["a4"]
    await line.add("b1", "10.0.0.2")
    await line.add("alice", "10.0.0.1", proved_user="alice")
    assert list(line.denied) == ["a4", "a3", "a2"]
    expected = "overloaded: 3 checks wait, 3 of them from 10.0.0.1; see some.key and cluster.auth_workers"
    assert line.denied["a4"] == expected
    assert sorted(await line.go()) == ["a1", "alice", "b1"]


async def test_a_single_address_may_fill_the_queue(nursery: trio.Nursery) -> None:
    """Where all clients come from one address, it is no worse than a queue without shares."""
    line = Line(nursery)
    client = at("10.0.0.1")
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(CHECKS_PER_SLOT_MAX + 9):
        nursery.start_soon(partial(line._run, trio.CancelScope(), "x", client, proved_user=""))
    await trio.testing.wait_all_tasks_blocked()
    assert line.checks.waiting_count == CHECKS_PER_SLOT_MAX - 1
    assert len(await line.go()) == CHECKS_PER_SLOT_MAX - 1


async def test_a_cancelled_waiter_frees_its_place(nursery: trio.Nursery) -> None:
    line = Line(nursery)
    waiting = await line.add("a", "10.0.0.1")
    await line.add("b", "10.0.0.1")
    waiting.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert line.checks.waiting_count == 1
    assert await line.go() == ["b"]


async def test_a_waiter_cancelled_at_its_turn_frees_the_slot(nursery: trio.Nursery) -> None:
    line = Line(nursery)
    leaving = await line.add("a", "10.0.0.1")
    await line.add("b", "10.0.0.2")
    leaving.cancel()
    assert await line.go() == ["b"]
    await line.add("c", "10.0.0.1")
    assert line.order == ["b", "c"]


async def test_a_check_that_breaks_gives_its_slot_back() -> None:
    made = CheckQueue(slots=1, key="k")

    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError

    for _ in range(3):
        with pytest.raises(ValueError):
            await made.run_check(at("10.0.0.1"), broken)


# ---- strangers at many addresses keep the queue full


async def fill(line: Line, addresses: list[str]) -> None:
    """Let strangers take all places, each address one."""
    for number, address in enumerate(addresses):
        await line.add(f"stranger{number}", address)
    assert line.checks.waiting_count == len(addresses)
    assert not line.denied


def placed(places: int, monkeypatch: pytest.MonkeyPatch) -> CheckQueue:
    """A queue in which so many checks may wait."""
    monkeypatch.setattr(checks, "CHECKS_PER_SLOT_MAX", places + 1)
    return CheckQueue(slots=1, key="some.key")


async def test_addresses_that_failed_give_way_to_several_logins_of_one_that_did_not(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: strangers who have a place for each of many addresses do not hold the queue."""
    made, strangers = placed(20, monkeypatch), [f"10.{number}.0.1" for number in range(20)]
    for address in strangers:
        await fail(made, address)
    line = Line(nursery, made)
    await fill(line, strangers)
    for number in range(4):
        await line.add(f"good{number}", "192.0.2.1")
    await line.add("stranger-again", strangers[0])
    assert [name for name in line.denied if name.startswith("good")] == []
    assert line.denied["stranger-again"].startswith("overloaded")
    order = await line.go()
    assert max(order.index(f"good{number}") for number in range(4)) <= 4


@pytest.mark.parametrize(
    "addresses",
    [[f"127.0.0.{number + 30}" for number in range(20)], [f"2001:db8:0:{number:x}::1" for number in range(20)]],
    ids=["IPv4", "IPv6"],
)
async def test_addresses_of_a_network_where_several_failed_give_way(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    """Security: or strangers would always have another address that has not failed yet."""
    made = placed(20 - FAILED_IN_NETWORK_MIN, monkeypatch)
    for address in addresses[:FAILED_IN_NETWORK_MIN]:
        await fail(made, address)
    line = Line(nursery, made)
    await fill(line, addresses[FAILED_IN_NETWORK_MIN:])
    for number in range(4):
        await line.add(f"good{number}", "192.0.2.1")
    assert [name for name in line.denied if name.startswith("good")] == []
    order = await line.go()
    assert max(order.index(f"good{number}") for number in range(4)) <= 4


async def test_a_network_where_few_addresses_failed_keeps_its_place(nursery: trio.Nursery) -> None:
    made = CheckQueue(slots=1, key="some.key")
    for _ in range(3):
        for number in range(FAILED_IN_NETWORK_MIN - 1):
            await fail(made, f"10.0.0.{number}")
    line = Line(nursery, made)
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.99"), ("c", "10.0.9.1")):
        await line.add(name, address)
    assert await line.go() == ["b", "c", "a"]


async def test_an_address_where_a_login_succeeded_goes_before_those_that_never_came(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: strangers with a new address in another network each time delay no client that returns."""
    made = placed(20, monkeypatch)
    made.remember_login(at("192.0.2.1"))
    line = Line(nursery, made)
    await fill(line, [f"10.{number}.0.1" for number in range(20)])
    for number in range(4):
        await line.add(f"good{number}", "192.0.2.1")
    assert [name for name in line.denied if name.startswith("good")] == []
    order = await line.go()
    assert max(order.index(f"good{number}") for number in range(4)) <= 5


async def test_a_success_does_not_outweigh_a_failure_at_the_same_address(nursery: trio.Nursery) -> None:
    """Security: or strangers with one account would have others' passwords checked first."""
    made = CheckQueue(slots=1, key="some.key")
    await fail(made, "10.0.0.1")
    made.remember_login(at("10.0.0.1"))
    line = Line(nursery, made)
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        await line.add(name, address)
    assert await line.go() == ["b", "a"]


# ---- memory of proofs, logins and failures


async def test_memories_are_bounded(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    recent: ExpiringMap[int, str] = ExpiringMap(entries_max=2, lifetime_s=10)
    for number in (1, 2, 1, 3):
        recent.remember_value(number, f"of {number}")
    assert [recent.recent_value(number) for number in (1, 2, 3)] == ["of 1", None, "of 3"]
    assert len(recent) == 2
    recent.forget_key(3)
    recent.forget_key(3)
    await trio.sleep(5)
    recent.remember_value(3, "again")
    await trio.sleep(5)
    assert (recent.recent_value(1), recent.recent_value(3)) == (None, "again")
    made = CheckQueue(slots=1, key="k")
    for number in range(FAILED_ADDRESSES_MAX + 5):
        await fail(made, f"10.{number >> 8}.{number & 255}.1")
    for number in range(PROVED_USERS_MAX + 5):
        made.remember_proof(f"user {number}", b"x")
        made.remember_login(at(f"10.{number >> 8}.{number & 255}.1"))
    assert (len(made._failed), len(made._proved)) == (FAILED_ADDRESSES_MAX, PROVED_USERS_MAX)
    assert (len(made._failed_in_network), len(made._logins)) == (FAILED_ADDRESSES_MAX, LOGIN_ADDRESSES_MAX)


async def test_a_proof_is_kept_as_a_short_keyed_tag_until_it_expires(autojump_clock: trio.testing.MockClock) -> None:
    made, other = CheckQueue(slots=1, key="k"), CheckQueue(slots=1, key="k")
    made.remember_proof("alice", b"secret")
    assert made.matches_recent_proof("alice", b"secret")
    assert not made.matches_recent_proof("bob", b"secret")
    assert sum(made.matches_recent_proof("alice", str(guess).encode()) for guess in range(100)) <= 1
    kept = made._proved.recent_value("alice")
    assert kept is not None
    assert len(kept) == TAG_BYTES == 2, "too little to find the password by it"
    tags = {CheckQueue(slots=1, key="k")._tag("alice", b"secret") for _ in range(8)}
    assert len(tags) > 1, "each process has a key of its own"
    assert not other.matches_recent_proof("alice", b"secret")
    made.forget_proof("alice", b"another's")
    assert made.matches_recent_proof("alice", b"secret"), "strangers must not take it away"
    made.forget_proof("alice", b"secret")
    assert not made.matches_recent_proof("alice", b"secret")
    made.remember_proof("alice", b"secret")
    await trio.sleep(PROVED_FOR_S)
    assert not made.matches_recent_proof("alice", b"secret")
