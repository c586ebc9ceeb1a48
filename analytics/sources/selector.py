"""Plain selectors of PromQL, as `up{job="proxy"}`: parsed, written, and applied to labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from analytics.series import METRIC_NAME
from analytics.sources.options import BadOption

OPERATORS = ("=", "!=", "=~", "!~")
"""In the order of remote read's codes."""

_SELECTOR = re.compile(r"\s*([a-zA-Z_:][\w:]*)?\s*(?:\{(.*)\}\s*)?", re.ASCII | re.DOTALL)
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*|$)', re.ASCII)


class Matcher(NamedTuple):
    """A condition on a label; one that a series lacks is empty. Expressions match a whole value."""

    label: str
    operator: str
    value: str

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether these labels meet the condition."""
        value = labels.get(self.label, "")
        found = re.fullmatch(self.value, value) is not None if "~" in self.operator else value == self.value
        return found != self.operator.startswith("!")


def parse_selector(text: str) -> tuple[Matcher, ...]:
    """Parse a selector; an empty text selects everything. Raises BadOption."""
    parts = _SELECTOR.fullmatch(text)
    matchers = [Matcher(METRIC_NAME, "=", parts[1])] if parts and parts[1] else []
    inside, at = (parts[2] or "").strip() if parts else "", 0
    try:
        while at < len(inside):
            if (found := _MATCHER.match(inside, at)) is None:
                break
            matchers.append(Matcher(found[1], found[2], json.loads(found[3], strict=False)))
            re.compile(matchers[-1].value if "~" in found[2] else "")
            at = found.end()
    except (ValueError, re.error):
        at = -1
    if parts is None or at < len(inside):
        raise BadOption(f'match is {text!r}, and must be a plain selector, as up{{job="proxy",instance!~"test.+"}}')
    return tuple(matchers)


def selector_text(matchers: Iterable[Matcher]) -> str:
    """Return the selector of these conditions."""
    return f"{{{','.join(f'{name}{op}{json.dumps(value, ensure_ascii=False)}' for name, op, value in matchers)}}}"
