"""The file operations that the tables need, on any Hadoop filesystem (file:, hdfs:, s3a:, …), through Spark's own JVM.

Assumptions: a listing shows files created before (S3 has done so since 2020), a file appears whole under its name after
`create` is closed and the file renamed, and a rename within one filesystem never loses the file. Renames of a
*directory* need not be atomic (on s3a they are not): no function renames a directory.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT_BYTES_MAX = 64 << 20


class FilesystemError(Exception):
    """A failed file operation; the text has the operation, the path and the filesystem's reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory; `modified_ms` is Unix time by the filesystem's clock."""

    name: str
    is_directory: bool
    modified_ms: int
    size_bytes: int


class Filesystem:
    """Filesystem below one root. Paths are relative to `root`, with `/` between names; "" is the root itself."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        session: Any = spark
        self._hadoop = session._jvm.org.apache.hadoop.fs  # noqa: SLF001 -- there is no public way to Hadoop's FileSystem
        configuration = session._jsc.hadoopConfiguration()  # noqa: SLF001
        try:
            path = self._hadoop.Path(root.rstrip("/") or "/")
            self._fs = path.getFileSystem(configuration)
        except Py4JJavaError as error:
            raise FilesystemError(f"cannot use {root!r}: {_reason(error)}") from error
        # On a local disk: Parquet's pages have checksums of their own, and one file less saves several processes (to
        # set a file's permissions, Hadoop without its native library runs chmod).
        self._fs.setWriteChecksum(False)
        self.root = str(path.makeQualified(self._fs.getUri(), self._fs.getWorkingDirectory()).toString())

    def url(self, path: str) -> str:
        """Return the absolute URL of a path, for Spark."""
        return f"{self.root}/{path}" if path else self.root

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory at this path."""
        return bool(self._call("look for", path, self._fs.exists, self._path(path)))

    def entries(self, path: str) -> list[Entry]:
        """Return a directory's entries, sorted by name; none for an absent directory."""
        if not self.exists(path):
            return []
        statuses = self._call("list", path, self._fs.listStatus, self._path(path))
        return sorted((_entry(status) for status in statuses), key=lambda entry: entry.name)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted, with hidden ones."""
        return [entry.name for entry in self.entries(path)]

    def files_below(self, path: str) -> list[str]:
        """Return all visible files at any depth, relative to `path`, sorted; names with a first . or _ are hidden."""
        return sorted(self._visible(path, ""))

    def _visible(self, path: str, prefix: str) -> list[str]:
        found = []
        for entry in self.entries(path):
            if entry.name[0] in "._":
                continue
            name = prefix + entry.name
            found += self._visible(f"{path}/{entry.name}", f"{name}/") if entry.is_directory else [name]
        return found

    def read_text(self, path: str) -> str | None:
        """Return the file's text (UTF-8, at most TEXT_BYTES_MAX), or None if there is no such file."""
        try:
            stream = self._fs.open(self._path(path))
            try:
                return bytes(stream.readNBytes(TEXT_BYTES_MAX)).decode()
            finally:
                stream.close()
        except Py4JJavaError as error:
            if not self.exists(path):
                return None
            raise FilesystemError(f"cannot read {self.url(path)}: {_reason(error)}") from error

    def create_text(self, path: str, text: str) -> bool:
        """Create a file atomically: readers see all of it or no file. Return False, and keep the file, if it exists."""
        data = text.encode()
        if len(data) > TEXT_BYTES_MAX:
            raise FilesystemError(f"{self.url(path)} would have {len(data)} bytes, {TEXT_BYTES_MAX} are allowed")
        parent, _, name = path.rpartition("/")
        hidden = f"{parent}/.{name}.{uuid.uuid4().hex}".lstrip("/")
        self._call("write", path, self._create, hidden, data)
        if self.move(hidden, path):
            return True
        self.delete(hidden)
        if not self.exists(path):
            raise FilesystemError(f"cannot write {self.url(path)}: the filesystem refused to rename a file to it")
        return False

    def _create(self, path: str, data: bytes) -> None:
        stream = self._fs.create(self._path(path), False)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()

    def move(self, source: str, target: str) -> bool:
        """Rename a file, creating the target's directory; return False if the source is gone or the target exists."""
        parent = target.rpartition("/")[0]
        if parent:
            self._call("create directory", parent, self._fs.mkdirs, self._path(parent))
        try:
            return bool(self._fs.rename(self._path(source), self._path(target)))
        except Py4JJavaError as error:
            if not self.exists(source) or self.exists(target):
                return False
            raise FilesystemError(
                f"cannot rename {self.url(source)} to {self.url(target)}: {_reason(error)}"
            ) from error

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its content; do nothing for an absent path."""
        self._call("delete", path, self._fs.delete, self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._hadoop.Path(self.url(path))

    def _call(self, what: str, path: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Py4JJavaError as error:
            raise FilesystemError(f"cannot {what} {self.url(path)}: {_reason(error)}") from error


def _entry(status: Any) -> Entry:
    name = str(status.getPath().getName())
    return Entry(name, bool(status.isDirectory()), int(status.getModificationTime()), int(status.getLen()))


def _reason(error: Py4JJavaError) -> str:
    """Return the first line of Java's message: a stack of Scala frames helps no operator."""
    return str(error.java_exception.toString()).splitlines()[0]
