"""The metrics of all processes in one text, merged line by line.

A process that was taken over may write anything. What it writes is not parsed into objects: every line must have the
one form that Prometheus reads, within bounds, or it is dropped; and it gets the labels ``cluster``, ``role`` and
``worker`` from us. So the worst that a process can do is to say wrong numbers of its own.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping

PROCESS_CHARACTERS_MAX = 4 * 1024 * 1024
"""Of one process: 1,000 principals (metrics.principals_max) take ten lines of some 150 bytes each."""

CHARACTERS_MAX = 64 * 1024 * 1024
"""Of all processes together."""

SERIES_MAX = 20_000
"""Of one process."""

LINE_CHARACTERS_MAX = 4096

_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*+="(?:[^"\\\n]|\\[\\"n])*+"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:\{{({_LABEL}(?:,{_LABEL})*+)?\}})? "
    r"([-+]?[0-9]++(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]++)?|[-+]Inf|NaN)",
    re.ASCII,
)
_LABEL_NAME = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*+)="(?:[^"\\]|\\.)*+"', re.ASCII)
_ABOUT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*+) (.*)", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_created")


class Family:
    """One metric of all processes."""

    def __init__(self) -> None:
        self.help = ""
        self.type = "untyped"
        self.samples: list[str] = []

    def lines(self, name: str) -> list[str]:
        """As Prometheus reads it."""
        return [f"# HELP {name} {self.help}", f"# TYPE {name} {self.type}", *self.samples]


class Exposition:
    """Takes one process's text after the other. The first that names a metric says what it is."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._characters = 0

    def add(self, labels: Mapping[str, str], text: str) -> Counter[str]:
        """Merge a process's metrics; how many lines were dropped, by reason (``too_large``: the whole text, as one)."""
        if len(text) > PROCESS_CHARACTERS_MAX or self._characters + len(text) > CHARACTERS_MAX:
            return Counter(too_large=1)
        self._characters += len(text)
        return _Reader(self._families, labels).read(text)

    def text(self) -> bytes:
        """All of it, families in alphabetical order."""
        lines = [
            line
            for name in sorted(self._families)
            if self._families[name].samples
            for line in self._families[name].lines(name)
        ]
        return "".join(f"{line}\n" for line in lines).encode()


class _Reader:
    """One process's text, family after family."""

    def __init__(self, families: dict[str, Family], labels: Mapping[str, str]) -> None:
        self._families = families
        self._ours = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        self._names = frozenset(labels)
        self._own: set[str] = set()
        self._family = Family()
        self._sample_names: frozenset[str] = frozenset()
        self._series = 0
        self._dropped: Counter[str] = Counter()

    def read(self, text: str) -> Counter[str]:
        for line in text.split("\n"):
            if len(line) > LINE_CHARACTERS_MAX or _CONTROL.search(line):
                self._dropped["malformed"] += 1
            elif line.startswith("#"):
                self._about(line)
            elif line:
                self._sample(line)
        return self._dropped

    def _about(self, line: str) -> None:
        found = _ABOUT.fullmatch(line)
        if found is None or (found[1] == "TYPE" and found[3] not in _TYPES):
            self._dropped["malformed"] += 1
            return
        kind, name, words = found.groups()
        if name not in self._own and len(self._own) >= SERIES_MAX:
            self._dropped["too_many_series"] += 1
            self._sample_names = frozenset()
            return
        self._own.add(name)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family()
        if kind == "HELP" and not family.help:
            family.help = words
        elif kind == "TYPE" and not family.samples:
            family.type = words
        self._family = family
        self._sample_names = frozenset(name + suffix for suffix in _SUFFIXES)

    def _sample(self, line: str) -> None:
        found = _SAMPLE.fullmatch(line)
        if (
            found is None
            or found[1] not in self._sample_names
            or not self._may_have(found[2])
            or _is_out_of_range(found[3])
        ):
            self._dropped["malformed"] += 1
        elif self._series >= SERIES_MAX:
            self._dropped["too_many_series"] += 1
        else:
            self._series += 1
            name, labels, value = found.groups()
            labels = f"{self._ours},{labels}" if labels else self._ours
            self._family.samples.append(f"{name}{{{labels}}} {value}")

    def _may_have(self, labels: str | None) -> bool:
        """Whether no label stands there twice, and none is Prometheus's own: it would refuse everything for that.

        ``__name__`` is a second name of the metric; all others with two underscores are reserved, too.
        """
        if not labels:
            return True
        names = _LABEL_NAME.findall(labels)
        return (
            len(set(names)) == len(names)
            and self._names.isdisjoint(names)
            and not any(name.startswith("__") for name in names)
        )


def _is_out_of_range(value: str) -> bool:
    """Whether a number is too large to be one: Prometheus would refuse everything for that, too."""
    return math.isinf(float(value)) and not value.endswith("Inf")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
