"""proxy.runtime.observability.certificate_status: the ends that a worker reports, and those of all together."""

from __future__ import annotations

import msgspec
import pytest

from proxy.runtime.observability.certificate_status import ENDS_MAX, CertificateEnds, first_ends, merge_ends

DAY_S = 86_400.0
NOW = 1000 * DAY_S


def test_a_worker_reports_those_that_end_first() -> None:
    ends = {f"listener[{number}].tls.certificate": float(number) for number in reversed(range(ENDS_MAX + 5))}
    assert first_ends(ends) == {f"listener[{number}].tls.certificate": float(number) for number in range(ENDS_MAX)}
    assert msgspec.convert(first_ends(ends), CertificateEnds)


@pytest.mark.parametrize(
    "claim",
    [
        7,
        {"key": "soon"},
        {"key": 1e15},
        {"key": -1e15},
        {"k" * 257: 0.0},
        {str(number): 0.0 for number in range(ENDS_MAX + 1)},
    ],
)
def test_what_a_captured_worker_may_not_report(claim: object) -> None:
    """Security."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(claim, CertificateEnds)


def test_the_first_end_counts_and_comes_first() -> None:
    """Security: a captured worker hides no other one's end."""
    merged = merge_ends([{"b": NOW + DAY_S, "a": NOW + 90 * DAY_S}, {"b": NOW + 400 * DAY_S, "c": NOW}], NOW)
    assert [(one["key"], one["ends_at_unix_s"]) for one in merged] == [
        ("c", NOW),
        ("b", NOW + DAY_S),
        ("a", NOW + 90 * DAY_S),
    ]


@pytest.mark.parametrize(
    ("left_s", "days_left", "is_soon", "has_ended"),
    [
        (30 * DAY_S + 1, 30.0, False, False),
        (30 * DAY_S, 30.0, True, False),
        (1, 0.0, True, False),
        (0, 0.0, True, True),
        (-2.25 * DAY_S, -2.2, True, True),
    ],
)
def test_marks(left_s: float, days_left: float, is_soon: bool, has_ended: bool) -> None:
    end = NOW + left_s
    [one] = merge_ends([{"a": end}], NOW)
    assert one == {
        "key": "a",
        "ends_at_unix_s": end,
        "days_left": days_left,
        "has_ended": has_ended,
        "within_30_days": is_soon,
    }
