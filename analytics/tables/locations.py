"""Locations of tables: one root for Spark (Hadoop's paths) and for delta-rs (object-store URLs and options)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError

from analytics.tables.errors import TablesError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_S3A = {
    "fs.s3a.access.key": "aws_access_key_id",
    "fs.s3a.secret.key": "aws_secret_access_key",
    "fs.s3a.session.token": "aws_session_token",
    "fs.s3a.endpoint": "aws_endpoint_url",
    "fs.s3a.endpoint.region": "aws_region",
}
"""Hadoop's setting → the same of delta-rs; what Hadoop has not, delta-rs takes from AWS' environment variables."""


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of tables: its URL for Spark, its URL for delta-rs, and delta-rs' options (with secrets)."""

    spark_url: str
    delta_url: str
    options: dict[str, str] = field(default_factory=dict, repr=False)


def locate(spark: SparkSession, root: str) -> Location:
    """Return the location of `root`: a path, or a URL of Hadoop's (file:, s3a:, hdfs:, abfss:, gs:)."""
    session: Any = spark
    settings = session._jsc.hadoopConfiguration()  # noqa: SLF001 -- there is no public way to Hadoop's settings
    if not urlsplit(root).scheme:
        default = str(settings.get("fs.defaultFS") or "file:///")
        root = f"{default.rstrip('/')}{root}" if not default.startswith("file:") else f"file://{Path(root).absolute()}"
    root = root.rstrip("/")
    parts = urlsplit(root)
    if parts.scheme == "file":
        path = parts.path
        return Location(f"file://{path}", path)  # Hadoop's paths are not percent-encoded
    if parts.scheme in {"s3", "s3a"}:
        return Location(f"s3a://{parts.netloc}{parts.path}", f"s3://{parts.netloc}{parts.path}", _s3_options(settings))
    return Location(root, root)


def _s3_options(settings: Any) -> dict[str, str]:
    found = {ours: str(value) for theirs, ours in _S3A.items() if (value := settings.get(theirs))}
    plain = str(settings.get("fs.s3a.connection.ssl.enabled")) == "false"
    if (endpoint := found.get("aws_endpoint_url")) and "://" not in endpoint:
        found["aws_endpoint_url"] = f"{'http' if plain else 'https'}://{endpoint}"
    if found.get("aws_endpoint_url", "").startswith("http://"):
        found["aws_allow_http"] = "true"  # as Hadoop does where its endpoint says so
    return found


def write_text(spark: SparkSession, url: str, text: str | bytes) -> None:
    """Write a file (text as UTF-8) to a place that Spark reaches, replacing an existing one. Raises TablesError."""
    session: Any = spark
    try:
        path = session._jvm.org.apache.hadoop.fs.Path(url)  # noqa: SLF001
        stream = path.getFileSystem(session._jsc.hadoopConfiguration()).create(path, True)  # noqa: SLF001
        try:
            stream.write(bytearray(text.encode() if isinstance(text, str) else text))
        finally:
            stream.close()
    except Py4JJavaError as error:
        raise TablesError(f"cannot write {url}: {error.java_exception.toString()}") from error
