"""The pipeline's Spark jobs. Each reads, transforms and writes tables, and is a command with a main of its own."""
