"""auth.jwt_rules.claimed_expiry_unix_ms: when a token says that it ends. Nothing is verified, and nothing can break."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import by_hand, segment, token

from auth.jwt_rules import NEVER_S, claimed_expiry_unix_ms


@pytest.mark.parametrize(
    ("exp", "expected"),
    [
        (4_000_000_000, 4_000_000_000_000),
        (4_000_000_000.9, 4_000_000_000_000),
        ("4000000000", 4_000_000_000_000),
        (1, 1000),
        (NEVER_S - 1, (NEVER_S - 1) * 1000),
        (NEVER_S, 0),
        (10**30, 0),
        (0, 0),
        (-1, 0),
        (None, 0),
        ("soon", 0),
        ([4_000_000_000], 0),
        ({}, 0),
        (float("inf"), 0),
        (float("nan"), 0),
        ("9" * 5000, 0),
    ],
)
def test_the_end_that_is_claimed(exp: Any, expected: int) -> None:
    data = by_hand({"alg": "HS256", "typ": "JWT"}, {"sub": "proxy", "exp": exp}, b"anyone's")
    assert claimed_expiry_unix_ms(data) == expected


def test_without_a_claim_there_is_no_end() -> None:
    assert claimed_expiry_unix_ms(token()) == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"no token", b"a.b.c", b"\xff\xfe", b"..", segment(b"{}") + b"." + segment(b"[]") + b"." + segment(b"x")],
)
def test_data_that_is_no_token_has_no_claimed_expiry(data: bytes) -> None:
    assert claimed_expiry_unix_ms(data) == 0


@given(data=st.binary(max_size=200))
def test_whatever_it_is_nothing_breaks(data: bytes) -> None:
    assert claimed_expiry_unix_ms(data) == 0


@given(payload=st.binary(max_size=50))
def test_whatever_its_claims_are_nothing_breaks(payload: bytes) -> None:
    data = b".".join([segment(b'{"alg":"HS256","typ":"JWT"}'), segment(payload), segment(b"x")])
    assert claimed_expiry_unix_ms(data) >= 0
