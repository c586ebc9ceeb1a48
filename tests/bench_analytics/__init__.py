"""Measurements of the analytics: `make bench-analytics`. Never part of the tests."""
