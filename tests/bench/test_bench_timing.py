"""What the comparison of times says of samples that are known."""

import random

import pytest

from tests.bench.timing import Comparison


def _samples(seed: int, shift: float = 0.0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(1000.0, 100.0) + shift for _ in range(400)]


def test_the_same_kind_is_not_told_apart() -> None:
    comparison = Comparison(_samples(1), _samples(2))
    assert str(comparison).endswith(": not told apart")
    assert abs(comparison.z()) < 3


@pytest.mark.parametrize("shift", [-50.0, 50.0])
def test_half_a_deviation_is_told_apart(shift: float) -> None:
    comparison = Comparison(_samples(1), _samples(2, shift))
    assert comparison.difference == pytest.approx(shift, abs=20)
    assert comparison.z() * shift > 0
    assert abs(comparison.z()) > 4
    assert str(comparison).endswith(": TOLD APART")
