"""One SparkSession for the whole run: it takes seconds to start, so every test of a job shares it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.analytics import local_files
from tests.analytics.spark_settings import FEW_ROWS, QUICK_START

SETTINGS = {
    "spark.driver.extraJavaOptions": QUICK_START,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # as analytics.jobs.session
    **FEW_ROWS,
    "spark.sql.session.timeZone": "UTC",
}


JVM_TIMEOUT_S = 900
"""Of one test with Spark, where several JVMs share few CPUs: some take minutes then."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the session, and give it time."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.jvm)
            item.add_marker(pytest.mark.timeout(JVM_TIMEOUT_S))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, 1 GiB, UTC, no page; what it leaves on disk is below pytest's own directory."""
    directory = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_DRIVER_MEMORY"] = "1g"
    builder = SparkSession.builder.master("local[2]").appName("tests")
    places = {
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.sql.streaming.checkpointLocation": f"{directory}/checkpoints",
        "spark.local.dir": f"{directory}/local",
    }
    for key, value in (SETTINGS | local_files.SETTINGS | places).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    local_files.use_local_files_without_processes(session)
    yield session
    _end(session)


def _end(session: SparkSession) -> None:
    """Stop the JVM too: at the interpreter's own end its sockets would be reported as leaks."""
    gateway = SparkContext._gateway
    session.stop()
    assert gateway is not None
    process: subprocess.Popen[bytes] = gateway.proc  # type: ignore[assignment]
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait(timeout=60)
