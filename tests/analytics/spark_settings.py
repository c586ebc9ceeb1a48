"""Settings of Spark for jobs of few rows, in the tests' own session and in processes of their own."""

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""Short jobs end before the JVM's better compiler has earned what it costs; without it the JVM has little room for
compiled code by default, and would compile much again and again.
"""

SHORT_JOBS = {"JDK_JAVA_OPTIONS": QUICK_START}
"""Environment of a process that starts a JVM."""

FEW_ROWS = {
    # To compile a query costs more than to run it, and so do many tasks.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    # Spark lists many files by a job with a task for each of them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}
"""Only test_docs_commands runs jobs without them."""
