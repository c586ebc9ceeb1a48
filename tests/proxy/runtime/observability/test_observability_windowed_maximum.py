"""proxy.runtime.observability.windowed_maximum: what two who look at different times see of the same minutes."""

import random

import pytest

from proxy.runtime.observability.windowed_maximum import SLOTS, WINDOW_S, WindowedMaximum

SLOT_S = WINDOW_S / SLOTS


def test_without_a_value_it_is_0() -> None:
    assert WindowedMaximum().value(5.0) == 0.0


@pytest.mark.conforms("kip-368.29")
def test_a_maximum_is_reported_for_the_whole_window_however_often_it_is_read() -> None:
    maximum = WindowedMaximum()
    maximum.observe(3.0, 1000)
    maximum.observe(1.0, 1000)
    for second in range(1000, 1000 + WINDOW_S):
        assert maximum.value(second) == 3.0
    assert maximum.value(1000 + WINDOW_S + SLOT_S) == 0.0


def test_a_smaller_one_counts_once_the_larger_is_out_of_the_window() -> None:
    maximum = WindowedMaximum()
    maximum.observe(9.0, 0)
    maximum.observe(2.0, 100)
    assert maximum.value(200) == 9.0
    assert maximum.value(WINDOW_S + SLOT_S) == 2.0


def test_the_maximum_is_that_of_the_window_and_few_slots_are_kept() -> None:
    chance, maximum, values, now_s = random.Random(1), WindowedMaximum(), [], 0.0
    for _ in range(5000):
        now_s += chance.expovariate(0.2)
        values.append((now_s, chance.random()))
        maximum.observe(values[-1][1], now_s)
        found = maximum.value(now_s)
        least = max(value for at, value in values if at > now_s - WINDOW_S)
        most = max(value for at, value in values if at > now_s - WINDOW_S - SLOT_S)
        assert least <= found <= most
        assert len(maximum._slots) <= SLOTS + 1
