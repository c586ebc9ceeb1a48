"""A standalone Spark cluster on this machine, and jobs given to it by spark-submit as docs/analytics.md says.

Its executors' Python has the packages that ours need, and not ours: what they import of it came by `--py-files`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark
from local.process import OwnedProcess

from tests.analytics.spark_settings import FEW_ROWS, SHORT_JOBS

from .pipeline import TOGETHER, as_argument
from .waiting import eventually

_HOME = Path(pyspark.__file__).parent
_PACK = """\
import pathlib, zipfile, analytics
root = pathlib.Path(analytics.__file__).parents[1]
with zipfile.ZipFile("analytics.zip", "w") as archive:
    for path in [root / "proxy/__init__.py", *root.glob("proxy/common/*.py"), *root.glob("analytics/**/*.*")]:
        archive.write(path, path.relative_to(root))
"""
_START_TIMEOUT_S = 120.0
_JOB_TIMEOUT_S = 400.0
_STOP_TIMEOUT_S = 10.0
# An environment without its .pth files, one of which leads to our own package in the tree.
_PYTHON = """\
#!/bin/sh
PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{packages}" exec {python} -S "$@"
"""
_SETTINGS = {
    "spark.ui.enabled": "false",
    **FEW_ROWS,
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}


class SparkCluster:
    """A master, and a worker with one executor for a job at a time; on loopback, on ports that the kernel picks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "python"
        self.python.write_text(_PYTHON.format(packages=sysconfig.get_path("purelib"), python=sys.executable))
        self.python.chmod(0o755)
        self._jobs = directory / "jobs.py"
        self._jobs.write_text(TOGETHER)
        self._events = directory / "events"
        self._events.mkdir()
        self._running: list[OwnedProcess] = []
        self._url = ""
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "SPARK_HOME": str(_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            # A master otherwise takes jobs by HTTP, on a port of its own.
            "SPARK_DAEMON_JAVA_OPTS": "-Dspark.master.rest.enabled=false",
            "PYSPARK_PYTHON": str(self.python),
            **SHORT_JOBS,
        }

    def __enter__(self) -> Self:
        try:
            self._pack()
            self._url = self._start("Master", r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
            more = ("--cores", "2", "--memory", "1g", "--work-dir", str(self.directory / "work"), self._url)
            self._start("Worker", r"(Successfully registered with master)", *more)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in reversed(self._running):
            process.stop(_STOP_TIMEOUT_S)
        self._running.clear()

    def _pack(self) -> None:
        subprocess.run([sys.executable, "-c", _PACK], cwd=self.directory, check=True, timeout=_START_TIMEOUT_S)

    def _start(self, name: str, ready: str, *more: str) -> str:
        """Start a daemon of Spark's, and wait for this line of its log; the line's group."""
        daemon = f"org.apache.spark.deploy.{name.lower()}.{name}"
        command = [_HOME / "bin" / "spark-class", daemon, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = self.directory / f"{name}.log"
        process = OwnedProcess([*command, *more], log=log, env=self._environment, cwd=self.directory)
        self._running.append(process)

        def said() -> str | None:
            assert process.exit_code() is None, process.log_tail()
            found = re.search(ready, log.read_text())
            return found and found[1]

        return eventually(said, what=f"{name} is ready", within_s=_START_TIMEOUT_S) or ""

    def can_import(self, module: str) -> bool:
        """Whether the executors' Python finds a module without Spark's help."""
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        ran = subprocess.run(
            [self.python, "-c", code], cwd=self.directory, env=self._environment, timeout=_START_TIMEOUT_S, check=False
        )
        return ran.returncode == 0

    def submit(self, *jobs: Sequence[object]) -> set[str]:
        """Run these jobs, one after the other; the executors that ran their tasks."""
        settings = _SETTINGS | {"spark.eventLog.dir": self._events.as_uri()}
        confs = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        submit = [_HOME / "bin" / "spark-submit", "--master", self._url, "--py-files", "analytics.zip", *confs]
        result = subprocess.run(
            [*map(str, submit), str(self._jobs), as_argument(jobs)],
            capture_output=True,
            text=True,
            cwd=self.directory,
            # The archive's place on this side: Spark does not give it to the process that plans a stream.
            env=self._environment | {"PYTHONPATH": str(self.directory / "analytics.zip")},
            timeout=_JOB_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-6000:]
        (log,) = self._events.iterdir()
        events = map(json.loads, log.read_text().splitlines())
        return {one["Task Info"]["Executor ID"] for one in events if one["Event"] == "SparkListenerTaskEnd"}
