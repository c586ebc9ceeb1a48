"""The metrics of all processes in one text, merged line by line.

A compromised process may write anything. Its text is not parsed into objects: every line must have the one form that
Prometheus reads, within bounds, or it is dropped; and the labels ``cluster``, ``role`` and ``worker`` are added here.
So the worst that a process can do is to report wrong numbers of its own.
"""

import math
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping

from proxy.runtime.fairness.byte_budget import utf8_bytes

PROCESS_BYTES_MAX = 4 * 1024 * 1024
"""Bound for one process: 1,000 principals (metrics.principals_max) take ten lines of at most 360 bytes each."""

BYTES_MAX = 64 * 1024 * 1024
"""Bound for all processes together. The use by principal of those that do not fit is left out, and nothing else."""

SERIES_MAX = 20_000
"""Bound for one process."""

LINES_MAX = 3 * SERIES_MAX
"""Bound for one process: a series with a family of its own takes three, HELP, TYPE and the sample."""

PART_LINES = 1000
PART_CHARACTERS = 128 * 1024
"""Size of a part that is read or written without a pause, whichever is reached first: some milliseconds."""

LINE_CHARACTERS_MAX = 4096

_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*+="(?:[^"\\\n]|\\[\\"n])*+"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:\{{({_LABEL}(?:,{_LABEL})*+)?\}})? "
    r"([-+]?[0-9]++(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]++)?|[-+]Inf|NaN)",
    re.ASCII,
)
_LABEL_NAME = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*+)="(?:[^"\\]|\\.)*+"', re.ASCII)
_METADATA = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*+) (.*)", re.ASCII)
_PRINCIPALS = re.compile(r"(?:# (?:HELP|TYPE) )?pulsar_proxy_principal_")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_SUFFIXES = frozenset({"", "_total", "_bucket", "_sum", "_count", "_created"})


class Family:
    """One metric family, with the samples of all processes."""

    def __init__(self) -> None:
        self.help = ""
        self.type = "untyped"
        self.samples: list[str] = []

    def lines(self, name: str) -> list[str]:
        """Return the family's lines in Prometheus' text format."""
        return [f"# HELP {name} {self.help}", f"# TYPE {name} {self.type}", *self.samples]


class Exposition:
    """Merger of the processes' texts. The first process that names a metric sets its help and type."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._bytes = 0

    def add_process(self, labels: Mapping[str, str], text: str) -> Counter[str]:
        """Merge a process's metrics; return the number of dropped lines by reason (``too_large``: the whole text;
        ``principals``: all lines of use by principal).
        """
        dropped: Counter[str] = Counter()
        for _pause in self.add_process_in_parts(labels, text, dropped):
            pass
        return dropped

    def add_process_in_parts(self, labels: Mapping[str, str], text: str, dropped: Counter[str]) -> Iterator[None]:
        """Merge a process's metrics, and yield between parts so that others can run; count dropped lines as ``add``."""
        size = utf8_bytes(text)
        if size <= PROCESS_BYTES_MAX and self._bytes + size > BYTES_MAX:
            text = yield from _without_principals(text, dropped)
            size = utf8_bytes(text)
        if size > PROCESS_BYTES_MAX or self._bytes + size > BYTES_MAX:
            dropped["too_large"] += 1
            return
        self._bytes += size
        yield from _Reader(self._families, labels, dropped).read(text)

    def text(self) -> bytes:
        """Return the merged text, families in alphabetical order."""
        return b"".join(self.text_in_parts())

    def text_in_parts(self) -> Iterator[bytes]:
        """Yield the merged text in parts of at most PART_LINES lines."""
        for name in sorted(self._families):
            if self._families[name].samples:
                lines = self._families[name].lines(name)
                for first in range(0, len(lines), PART_LINES):
                    yield "".join(f"{line}\n" for line in lines[first : first + PART_LINES]).encode()


def _without_principals(text: str, dropped: Counter[str]) -> Generator[None, None, str]:
    """Return a text without its use by principal; yield between parts, and count the dropped lines."""
    kept = []
    for number, line in enumerate(text.split("\n", LINES_MAX), 1):
        if number % PART_LINES == 0:
            yield
        if _PRINCIPALS.match(line):
            dropped["principals"] += 1
        else:
            kept.append(line)
    return "\n".join(kept)


class _Reader:
    """Reader of one process's text, line by line."""

    def __init__(self, families: dict[str, Family], labels: Mapping[str, str], dropped: Counter[str]) -> None:
        self._families = families
        self._added_labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        self._reserved_names = frozenset(labels)
        self._declared: set[str] = set()
        self._family: Family | None = None
        self._name = ""
        self._series = 0
        self._dropped = dropped

    def read(self, text: str) -> Iterator[None]:
        lines = text.split("\n", LINES_MAX)
        if len(lines) > LINES_MAX and lines[-1]:
            self._dropped["too_many_lines"] += lines[-1].count("\n") + (not lines[-1].endswith("\n"))
        characters = 0
        for number, line in enumerate(lines[:LINES_MAX], 1):
            characters += len(line)
            if number % PART_LINES == 0 or characters >= PART_CHARACTERS:
                characters = 0
                yield
            if len(line) > LINE_CHARACTERS_MAX or _CONTROL.search(line):
                self._dropped["malformed"] += 1
            elif line.startswith("#"):
                self._read_metadata(line)
            elif line:
                self._read_sample(line)

    def _read_metadata(self, line: str) -> None:
        found = _METADATA.fullmatch(line)
        if found is None or (found[1] == "TYPE" and found[3] not in _TYPES):
            self._dropped["malformed"] += 1
            return
        kind, name, words = found.groups()
        if name not in self._declared and len(self._declared) >= SERIES_MAX:
            self._dropped["too_many_series"] += 1
            self._family = None
            return
        self._declared.add(name)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family()
        if kind == "HELP" and not family.help:
            family.help = words
        elif kind == "TYPE" and not family.samples:
            family.type = words
        self._family, self._name = family, name

    def _read_sample(self, line: str) -> None:
        found = _SAMPLE.fullmatch(line)
        family = self._family
        if (
            found is None
            or family is None
            or not self._is_sample_name(found[1])
            or not self._are_labels_allowed(found[2])
            or _is_out_of_range(found[3])
        ):
            self._dropped["malformed"] += 1
        elif self._series >= SERIES_MAX:
            self._dropped["too_many_series"] += 1
        else:
            self._series += 1
            name, labels, value = found.groups()
            labels = f"{self._added_labels},{labels}" if labels else self._added_labels
            family.samples.append(f"{name}{{{labels}}} {value}")

    def _is_sample_name(self, name: str) -> bool:
        """Return True if a sample's name is that of its family, with or without a suffix."""
        return name.startswith(self._name) and name[len(self._name) :] in _SUFFIXES

    def _are_labels_allowed(self, labels: str | None) -> bool:
        """Return True if no label occurs twice and none is reserved: Prometheus would refuse the whole text for that.

        ``__name__`` is a second name of the metric; all others with two underscores are reserved, too.
        """
        if not labels:
            return True
        names = _LABEL_NAME.findall(labels)
        return (
            len(set(names)) == len(names)
            and self._reserved_names.isdisjoint(names)
            and not any(name.startswith("__") for name in names)
        )


def _is_out_of_range(value: str) -> bool:
    """Return True if a number overflows a float: Prometheus would refuse the whole text for that, too."""
    return math.isinf(float(value)) and not value.endswith("Inf")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
