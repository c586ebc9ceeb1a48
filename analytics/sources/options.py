"""Validation of a data source's options: unknown names and invalid values raise an error when the source is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from analytics.errors import AnalyticsError
from analytics.sources.rows import SCHEMAS


class BadOption(AnalyticsError, ValueError):
    """An unknown, missing or invalid option of a data source."""


class Options:
    """Options from Spark: names in any case, values as text. `allowed`: the valid names."""

    def __init__(self, source: str, given: Mapping[str, str], allowed: Collection[str]) -> None:
        self._source = source
        self._given = {name.lower(): value for name, value in given.items()}
        unknown = sorted(set(self._given) - {name.lower() for name in allowed})
        if unknown:
            known = ", ".join(sorted(allowed))
            raise BadOption(f"{source} has no option {unknown[0]!r}; it has {known}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return an option's text. Raises BadOption if it is missing and there is no default."""
        value = self._given.get(name.lower(), default)
        if value is None or (value == "" and default is None):
            raise BadOption(f"{self._source} needs the option {name!r}")
        return value

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """Return an option as an integer from `least` to `most`. Raises BadOption."""
        text = self.text(name, str(default))
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise BadOption(f"{self._source}: {name} is {text!r}, and must be a whole number from {least} to {most}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option of `true` or `false`. Raises BadOption."""
        text = self.text(name, str(default)).lower()
        if text not in {"true", "false"}:
            raise BadOption(f"{self._source}: {name} is {text!r}, and must be true or false")
        return text == "true"

    def names(self, name: str, default: Collection[str]) -> tuple[str, ...]:
        """Return an option's comma-separated names; none for an empty text."""
        given = self._given.get(name.lower())
        return tuple(default) if given is None else tuple(one.strip() for one in given.split(",") if one.strip())

    def table(self) -> str:
        """Return the kind of rows: samples, histograms, series or all; empty by default. Raises BadOption."""
        table = self.text("table", "")
        if table not in {"", *SCHEMAS}:
            raise BadOption(f"{self._source}: table is {table!r}, and must be one of {', '.join(SCHEMAS)}")
        return table
