"""The Spark data source `prometheus`: samples from a spool of the receiver or from a Prometheus server."""
