"""Changes of many files at once, all or nothing, on filesystems that can only create and rename single files.

A change is prepared in a directory of `_staging`, where nobody reads. Then its *record* is created, one file:
`_commits/pending/<id>.json` says which staged files go where, which files go away, which hours are marked dirty. That
creation is the commit. Applying the record comes after, and may be repeated and interrupted anywhere, by any process:
each step looks whether it is done. At last the record moves to `_commits/done/`. Whoever opens the tables applies what
a killed process left (`recover`), so a kill before the record's creation changes nothing, and one after it, all.

    staging ──record──▶ pending ──marks, removes, adds──▶ done

Two processes may apply one record at the same time. They do no harm, for names are never used twice: what one removes
the other never adds. Readers take a snapshot when no record is pending (`analytics.tables.store`). Two jobs that
rewrite the same partition are kept apart by a look before the commit, not by a lock: if a rollup and a compaction
commit within the same few milliseconds, rows may be there twice. So do not run them on the same hours at the same time.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field

from analytics.tables.filesystem import Filesystem, FilesystemError

STAGING = "_staging"
PENDING = "_commits/pending"
DONE = "_commits/done"
DIRTY = "_dirty"
FILES_MAX = 200_000
_BATCH = "batch-"


class BrokenCommit(Exception):
    """A record names a staged file that is neither staged nor in place: somebody deleted files by hand."""


class ChangedMeanwhile(Exception):
    """Files that this change wants to replace were replaced by another job. Nothing was changed: run the job again."""


@dataclass(frozen=True, slots=True)
class Record:
    """One change. `adds`: staged path → final path; all paths are relative to the root."""

    staging: str = ""
    """The directory of the staged files, which goes when all is done."""
    adds: dict[str, str] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    dirty: dict[str, list[str]] = field(default_factory=dict)
    """Queue → hours, as `hour_text` writes them."""
    clears: list[str] = field(default_factory=list)
    """Paths of dirty marks that this change has dealt with."""


def new_id(what: str) -> str:
    """A name that no other change has."""
    return f"{what}-{uuid.uuid4().hex}"


def commit(files: Filesystem, identity: str, record: Record) -> None:
    """Make the change, or raise ChangedMeanwhile. Once its record is there, it will be made, by whatever process."""
    count = len(record.adds) + len(record.removes)
    if count > FILES_MAX:
        raise FilesystemError(f"one change of {count} files, {FILES_MAX} are allowed: use fewer hours or run compact")
    gone = [path for path in record.removes if not files.exists(path)]
    if gone:
        raise ChangedMeanwhile(
            f"another job replaced {files.url(gone[0])} meanwhile; nothing was changed, run it again"
        )
    if is_done(files, identity) or not files.create_text(
        f"{PENDING}/{identity}.json", json.dumps(asdict(record), indent=1)
    ):  # by a process that everybody, and this one, took for dead
        recover(files)
        if record.staging:
            files.delete(record.staging)
        return
    apply(files, identity, record)


def is_done(files: Filesystem, identity: str) -> bool:
    """Was this change made. (Of a stream's batches only the last is remembered: only that one can come again.)"""
    return files.exists(f"{DONE}/{identity}.json")


def recover(files: Filesystem) -> list[str]:
    """Apply what killed processes had committed; the identities of these changes."""
    identities = pending(files)
    for identity in identities:
        text = files.read_text(f"{PENDING}/{identity}.json")
        if text is not None:  # None: its own process is alive and was faster
            apply(files, identity, Record(**json.loads(text)))
    return identities


def pending(files: Filesystem) -> list[str]:
    """Identities of the changes that are committed but not wholly applied."""
    return _identities(files, PENDING)


def state(files: Filesystem) -> tuple[list[str], list[str]]:
    """Pending and done identities: two equal states around a listing prove that no change fell into it."""
    return pending(files), _identities(files, DONE)


def _identities(files: Filesystem, directory: str) -> list[str]:
    return [name.removesuffix(".json") for name in files.names(directory) if name[0] != "."]


def apply(files: Filesystem, identity: str, record: Record) -> None:
    """Make a committed change real. Marks come first: a mark too many costs a computation, one too few a wrong sum."""
    for queue, hours in record.dirty.items():
        files.create_text(f"{DIRTY}/{queue}/{identity}.json", json.dumps(hours))
    for path in record.removes:
        files.delete(path)
    for staged, final in record.adds.items():
        if not files.move(staged, final) and not _moved(files, identity, final):
            raise BrokenCommit(
                f"change {identity}: {files.url(staged)} is gone and {files.url(final)} is not there. Files of the "
                f"tables were deleted by hand. Restore them, or give the change up: delete {PENDING}/{identity}.json"
            )
    for path in record.clears:
        files.delete(path)
    if record.staging:
        files.delete(record.staging)
    if not files.move(f"{PENDING}/{identity}.json", f"{DONE}/{identity}.json") and not is_done(files, identity):
        raise FilesystemError(f"cannot move {files.url(PENDING)}/{identity}.json to {files.url(DONE)}")


def _moved(files: Filesystem, identity: str, final: str) -> bool:
    """Is the file in place, or was the whole change finished by another process (and the file since compacted)."""
    return files.exists(final) or is_done(files, identity)


def batch_id(stream: str, number: int) -> str:
    """The name of a stream's batch: the only changes that can come again under their name."""
    return f"{_BATCH}{stream}-{number:012}"


def may_come_again(identity: str) -> bool:
    """Is this the name of a stream's batch."""
    return identity.startswith(_BATCH)


def forget_before(files: Filesystem, identity: str) -> None:
    """Forget the batches of the same stream before this one: only the last can come again."""
    stream = identity.rpartition("-")[0]
    for name in _identities(files, DONE):
        if name.rpartition("-")[0] == stream and name < identity:
            files.delete(f"{DONE}/{name}.json")
