"""The tables of the pipeline: their schemas, where they lie, how they are written exactly once and read."""
