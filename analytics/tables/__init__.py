"""The pipeline's Delta tables: schemas, versions, and changes that commit at the version they were computed from."""
