"""proxy.admin.exposition: the metrics of all processes in one, whatever one of them writes."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from proxy.admin import exposition as admin_exposition
from proxy.admin.exposition import (
    LINE_CHARACTERS_MAX,
    LINES_MAX,
    PART_CHARACTERS,
    PART_LINES,
    PROCESS_BYTES_MAX,
    SERIES_MAX,
    Exposition,
)
from proxy.runtime.observability.metrics import new_registry, render_metrics


def merged_exposition(parts: Iterable[tuple[Mapping[str, str], str]]) -> bytes:
    merged = Exposition()
    for labels, text in parts:
        assert not merged.add_process(labels, text)
    return merged.text()


def registry_with(value: float) -> CollectorRegistry:
    registry = new_registry()
    Counter("requests", "Requests.", ["kind"], registry=registry).labels(kind="a").inc(value)
    Gauge("open", "Open.", registry=registry).set(value)
    Histogram("took_seconds", "Took.", buckets=(1.0,), registry=registry).observe(value)
    return registry


def parsed(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_merged_metrics_name_the_process_on_every_sample() -> None:
    merged = merged_exposition(
        [({"worker": "0"}, render_metrics(registry_with(1))), ({"worker": "1"}, render_metrics(registry_with(2)))]
    )
    samples = parsed(merged)
    assert samples["requests_total", (("kind", "a"), ("worker", "0"))] == 1
    assert samples["requests_total", (("kind", "a"), ("worker", "1"))] == 2
    assert samples["open", (("worker", "1"),)] == 2
    assert samples["took_seconds_bucket", (("le", "1.0"), ("worker", "0"))] == 1
    assert all("worker" in dict(labels) for _, labels in samples)


def test_merged_families_appear_once() -> None:
    text = merged_exposition([({"worker": str(n)}, render_metrics(registry_with(n))) for n in range(5)]).decode()
    for name in ("requests_total", "open", "took_seconds"):
        assert text.count(f"# TYPE {name} ") == 1
        assert text.count(f"# HELP {name} ") == 1
    assert "_created" not in text


def test_nothing_to_merge() -> None:
    assert merged_exposition([]) == b""


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30), st.floats(allow_nan=False))
def test_label_values_and_numbers_survive(value: str, number: float) -> None:
    registry = new_registry()
    Gauge("g", "G.", ["l"], registry=registry).labels(l=value).set(number)
    samples = parsed(merged_exposition([({"worker": "0"}, render_metrics(registry))]))
    assert samples == {("g", (("l", value), ("worker", "0"))): number}


# ---- metrics of a captured process

HEAD = "# HELP g G.\n# TYPE g gauge\n"
GOOD = HEAD + 'g{l="v"} 1.0\n'

BAD = {
    "no metric": "something else",
    "no value": "g",
    "a word for a value": "g one",
    "a number that is too large": "g 1e999",
    "a number in another script": "g \u0661",
    "a time": "g 1.0 1700000000000",
    "an exemplar": 'g 1.0 # {trace_id="x"} 1.0',
    "a label that is not closed": 'g{l="v} 1.0',
    "a label twice": 'g{l="1",l="2"} 1.0',
    "a second name": 'g{__name__="y"} 1',
    "a second name among others": 'g{a="1",__name__="g",b="2"} 1',
    "another label of Prometheus's own": 'g{__address__="y"} 1',
    "a label of ours": 'g{role="supervisor"} 1.0',
    "an unknown escape": 'g{l="\\x"} 1.0',
    "no comma": 'g{l="1"m="2"} 1.0',
    "another family": "up 1.0",
    "another spelling": '{"g.h"} 1.0',
    "a name in another script": "gé 1.0",
    "a control character": 'g{l="\0"} 1.0',
    "a carriage return": "g 1.0\r",
    "an unknown type": "# TYPE g native",
    "another comment": "# EOF",
    "too long": 'g{l="' + "v" * LINE_CHARACTERS_MAX + '"} 1.0',
}


@pytest.mark.parametrize("what", BAD)
def test_a_line_that_is_no_metric_is_dropped_and_the_rest_is_served(what: str) -> None:
    """Security: Prometheus refuses everything for one bad line, so one captured process would blind it."""
    merged = Exposition()
    assert merged.add_process({"role": "forwarder"}, GOOD + BAD[what] + "\n") == {"malformed": 1}
    assert not merged.add_process({"role": "auth"}, GOOD)
    assert merged.text().decode() == HEAD + 'g{role="forwarder",l="v"} 1.0\ng{role="auth",l="v"} 1.0\n'


def test_too_large_a_text_is_dropped_as_a_whole() -> None:
    """Security."""
    merged = Exposition()
    for text in ("x" * (PROCESS_BYTES_MAX + 1), "\u20ac" * (PROCESS_BYTES_MAX // 3 + 1)):
        assert merged.add_process({"role": "forwarder"}, text) == {"too_large": 1}, "bytes, not characters"
    assert not merged.add_process({"role": "auth"}, GOOD)
    assert merged.text().count(b"\n") == 3


def test_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security."""
    monkeypatch.setattr(admin_exposition, "BYTES_MAX", 2 * len(GOOD))
    merged = Exposition()
    assert [dict(merged.add_process({"worker": str(n)}, GOOD)) for n in range(3)] == [{}, {}, {"too_large": 1}]


