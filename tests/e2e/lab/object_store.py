"""MinIO on loopback, and tables in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from deltalake import DeltaTable
from local.go_tools import tool
from local.object_store import s3a_jars
from local.ports import free_port
from local.process import OwnedProcess
from pyarrow.fs import FileType, S3FileSystem

from .pipeline import Tables
from .waiting import eventually

USER = "tests"
BUCKET = "bucket"
REGION = "us-east-1"


class ObjectStore:
    """One server with one bucket, for the length of a block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        port = free_port()
        self._address, self._console = f"127.0.0.1:{port}", f"127.0.0.1:{free_port(avoid=(port,))}"
        self._password = secrets.token_hex(16)
        self._process: OwnedProcess | None = None

    def __enter__(self) -> Self:
        data = self._directory / "data"
        (data / BUCKET).mkdir(parents=True)
        addresses = ["--address", self._address, "--console-address", self._console]
        secret = {"MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": self._password}
        log = self._directory / "minio.log"
        self._process = OwnedProcess([tool("minio"), "server", *addresses, data], log=log, env=os.environ | secret)
        eventually(self._is_ready, what=f"MinIO is ready\n{self._process.log_tail()}")
        self._write_spark_defaults()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.exit_code() is None, self._process.log_tail()
        try:
            return bool(self.files.get_file_info(BUCKET).type == FileType.Directory)
        except OSError:
            return False

    @property
    def files(self) -> S3FileSystem:
        """All buckets."""
        return S3FileSystem(
            access_key=USER, secret_key=self._password, endpoint_override=self._address, scheme="http", region=REGION
        )

    def _write_spark_defaults(self) -> None:
        jars = f"{s3a_jars()}/*"
        s3a = {
            "endpoint": f"http://{self._address}",
            "endpoint.region": REGION,
            "path.style.access": "true",
            "access.key": USER,
            "secret.key": self._password,
        }
        settings = {"spark.driver.extraClassPath": jars, "spark.executor.extraClassPath": jars}
        settings |= {f"spark.hadoop.fs.s3a.{name}": value for name, value in s3a.items()}
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        (self._directory / "spark-defaults.conf").write_text("".join(lines))

    def tables(self, name: str) -> Tables:
        """Tables below this name in the bucket."""
        options = {
            "aws_access_key_id": USER,
            "aws_secret_access_key": self._password,
            "aws_endpoint_url": f"http://{self._address}",
            "aws_region": REGION,
            "aws_allow_http": "true",
        }
        root = self._directory / "data" / BUCKET / name
        return _StoredTables(root, f"{BUCKET}/{name}", options, self.files, {"SPARK_CONF_DIR": str(self._directory)})


class _StoredTables(Tables):
    """MinIO has a directory for each object, so what comes and goes is seen as with files."""

    def __init__(
        self, root: Path, place: str, options: dict[str, str], files: S3FileSystem, env: dict[str, str]
    ) -> None:
        super().__init__(root)
        self.env = env
        self._place, self._options, self._files = place, options, files

    @property
    def url(self) -> str:
        return f"s3a://{self._place}"

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(f"s3://{self._place}/{name}", storage_options=self._options)

    def _text(self, path: Path) -> str:
        with self._files.open_input_stream(f"{self._place}/{path.relative_to(self.root)}") as stream:
            return bytes(stream.read()).decode()
