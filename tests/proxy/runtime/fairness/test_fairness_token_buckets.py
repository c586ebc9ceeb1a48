"""proxy.runtime.fairness.token_buckets: rates by owner, and the bound on memory that no owner gets around."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.fairness.token_buckets import LOOKED_AT_MAX, NAME_CHARACTERS_MAX, TokenBuckets


def take(buckets: TokenBuckets, owner: str, now: float) -> bool:
    bucket = buckets.bucket_of(owner, now)
    if bucket.tokens < 1:
        return False
    bucket.tokens -= 1
    return True


def takes(buckets: TokenBuckets, owner: str, now: float, count: int) -> int:
    return sum(take(buckets, owner, now) for _ in range(count))


def test_a_burst_then_the_rate() -> None:
    buckets = TokenBuckets(2.0, 5.0)
    assert takes(buckets, "a", 100.0, 9) == 5
    assert takes(buckets, "a", 101.0, 9) == 2
    assert takes(buckets, "a", 101.25, 9) == 0
    assert takes(buckets, "a", 101.5, 9) == 1
    assert takes(buckets, "a", 9999.0, 9) == 5, "no more than the burst"
    assert takes(buckets, "b", 101.0, 9) == 5, "each has its own"


def test_a_small_rate_lets_one_in() -> None:
    buckets = TokenBuckets(0.1, 0.01)
    assert takes(buckets, "a", 0.0, 2) == 1
    assert takes(buckets, "a", 9.0, 2) == 0
    assert takes(buckets, "a", 10.0, 2) == 1


def test_many_owners_take_bounded_memory_and_give_no_owner_a_new_bucket() -> None:
    """Security: a million principals or addresses neither grow the table nor have an emptied bucket forgotten."""
    buckets = TokenBuckets(1.0, 2.0, owners_max=4, shared_max=8)
    known = [f"known{number}" for number in range(4)]
    assert [takes(buckets, owner, 0.0, 3) for owner in known] == [2] * 4
    let_in = sum(take(buckets, f"stranger{number}", 0.0) for number in range(100_000))
    assert let_in <= 8 * 2
    assert len(buckets) <= 4 + 8
    assert [takes(buckets, owner, 0.0, 3) for owner in known] == [0] * 4, "still the emptied ones"


def test_a_full_bucket_makes_room() -> None:
    buckets = TokenBuckets(1.0, 2.0, owners_max=2, shared_max=1)
    assert takes(buckets, "a", 0.0, 1) == 1
    assert takes(buckets, "b", 0.0, 2) == 2
    assert takes(buckets, "c", 1.0, 3) == 2, "in place of a, whose bucket is full again"
    assert takes(buckets, "d", 1.0, 3) == 2, "shared"
    assert takes(buckets, "e", 1.0, 3) == 0, "shared with d"
    assert takes(buckets, "d", 9.0, 3) == 2, "of its own"
    assert takes(buckets, "e", 9.0, 3) == 2
    assert len(buckets) == 2


def test_an_owner_that_shares_gets_no_bucket_of_its_own_before_the_shared_one_is_full() -> None:
    """Security: otherwise it would have two bursts."""
    buckets = TokenBuckets(1.0, 4.0, owners_max=1, shared_max=1)
    assert takes(buckets, "a", 0.0, 1) == 1
    assert takes(buckets, "b", 0.0, 9) == 4
    assert takes(buckets, "b", 1.0, 9) == 1, "though a's bucket is full by now"


def test_a_bucket_that_refills_slowly_does_not_keep_others_in_the_table() -> None:
    buckets = TokenBuckets(1.0, 10.0, owners_max=LOOKED_AT_MAX, shared_max=1)
    assert takes(buckets, "slow", 0.0, 10) == 10
    for number in range(LOOKED_AT_MAX - 1):
        take(buckets, f"fast{number}", 0.0)
    assert takes(buckets, "new", 1.0, 20) == 10
    assert takes(buckets, "newer", 1.0, 20) == 10
    assert len(buckets) == LOOKED_AT_MAX


def test_long_names_are_kept_as_hashes() -> None:
    """Security: a client chooses the names of topics, and a token's issuer those of roles."""
    buckets = TokenBuckets(1.0, 1.0)
    first, second = "x" * 10**6 + "a", "x" * 10**6 + "b"
    assert take(buckets, first, 0.0)
    assert take(buckets, second, 0.0)
    assert not take(buckets, first, 0.0)
    assert max(map(len, buckets._known)) <= NAME_CHARACTERS_MAX
    assert take(buckets, "\ud800" * 1000, 0.0)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 1.5)), max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_no_owner_gets_more_than_one_bucket_gives(
    events: list[tuple[str, float]], owners_max: int, shared_max: int
) -> None:
    """Whatever comes, and when: at most the burst, and the rate since the start."""
    buckets = TokenBuckets(1.0, 3.0, owners_max=owners_max, shared_max=shared_max)
    got: Counter[str] = Counter()
    now = 0.0
    for owner, later in events:
        now += later
        got[owner] += take(buckets, owner, now)
        assert got[owner] <= 3.0 + now + 1e-6
        assert len(buckets) <= owners_max + shared_max
