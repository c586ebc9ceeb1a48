"""The jobs' SparkSession: the caller's settings win, unset ones get working defaults.

The same job runs as a plain command, and by spark-submit on local, standalone and Kubernetes masters. spark-submit (and
spark-defaults.conf) store their settings in the JVM before a job's first line runs, so the defaults below apply only to
unset keys. One setting is fixed: the session's time zone is UTC, since dates and hours name directories.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from analytics.jobs.quiet import launch_quietly

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

LOCAL_DRIVER_MEMORY = "2g"

DEFAULTS = {
    "spark.sql.parquet.compression.codec": "zstd",
    # Samples' values rarely repeat: a dictionary of them costs time, and makes the files no smaller.
    "spark.hadoop.parquet.enable.dictionary#value": "false",
    # Spark lists many files by a job with a task for each of them, which costs more than what it finds.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "32",
    # `ingest` caches rows between decoding and writing for seconds: compressing them costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Else PySpark asks the JVM several times for each column what to do with the caller's line in the source.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    # Without these Spark resolves this host's name, and listens on an address that the network reaches.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
}


def spark_session(app_name: str) -> SparkSession:
    """Return the running session, else a new one, with master `local[*]` if none is set."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession() or (SparkSession.builder.config(conf=_settings(app_name)).getOrCreate())
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


def _settings(app_name: str) -> SparkConf:
    """Return the JVM's settings, with the defaults for unset keys."""
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("SPARK_DRIVER_MEMORY", LOCAL_DRIVER_MEMORY)  # weaker than every other way to set it
    # Starts (or, under spark-submit, finds) the JVM, where spark-defaults.conf and spark-submit's options are loaded.
    SparkContext._ensure_initialized(gateway=launch_quietly())  # noqa: SLF001 -- what SparkSession.builder calls; there is no public name
    conf = SparkConf().setIfMissing("spark.app.name", app_name).setIfMissing("spark.master", "local[*]")
    defaults = DEFAULTS
    if conf.get("spark.master", "").startswith("local"):
        # Executors on other machines have a Python at another path; local ones must be this one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        defaults = DEFAULTS | LOCAL_DEFAULTS
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    # PySpark's launcher turns the progress bars on; the jobs print progress in lines.
    return conf.set("spark.ui.showConsoleProgress", "false")
