"""The pipeline's Spark jobs. Each reads, transforms and writes tables."""
