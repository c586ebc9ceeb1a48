"""Which version of the schema a root was written with: `_manifest-000001.json`, the highest number counts.

Columns are only added, so a newer program reads older tables (what a file does not have is null) and an older program
must not write newer ones: it would drop the columns that it does not know. A manifest is never overwritten, for no
operation overwrites atomically on every filesystem.
"""

from __future__ import annotations

import json
import re

from analytics.tables.filesystem import Filesystem
from analytics.tables.schemas import SCHEMA_VERSION, SCHEMAS

_NAME = re.compile(r"_manifest-(\d{6})\.json")


class NewerTables(Exception):
    """The tables were written by a newer version of this program."""


def version(files: Filesystem) -> int | None:
    """The schema's version of the tables, None where there are none yet. Raises NewerTables."""
    found = [int(match[1]) for name in files.names("") if (match := _NAME.fullmatch(name))]
    newest = max(found, default=None)
    if newest is not None and newest > SCHEMA_VERSION:
        raise NewerTables(
            f"the tables at {files.root} have schema version {newest}, this program knows up to {SCHEMA_VERSION}: "
            "upgrade it (nothing was read or written)"
        )
    return newest


def ensure(files: Filesystem) -> None:
    """Before the first write: say that the tables are now of this program's version. Raises NewerTables."""
    if version(files) == SCHEMA_VERSION:
        return
    columns = {name: schema.simpleString() for name, schema in SCHEMAS.items()}
    name = f"_manifest-{SCHEMA_VERSION:06}.json"
    files.create_text(name, json.dumps({"schema_version": SCHEMA_VERSION, "tables": columns}, indent=1))
