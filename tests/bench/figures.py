"""Medians and ranges, as text."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """What several rounds gave."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = number(min(self.values)), number(max(self.values))
        middle = number(self.median)
        return middle if low == high else f"{middle} ({low}-{high})"


def figure(values: Sequence[float]) -> Figure | None:
    """A figure, where there are values."""
    return Figure(tuple(values)) if values else None


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure | None:
    """The ratios round by round."""
    return figure([a / b for a, b in zip(ours, theirs, strict=True)]) if ours and theirs else None


def number(value: float) -> str:
    """Three digits that count."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def text(value: object | None) -> str:
    """A cell; nothing measured is a dash."""
    return "-" if value is None else str(value)
