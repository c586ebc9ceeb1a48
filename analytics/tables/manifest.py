"""The format of a root's tables: the highest number of the files `_manifest-000001.json`, ….

An older program must not write tables of a newer format: it would drop columns that it does not know, or, before
format 2, write files that no Delta log names. It looks for the same files, and refuses. A manifest is never
overwritten, since no operation overwrites atomically on every filesystem.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from pyarrow import fs as arrow_fs

from analytics.tables.errors import OtherFormat
from analytics.tables.locations import write_text
from analytics.tables.schemas import SCHEMA_VERSION, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAME = re.compile(r"_manifest-(\d{6})\.json")
DELTA_SINCE = 2


def read_version(files: arrow_fs.FileSystem, root: str) -> int | None:
    """Return the version of the tables' format; None if there are no tables yet. Raises OtherFormat."""
    entries = files.get_file_info(arrow_fs.FileSelector("", allow_not_found=True))
    newest = max((int(match[1]) for entry in entries if (match := _NAME.fullmatch(entry.base_name))), default=None)
    if newest is not None and newest > SCHEMA_VERSION:
        raise OtherFormat(
            f"the tables at {root} have format {newest}, this program knows up to {SCHEMA_VERSION}: upgrade it "
            "(nothing was read or written)"
        )
    if newest is not None and newest < DELTA_SINCE:
        raise OtherFormat(
            f"the tables at {root} have format {newest}, from before Delta tables: start at an empty place, and bring "
            "the metrics in again by `backfill` (nothing was read or written)"
        )
    return newest


def write_manifest(spark: SparkSession, root: str) -> None:
    """Write this program's manifest."""
    columns = {name: schema.simpleString() for name, schema in SCHEMAS.items()}
    text = json.dumps({"schema_version": SCHEMA_VERSION, "tables": columns}, indent=1)
    write_text(spark, f"{root}/_manifest-{SCHEMA_VERSION:06}.json", text)
