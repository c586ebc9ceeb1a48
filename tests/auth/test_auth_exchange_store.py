"""Exchanges between their rounds: bounded in time, number and rounds; each state is there once."""

import contextlib

import pytest
import trio
import trio.testing

from auth import exchange_store
from auth.exchange_store import ROUNDS_MAX, ExchangeStore
from auth.state import AuthenticationDenied

KEY, OTHER_KEY = (100, 1), (100, 2)


def new_rounds() -> ExchangeStore[str]:
    return ExchangeStore(lifetime_s=10.0)


def denial(kept: ExchangeStore[str], key: tuple[int, int] = KEY, method: str = "sasl") -> str:
    with pytest.raises(AuthenticationDenied) as denied:
        kept.pop_exchange(key, method)
    return denied.value.reason


async def test_a_stored_exchange_can_be_taken_out_again() -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    assert len(kept) == 1
    found = kept.pop_exchange(KEY, "sasl")
    assert (found.method, found.state, found.rounds_done) == ("sasl", "state", 1)
    assert len(kept) == 0


async def test_a_round_answered_twice() -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    kept.pop_exchange(KEY, "sasl")
    assert denial(kept) == "unknown_round"


async def test_a_round_that_never_was() -> None:
    assert denial(new_rounds()) == "unknown_round"


@pytest.mark.parametrize("key", [(100, 2), (101, 1), (1, 100)])
async def test_another_caller_or_another_exchange(key: tuple[int, int]) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    assert denial(kept, key) == "unknown_round"
    assert kept.pop_exchange(KEY, "sasl").state == "state"


async def test_another_method_ends_the_exchange() -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    assert denial(kept, method="token") == "method_changed"
    assert denial(kept) == "unknown_round"


async def test_an_exchange_that_its_client_gave_up_is_gone_and_no_other() -> None:
    kept = new_rounds()
    for key in (KEY, OTHER_KEY):
        kept.store_exchange(key, "sasl", "state", number=1)
    kept.drop_exchange(KEY)
    kept.drop_exchange(KEY)
    assert denial(kept) == "unknown_round"
    assert kept.pop_exchange(OTHER_KEY, "sasl").state == "state"


# ---- bounds


async def test_rounds_are_capped() -> None:
    assert ROUNDS_MAX == 10
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=9)
    kept.pop_exchange(KEY, "sasl")
    with pytest.raises(AuthenticationDenied) as denied:
        kept.store_exchange(KEY, "sasl", "state", number=10)
    assert denied.value.reason == "too_many_rounds"
    assert denial(kept) == "unknown_round"


async def test_a_state_is_forgotten_in_time(autojump_clock: trio.testing.MockClock) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    await trio.sleep(9.9)
    assert len(kept) == 1
    await trio.sleep(0.1)
    assert len(kept) == 0
    assert denial(kept) == "unknown_round"


async def test_an_expired_state_cannot_be_taken_even_before_it_is_collected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    await trio.sleep(10)
    assert denial(kept) == "unknown_round"


async def test_only_the_old_are_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "old", number=1)
    await trio.sleep(6)
    kept.store_exchange(OTHER_KEY, "sasl", "young", number=1)
    await trio.sleep(6)
    assert denial(kept) == "unknown_round"
    assert kept.pop_exchange(OTHER_KEY, "sasl").state == "young"


async def test_a_later_round_has_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "state", number=1)
    await trio.sleep(6)
    found = kept.pop_exchange(KEY, "sasl")
    kept.store_exchange(KEY, "sasl", found.state, number=2)
    await trio.sleep(6)
    assert kept.pop_exchange(KEY, "sasl").rounds_done == 2


async def test_a_name_used_again_keeps_no_other_state_alive(autojump_clock: trio.testing.MockClock) -> None:
    kept = new_rounds()
    kept.store_exchange(KEY, "sasl", "first", number=1)
    kept.store_exchange(OTHER_KEY, "sasl", "other", number=1)
    await trio.sleep(9)
    kept.store_exchange(KEY, "sasl", "second", number=1)
    await trio.sleep(2)
    assert denial(kept, OTHER_KEY) == "unknown_round"
    assert kept.pop_exchange(KEY, "sasl").state == "second"


async def test_the_number_of_states_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 2)
    kept = new_rounds()
    kept.store_exchange((1, 1), "sasl", "a", number=1)
    kept.store_exchange((1, 2), "sasl", "b", number=1)
    with pytest.raises(AuthenticationDenied) as denied:
        kept.store_exchange((1, 3), "sasl", "c", number=1)
    assert denied.value.reason == "overloaded"
    assert len(kept) == 2
    assert kept.pop_exchange((1, 1), "sasl").state == "a"


async def test_forgotten_states_leave_room(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 1)
    kept = new_rounds()
    kept.store_exchange((1, 1), "sasl", "a", number=1)
    await trio.sleep(10)
    kept.store_exchange((1, 2), "sasl", "b", number=1)
    assert kept.pop_exchange((1, 2), "sasl").state == "b"


async def test_the_oldest_makes_room_and_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 2)
    kept = new_rounds()
    for number, state in enumerate("abc", 1):
        kept.store_exchange((1, number), "sasl", state, number=1, replaces_oldest=True)
    assert denial(kept, (1, 1)) == "unknown_round"
    assert [kept.pop_exchange((1, number), "sasl").state for number in (2, 3)] == ["b", "c"]


@pytest.mark.parametrize("replaces_oldest", [False, True])
async def test_a_caller_that_floods_the_store_does_not_displace_the_exchanges_of_others(
    monkeypatch: pytest.MonkeyPatch, replaces_oldest: bool
) -> None:
    """Security: a forwarder that was taken over starts exchanges as fast as it can, and others go on beside it."""
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 10)
    kept = new_rounds()

    def flood(start: int) -> None:
        for number in range(start, start + 50):
            with contextlib.suppress(AuthenticationDenied):
                kept.store_exchange((666, number), "sasl", "flood", number=1, replaces_oldest=replaces_oldest)

    flood(0)
    for number in range(3):
        kept.store_exchange((1, number), "sasl", "one", number=1, replaces_oldest=replaces_oldest)
        kept.store_exchange((2, number), "sasl", "another", number=1, replaces_oldest=replaces_oldest)
    flood(100)
    assert len(kept) == 10
    assert [kept.pop_exchange((1, number), "sasl").state for number in range(3)] == ["one"] * 3
    assert [kept.pop_exchange((2, number), "sasl").state for number in range(3)] == ["another"] * 3


async def test_equal_callers_do_not_take_exchanges_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 5)
    kept = new_rounds()
    for key in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2)):
        kept.store_exchange(key, "sasl", "state", number=1)
    for key in ((1, 4), (2, 3)):
        with pytest.raises(AuthenticationDenied):
            kept.store_exchange(key, "sasl", "state", number=1)
    assert len(kept) == 5


def test_the_real_bound() -> None:
    assert exchange_store.EXCHANGES_MAX == 20_000
