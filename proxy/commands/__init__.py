"""Implementation of the larger commands."""
