"""A series' identity: for ever the same, for other labels another."""

from hypothesis import given
from hypothesis import strategies as st

from analytics.series import metric_and_labels, series_id

LABELS = (("__name__", "up"), ("instance", "a:1"), ("job", "x"))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def test_the_identity_never_changes() -> None:
    assert series_id(LABELS) == -5078740585292852004  # written into tables that exist


@given(st.permutations(LABELS))
def test_order_does_not_matter(labels: list[tuple[str, str]]) -> None:
    assert series_id(labels) == series_id(LABELS)


def test_replica_labels_are_no_part_of_it() -> None:
    for name in ("prometheus_replica", "__replica__"):
        assert series_id([*LABELS, (name, "a")]) == series_id(LABELS)
        assert metric_and_labels([*LABELS, (name, "a")]) == ("up", [("instance", "a:1"), ("job", "x")])
    assert series_id([*LABELS, ("zone", "a")]) != series_id(LABELS)
    assert series_id([*LABELS, ("zone", "a")], ["zone"]) == series_id(LABELS)
    assert series_id([*LABELS, ("__replica__", "a")], ["zone"]) != series_id(LABELS)


@given(st.dictionaries(texts, texts, max_size=3), st.dictionaries(texts, texts, max_size=3))
def test_other_labels_are_another_series(one: dict[str, str], two: dict[str, str]) -> None:
    assert (series_id(one.items(), ()) == series_id(two.items(), ())) == (one == two)


def test_texts_that_contain_each_others_separators_differ() -> None:
    assert series_id([("a", "b\xffc\xfed")]) != series_id([("a", "b"), ("c", "d")])
