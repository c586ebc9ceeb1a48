"""Spark data sources: `prometheus_spool`, what the receiver stored, and `prometheus_http`, what a Prometheus stores."""
