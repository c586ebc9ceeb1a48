"""Which metrics and labels there are: those of docs/metrics.md, of the receiver, and Prometheus' own."""

import re
from pathlib import Path

from analytics.receiver.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]

OF_PROMETHEUS = {"up", "ALERTS"}
COMMON_LABELS = {
    "app_kubernetes_io_name",
    "cluster",
    "role",
    "worker",
    "instance",
    "job",
    "le",
    "alertname",
    "alertstate",
}
_SUFFIXES = ("_bucket", "_sum", "_count")
_WORD = re.compile(r"\b(?:pulsar|process)_[a-z0-9_]+\b")
_STRING = re.compile(r'"[^"]*"')


def documented() -> tuple[set[str], set[str]]:
    """Names in the table of docs/metrics.md (histograms with their suffixes), and the labels it tells of."""
    names: set[str] = set()
    labels: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| `") or len(cells) < 4:
            continue
        in_row = _names_in(cells[0], names)
        names |= {name + suffix for name in in_row for suffix in (_SUFFIXES if "histogram" in cells[1] else ("",))}
        for group in re.findall(r"\{([a-z_,]+)\}", cells[0]):
            labels |= set(group.split(","))
    assert len(names) >= 40
    return names, labels


def _names_in(cell: str, before: set[str]) -> set[str]:
    """`pulsar_proxy_a{x}`, `…_b` and `rejected_…_requests` (the same as those before) of a table's first cell."""
    found = set()
    for text in re.findall(r"`([^`]+)`", cell):
        name = re.sub(r"\{[^}]*\}", "", text)
        start, dots, end = name.partition("…")
        if not dots:
            found.add(name)
        elif not start:
            found.add(f"pulsar_proxy{end}")
        else:
            found |= {one.replace("pulsar_proxy_", start) for one in before | found if one.endswith(end)}
    return found


def known() -> tuple[set[str], set[str]]:
    """Everything that an expression may name."""
    names, labels = documented()
    for family in Metrics().registry.collect():
        suffixes = _SUFFIXES if family.type == "histogram" else ("_total",) if family.type == "counter" else ("",)
        names |= {family.name + suffix for suffix in suffixes}
    return names | OF_PROMETHEUS, labels | COMMON_LABELS


def unknown_metrics(expression: str, more: set[str] | frozenset[str] = frozenset()) -> set[str]:
    """Names in an expression that nothing exposes. `more`: recorded ones."""
    plain = _STRING.sub('""', expression)
    for name in sorted(more, key=len, reverse=True):
        plain = plain.replace(name, "")
    return set(_WORD.findall(plain)) - known()[0]


def unknown_labels(expression: str) -> set[str]:
    """Labels that are matched or grouped by, and that no metric has."""
    plain = _STRING.sub('""', expression)
    used = set(re.findall(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*""', plain))
    for group in re.findall(r"\bby \(([^)]*)\)", plain):
        used |= {name.strip() for name in group.split(",")}
    return used - known()[1]
