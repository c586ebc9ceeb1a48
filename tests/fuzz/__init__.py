"""Fuzzing of the parsers of strangers' bytes: `make fuzz`, and without Atheris a short run in the tests.

Each parser has a module with SEEDS and `check(data)`, which parses whatever bytes it gets. It lets no exception out but
a defect's: an AssertionError of what must hold for any bytes, or what the parser should not have raised.
"""
