"""The jobs' SparkSession: what the caller has set wins, what nobody has set gets a default that works.

The same job runs as a plain command, and by spark-submit on local, standalone and Kubernetes masters. spark-submit (and
spark-defaults.conf) leave their settings in the JVM before a job's first line runs, so the defaults below are laid
under them, never over them. One thing is not for choice: the session's time zone is UTC, for dates and hours name
directories.
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
    # Samples' values are hardly ever the same: a dictionary of them costs time, and makes the files no smaller.
    "spark.hadoop.parquet.enable.dictionary#value": "false",
    # What `ingest` keeps between decoding and writing lives for seconds: compressing it costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # 64-bit timestamps, not the deprecated INT96: DuckDB, Polars and pyarrow read the same files.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    # Without these Spark asks the name service for this host's name, and listens for the network to reach.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
}


def spark_session(app_name: str) -> SparkSession:
    """The running session if there is one, else a new one; master `local[*]` where nobody named another."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession() or (SparkSession.builder.config(conf=_settings(app_name)).getOrCreate())
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


def _settings(app_name: str) -> SparkConf:
    """What the JVM was started with, and the defaults below it."""
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("SPARK_DRIVER_MEMORY", LOCAL_DRIVER_MEMORY)  # weaker than any other way of saying it
    # Starts (or, below spark-submit, finds) the JVM, which alone knows spark-defaults.conf and spark-submit's options.
    SparkContext._ensure_initialized(gateway=launch_quietly())  # noqa: SLF001 -- what SparkSession.builder calls; there is no public name
    conf = SparkConf().setIfMissing("spark.app.name", app_name).setIfMissing("spark.master", "local[*]")
    defaults = DEFAULTS
    if conf.get("spark.master", "").startswith("local"):
        # Executors on other machines have a Python at another path; local ones must be this one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        defaults = DEFAULTS | LOCAL_DEFAULTS
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    # PySpark's launcher turns the bars on, unasked; the jobs tell of their progress in lines.
    return conf.set("spark.ui.showConsoleProgress", "false")
