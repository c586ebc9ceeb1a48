"""Log configuration of a process of the cluster: each entry holds the process's role and number.

Entries are written for a tired operator: what happened, to which client, and what to do. Never log a credential:
callers pass roles, addresses and reasons, not data.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

from proto.roles import Role
from proxy.common.logs import Throttle, configure_structlog
from proxy.config.types import Log

ENTRIES_PER_SECOND_MAX = 50
VALUE_CHARACTERS_MAX = 1000

DROPPED_FIELD = "suppressed_before"
"""The field that holds how many entries of the same event were dropped before this one."""

_KEY_ORDER = ["timestamp", "level", "role", "worker", "event"]


def printable(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape an entry's text: what clients choose (a topic, a method) cannot forge entries or drive a terminal."""
    for key, value in entry.items():
        if isinstance(value, str) and not (value.isprintable() and len(value) <= VALUE_CHARACTERS_MAX):
            entry[key] = value[:VALUE_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return entry


def _printable_traceback(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    text = entry.get("exception")
    if isinstance(text, str):
        entry["exception"] = "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
    return entry


@dataclass(frozen=True, slots=True)
class _Origin:
    """A structlog processor that adds the process's role and number.

    (Not context variables: these reach only the task that sets them.)
    """

    role: Role
    worker: int

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        entry["role"], entry["worker"] = self.role.value, self.worker
        return entry


def configure_logs(config: Log, role: Role, worker: int, *also: structlog.typing.Processor) -> None:
    """Set up this process's logs. Before this is called structlog's defaults apply.

    ``also``: processors that see each entry as it is written.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if config.format == "json"
        else structlog.processors.LogfmtRenderer(key_order=_KEY_ORDER, drop_missing=True)
    )
    configure_structlog(
        config.level,
        Throttle(ENTRIES_PER_SECOND_MAX, DROPPED_FIELD),
        before=[printable, _Origin(role, worker)],
        renderers=[_printable_traceback, *also, renderer],
    )
