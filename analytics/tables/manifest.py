"""The schema version of a root's tables: the highest number of the files `_manifest-000001.json`, ….

Columns are only added, so a newer program reads older tables (columns that a file lacks are null) and an older program
must not write newer ones: it would drop columns that it does not know. A manifest is never overwritten, since no
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


def read_version(files: Filesystem) -> int | None:
    """Return the tables' schema version; None if there are no tables yet. Raises NewerTables."""
    found = [int(match[1]) for name in files.names("") if (match := _NAME.fullmatch(name))]
    newest = max(found, default=None)
    if newest is not None and newest > SCHEMA_VERSION:
        raise NewerTables(
            f"the tables at {files.root} have schema version {newest}, this program knows up to {SCHEMA_VERSION}: "
            "upgrade it (nothing was read or written)"
        )
    return newest


def ensure_manifest(files: Filesystem) -> None:
    """Write this program's manifest, before the first write of tables. Raises NewerTables."""
    if read_version(files) == SCHEMA_VERSION:
        return
    columns = {name: schema.simpleString() for name, schema in SCHEMAS.items()}
    name = f"_manifest-{SCHEMA_VERSION:06}.json"
    files.create_text(name, json.dumps({"schema_version": SCHEMA_VERSION, "tables": columns}, indent=1))
