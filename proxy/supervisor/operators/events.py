"""The last entries of the supervisor's log, for the page at the admin port.

Of the supervisor's alone: what it tells is few (workers that end, reloads, files taken over), and no client writes it.
"""

from collections import deque
from collections.abc import MutableMapping
from typing import Any

EVENTS_MAX = 100
TEXT_CHARACTERS_MAX = 300

_LEFT_OUT = frozenset({"timestamp", "level", "role", "worker", "event", "exception", "exc_info"})


class RecentEvents:
    """A structlog processor that keeps the last EVENTS_MAX entries, each cut to TEXT_CHARACTERS_MAX."""

    def __init__(self) -> None:
        self._entries: deque[dict[str, str]] = deque(maxlen=EVENTS_MAX)

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Keep an entry as the log has it, without its traceback, and pass it on."""
        fields = ", ".join(f"{key}: {value}" for key, value in entry.items() if key not in _LEFT_OUT)
        self._entries.append(
            {
                "at": str(entry.get("timestamp", "")),
                "level": str(entry.get("level", "")),
                "event": str(entry.get("event", ""))[:TEXT_CHARACTERS_MAX],
                "details": fields[:TEXT_CHARACTERS_MAX],
            }
        )
        return entry

    def latest(self) -> list[dict[str, str]]:
        """Return the entries, the latest first."""
        return [*reversed(self._entries)]
