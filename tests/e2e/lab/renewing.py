"""The client programs whose tokens end soon (clients/RENEWING.md)."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path

from .programs import CLIENTS, Program, Run

TOKEN_LIFETIME_S = 20
"""Who is asked last has a twentieth of it for the answer, less up to a second that whole seconds cost."""


def renewing(program: Program) -> Program:
    """The same library's program for short tokens."""
    *runtime, main = program.command
    other = {"java": "RenewingClient", "python": str(CLIENTS / "python" / "renewing.py")}.get(program.name, main)
    return dataclasses.replace(program, command=(*runtime, other))


def start(program: Program, url: str, topic: str, key: Path, **options: object) -> AbstractContextManager[Run]:
    """One client that produces and consumes until it is stopped, with messages of ``size`` bytes, ``rate`` a second."""
    return renewing(program).start("renewing", url, topic, key=key, **{"lifetime_s": TOKEN_LIFETIME_S, **options})
