"""proxy.runtime.observability.metrics: labels whose values another worker names are bounded."""

from proxy.runtime.observability.metrics import LABEL_CHARACTERS_MAX, LABEL_VALUES_MAX, OTHER, BoundedLabel


def test_the_first_values_of_a_label_count_under_their_own_name_and_all_others_as_other() -> None:
    """Security: a captured worker would fill another one's memory, and Prometheus, by a new name at each call."""
    label = BoundedLabel()
    names = [f"name-{number}" for number in range(LABEL_VALUES_MAX)]
    assert [label.value_of(name) for name in names] == names
    assert label.value_of("one more") == OTHER
    assert label.value_of(names[0]) == names[0]


def test_a_long_value_of_a_label_counts_as_other() -> None:
    label = BoundedLabel()
    assert label.value_of("n" * LABEL_CHARACTERS_MAX) == "n" * LABEL_CHARACTERS_MAX
    assert label.value_of("n" * (LABEL_CHARACTERS_MAX + 1)) == OTHER
