"""Reasons of the supervisor's readiness by which the admin worker decides, too."""

LEAVING_REASON = "leaving"
"""The cluster ends, and still accepts clients (`shutdown.delay_ms`)."""
