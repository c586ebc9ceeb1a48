"""The entry that an unknown name follows: in the file's proportions, everywhere the same, secret, rarely another."""

from __future__ import annotations

from collections import Counter

import pytest

from auth.stand_ins import CANDIDATES_PER_SHAPE_MAX, StandIns

NAMES = [f"stranger-{number}" for number in range(4000)]


def made(shapes: dict[str, str], **changed: bytes) -> StandIns[str]:
    """Stand-ins of entries, each with its shape; the secret of some has been changed."""
    secrets = {name: changed.get(name, f"secret of {name}".encode()) for name in shapes}
    return StandIns((name, shape, secrets[name]) for name, shape in shapes.items())


def choices(stand_ins: StandIns[str]) -> list[str]:
    return [stand_ins.choose(name).entry for name in NAMES]


@pytest.mark.parametrize(("cheap", "costly"), [(9, 1), (3, 5), (990, 10), (1, 1)])
def test_unknown_names_have_the_shapes_of_the_file_in_its_proportions(cheap: int, costly: int) -> None:
    shapes = {f"user{number}": "cheap" if number < cheap else "costly" for number in range(cheap + costly)}
    share = sum(shapes[entry] == "costly" for entry in choices(made(shapes))) / len(NAMES)
    expected = costly / (cheap + costly)
    assert abs(share - expected) < 5 * (expected * (1 - expected) / len(NAMES)) ** 0.5


def test_each_of_a_few_entries_has_an_equal_share() -> None:
    counts = Counter(choices(made(dict.fromkeys("abcdefgh", "same"))))
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) < len(NAMES) // 20


def test_all_workers_choose_the_same_from_the_same_file() -> None:
    shapes = {f"user{number}": str(number % 3) for number in range(50)}
    assert choices(made(shapes)) == choices(made(dict(reversed(shapes.items()))))
    assert made(shapes).choose("x") == made(shapes).choose("x")


def test_choices_cannot_be_predicted_without_the_secrets() -> None:
    shapes = dict.fromkeys("abcd", "same")
    other = made(shapes, **{name: b"unlike " + name.encode() for name in shapes})
    equal = sum(one == two for one, two in zip(choices(made(shapes)), choices(other), strict=True))
    assert abs(equal / len(NAMES) - 1 / len(shapes)) < 0.05, "as often as by chance"


def test_a_changed_entry_moves_the_names_that_followed_it_and_few_others() -> None:
    shapes = {f"user{number}": "same" for number in range(10)}
    before, after = made(shapes), made(shapes, user3=b"new")
    for name in NAMES:
        old, new = before.choose(name), after.choose(name)
        assert old == new or "user3" in (old.entry, new.entry)
    moved = sum(before.choose(name) != after.choose(name) for name in NAMES) / len(NAMES)
    assert 0.1 < moved < 0.25


@pytest.mark.parametrize("larger_is_newer", [True, False])
def test_an_added_or_removed_entry_moves_only_the_names_that_follow_it(larger_is_newer: bool) -> None:
    small = {f"user{number}": "same" for number in range(10)}
    files = [small, {**small, "eve": "same"}]
    before, after = (made(shapes) for shapes in (files if larger_is_newer else reversed(files)))
    for name in NAMES:
        old, new = before.choose(name), after.choose(name)
        assert old == new or "eve" in (old.entry, new.entry)


def test_the_hashes_of_a_choice_are_bounded_however_many_entries_there_are() -> None:
    stand_ins = made({f"user{number}": str(number % 2) for number in range(1000)})
    assert len(stand_ins._candidates) == 2 * CANDIDATES_PER_SHAPE_MAX
