"""The session has the pipeline's settings, and what the caller has set wins."""

from pyspark.sql import SparkSession

from analytics.jobs.session import spark_session


def test_a_running_session_is_taken(spark: SparkSession) -> None:
    assert spark_session("job") is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_python_workers_run(spark: SparkSession) -> None:
    frame = spark.range(10).mapInArrow(lambda batches: batches, "id long")
    assert frame.count() == 10
