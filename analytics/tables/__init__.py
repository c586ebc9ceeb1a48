"""The pipeline's tables: schemas, layout on a filesystem, exactly-once writes and snapshot reads."""
