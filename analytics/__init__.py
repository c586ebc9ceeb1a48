"""From Prometheus to Spark rollups: a remote-write receiver, Spark data sources, jobs. Imports nothing of the proxy."""