def test_use_by_principal_that_does_not_fit_is_left_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: an issuer of many names must not blind operators."""
    used = "# TYPE pulsar_proxy_principal_bytes counter\n" + 'pulsar_proxy_principal_bytes_total{l="v"} 1.0\n' * 100
    monkeypatch.setattr(admin_exposition, "BYTES_MAX", len(used) + 3 * len(GOOD))
    merged = Exposition()
    texts = [used + GOOD, used + GOOD, GOOD, GOOD]
    dropped = [dict(merged.add_process({"worker": str(n)}, text)) for n, text in enumerate(texts)]
    assert dropped == [{}, {"principals": 101}, {}, {"too_large": 1}]
    lines = merged.text().decode().splitlines()
    assert [line for line in lines if line.startswith("g{")] == [f'g{{worker="{n}",l="v"}} 1.0' for n in range(3)]
    assert sum(line.startswith("pulsar_proxy_principal_bytes_total{") for line in lines) == 100


def test_series_are_bounded() -> None:
    """Security: Prometheus keeps each for hours."""
    merged = Exposition()
    text = HEAD + "".join(f'g{{l="{n}"}} 1.0\n' for n in range(SERIES_MAX + 7))
    assert merged.add_process({"role": "forwarder"}, text) == {"too_many_series": 7}
    assert merged.text().count(b"\n") == SERIES_MAX + 2
    assert not merged.add_process({"role": "auth"}, GOOD), "each process for itself"


def test_families_are_bounded() -> None:
    """Security."""
    merged = Exposition()
    text = "".join(f"# TYPE g{n} gauge\ng{n} 1\n" for n in range(SERIES_MAX + 7))
    assert merged.add_process({"role": "forwarder"}, text) == {"too_many_series": 7, "malformed": 7}


@pytest.mark.parametrize("junk", ["", "x", "# TYPE a gauge", "# TYPE a gauge\n# TYPE b gauge"])
def test_lines_are_bounded(junk: str) -> None:
    """Security: 4 MiB of the shortest would be four million."""
    merged = Exposition()
    dropped = merged.add_process({"role": "forwarder"}, GOOD + (junk + "\n") * LINES_MAX)
    assert dropped["too_many_lines"] == GOOD.count("\n") + (junk + "\n").count("\n") * LINES_MAX - LINES_MAX
    assert merged.text().count(b"\n") == 3
    assert not merged.add_process({"role": "auth"}, GOOD), "each process for itself"


def test_a_text_with_as_many_lines_as_it_may_have() -> None:
    text = GOOD + "\n" * (LINES_MAX - GOOD.count("\n"))
    assert not Exposition().add_process({}, text)
    assert Exposition().add_process({}, text + "x") == {"too_many_lines": 1}


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("x", LINES_MAX),
        ("", LINES_MAX),
        ("# TYPE g gauge", LINES_MAX),
        ("x" * 4000, 1000),
        ("x" * (PROCESS_BYTES_MAX - 2), 1),
    ],
)
def test_no_text_is_read_without_pauses(line: str, lines: int) -> None:
    """Security: the admin worker must answer /healthz meanwhile."""
    text = (line + "\n") * lines
    pauses = list(Exposition().add_process_in_parts({}, text, collections.Counter()))
    assert len(pauses) >= max(lines // PART_LINES, min(lines, len(text) // (2 * PART_CHARACTERS)))


def test_no_text_is_written_without_pauses() -> None:
    merged = Exposition()
    merged.add_process({"role": "forwarder"}, HEAD + "".join(f'g{{l="{n}"}} 1.0\n' for n in range(3 * PART_LINES)))
    parts = list(merged.text_in_parts())
    assert max(part.count(b"\n") for part in parts) <= PART_LINES
    assert b"".join(parts) == merged.text()


def test_the_first_says_what_a_metric_is() -> None:
    merged = Exposition()
    merged.add_process({"role": "supervisor"}, GOOD)
    merged.add_process({"role": "forwarder"}, "# HELP g Nonsense.\n# TYPE g histogram\ng 2.0\n")
    assert merged.text().decode().startswith(HEAD)


HOSTILE = st.sampled_from(["\\", '"', "{", "}", ",", "=", "a", "1", " ", 'l="v"', "#", "# TYPE a gauge\n", "\n", "é"])


@given(st.lists(HOSTILE, max_size=60).map("".join))
def test_whatever_is_written_what_is_served_can_be_read(text: str) -> None:
    """Security."""
    merged = Exposition()
    merged.add_process({"role": "forwarder"}, HEAD + text)
    merged.add_process({"role": "auth"}, GOOD)
    samples = [sample for family in text_string_to_metric_families(merged.text().decode()) for sample in family.samples]
    assert samples[-1].labels["role"] in {"auth", "forwarder"}
    assert all("role" in sample.labels for sample in samples)


@pytest.mark.parametrize("part", ["\\", '\\"', 'b="",', "#", "9", '"'])
def test_no_line_takes_long_to_refuse(part: str) -> None:
    """Security: twice as long a line takes no more than a few times as long, however often it begins again."""
    seconds = []
    for length in (LINE_CHARACTERS_MAX // 8, LINE_CHARACTERS_MAX // 2):
        text = "\n".join(["a{" + part * (length // len(part))] * 200)
        began = time.process_time()
        for _ in range(3):
            Exposition().add_process({}, text)
        seconds.append(time.process_time() - began + 0.01)
    assert seconds[1] < 40 * seconds[0], "four times as long, and far from squared in each of its parts"
