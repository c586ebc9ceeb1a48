"""The jobs of the pipeline: each reads tables, transforms, writes tables, and is a command and a main of its own."""
