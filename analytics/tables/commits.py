"""Atomic changes of many files, on filesystems that can only create and rename single files.

A change is prepared in a directory of `_staging`, which no reader lists. Then its *record* is created, one file:
`_commits/pending/<id>.json` says which staged files move where, which files are deleted, which hours are marked dirty.
That creation is the commit. The record is applied afterwards; applying is idempotent, and may be interrupted anywhere
and repeated by any process: each step checks if it is done. Finally the record moves to `_commits/done/`. Every process
that opens the tables applies pending records of killed processes (`apply_pending`), so a kill before the record's
creation changes nothing, and a kill after it loses nothing.

    staging ──record──▶ pending ──marks, removes, adds──▶ done

Two processes may apply one record at the same time, since names are never reused: no process adds what the other
removes. Readers take a snapshot when no record is pending (`analytics.tables.store`). Two jobs that rewrite the same
partition are detected by a check before the commit, not by a lock: if a rollup and a compaction commit within the same
few milliseconds, rows may be there twice. So do not run them on the same hours at the same time.
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
    """A record names a staged file that is neither staged nor in place: files were deleted by hand."""


class ChangedMeanwhile(Exception):
    """Files that this change replaces were replaced by another job. Nothing was changed: run the job again."""


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """Record of one change. `adds`: staged path → final path; all paths are relative to the root."""

    staging: str = ""
    """The directory of the staged files, deleted at the end."""
    adds: dict[str, str] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    dirty: dict[str, list[str]] = field(default_factory=dict)
    """Queue → hours, as `hour_text` writes them."""
    clears: list[str] = field(default_factory=list)
    """Paths of dirty marks that this change resolves."""


def new_id(what: str) -> str:
    """Return a unique name for a change."""
    return f"{what}-{uuid.uuid4().hex}"


def commit_change(files: Filesystem, identity: str, record: ChangeRecord) -> None:
    """Commit and apply a change. Raises ChangedMeanwhile, FilesystemError.

    Once the record is created, the change is final: if this process is killed, another one applies it.
    """
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
    ):  # done by a process that was believed dead
        apply_pending(files)
        if record.staging:
            files.delete(record.staging)
        return
    apply_change(files, identity, record)


def is_done(files: Filesystem, identity: str) -> bool:
    """Return True if this change was applied. Of a stream's batches only the last is recorded: only it can recur."""
    return files.exists(f"{DONE}/{identity}.json")


def apply_pending(files: Filesystem) -> list[str]:
    """Apply the pending records, left by killed processes; return the identities of these changes."""
    identities = list_pending(files)
    for identity in identities:
        text = files.read_text(f"{PENDING}/{identity}.json")
        if text is not None:  # None: its own process is alive and has applied it
            apply_change(files, identity, ChangeRecord(**json.loads(text)))
    return identities


def list_pending(files: Filesystem) -> list[str]:
    """Return the identities of the changes that are committed but not completely applied."""
    return _identities(files, PENDING)


def read_state(files: Filesystem) -> tuple[list[str], list[str]]:
    """Return pending and done identities: two equal states around a listing prove that no change happened within it."""
    return list_pending(files), _identities(files, DONE)


def _identities(files: Filesystem, directory: str) -> list[str]:
    return [name.removesuffix(".json") for name in files.names(directory) if name[0] != "."]


def apply_change(files: Filesystem, identity: str, record: ChangeRecord) -> None:
    """Apply a committed change. Marks come first: a superfluous mark costs a computation, a missing one a wrong sum."""
    for queue, hours in record.dirty.items():
        files.create_text(f"{DIRTY}/{queue}/{identity}.json", json.dumps(hours))
    for path in record.removes:
        files.delete(path)
    for staged, final in record.adds.items():
        if not files.move(staged, final) and not _is_in_place(files, identity, final):
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


def _is_in_place(files: Filesystem, identity: str, final: str) -> bool:
    """Return True if the file is in place, or another process finished the change (the file may be compacted since)."""
    return files.exists(final) or is_done(files, identity)


def batch_id(stream: str, number: int) -> str:
    """Return the name of a stream's batch. Only batches can recur under the same name."""
    return f"{_BATCH}{stream}-{number:012}"


def is_batch_id(identity: str) -> bool:
    """Return True for the name of a stream's batch, which can recur."""
    return identity.startswith(_BATCH)


def delete_earlier_batches(files: Filesystem, identity: str) -> None:
    """Delete the records of the stream's batches before this one: only the last can recur."""
    stream = identity.rpartition("-")[0]
    for name in _identities(files, DONE):
        if name.rpartition("-")[0] == stream and name < identity:
            files.delete(f"{DONE}/{name}.json")
