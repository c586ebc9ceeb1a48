"""Levels of logs that an operator has set at run time, in place of the configured one."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from proto.roles import Role
from proxy.config.types import Config

LOGGING_ROLES = (Role.SUPERVISOR, Role.FORWARDER, Role.HTTP, Role.LOOKUP, Role.AUTH, Role.ADMIN)
"""Roles of processes, which have logs."""


class LogLevels:
    """The levels by role.

    ``changed``: what the program before an exec has left: a role's level and the end of its time, in seconds of
    time.monotonic(), which goes on in the next program; None: it stays until it is changed again.
    """

    def __init__(self, changed: Mapping[str, tuple[str, float | None]]) -> None:
        self.changed = dict(changed)

    def change(self, roles: Collection[Role], level: str, ends_at_s: float | None) -> None:
        """Set the level of some roles."""
        for role in roles:
            self.changed[role.value] = level, ends_at_s

    def restore(self, roles: Collection[Role] = LOGGING_ROLES) -> None:
        """Bring the configured level of some roles back."""
        for role in roles:
            self.changed.pop(role.value, None)

    def next_end_s(self) -> float:
        """Return when the next level's time ends; infinite where none has an end."""
        return min((end for _level, end in self.changed.values() if end is not None), default=float("inf"))

    def ended_at(self, now: float) -> list[Role]:
        """Return the roles for which the time of their level has ended."""
        return [Role(role) for role, (_level, end) in self.changed.items() if end is not None and end <= now]

    def level_of(self, role: Role, config: Config) -> str:
        """Return the level that is in force for a role."""
        changed = self.changed.get(role.value)
        return config.log.level if changed is None else changed[0]

    def apply_to(self, config: Config, role: Role) -> Config:
        """Return a configuration with the level in force for a role."""
        log = msgspec.structs.replace(config.log, level=self.level_of(role, config))
        return msgspec.structs.replace(config, log=log)

    def status(self, config: Config, now: float | None = None) -> dict[str, Any]:
        """Return the configured level, and the changed ones with the seconds that they have left (None: no end)."""
        at = time.monotonic() if now is None else now
        return {
            "configured": config.log.level,
            "changed": [
                {"role": role, "level": level, "seconds_left": None if end is None else max(0, round(end - at))}
                for role, (level, end) in sorted(self.changed.items())
            ],
        }
