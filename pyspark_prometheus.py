"""Registers the data source `prometheus`: Spark 4 looks for `DefaultSource` in modules named `pyspark_…`.

Where the packages of the extra `analytics` are missing there is none: an error here would end every query of any Python
data source.
"""

import contextlib

with contextlib.suppress(ImportError):
    from analytics.sources.prometheus import Prometheus as DefaultSource  # noqa: F401
