"""Measurements: `make bench`. Never part of the tests."""
