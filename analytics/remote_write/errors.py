"""Errors of invalid requests."""

from typing import Self

from analytics.errors import AnalyticsError


class DecodeError(AnalyticsError):
    """A body that can never be decoded, however often it is sent; the text says why."""


class TooLargeError(DecodeError):
    """A body with too many bytes; the text names the bound."""


class BoundError(DecodeError):
    """Content beyond a bound. `bound` is the bound's name; the receiver's key is limits.max_<name>.

    what: the things that are counted, for the text
    """

    def __init__(self, bound: str, limit: int, what: str) -> None:
        super().__init__(f"more than {limit} {what} (limits.max_{bound})")
        self.bound = bound


class BoundFault(str):
    """Fault of one series that exceeds the bound of this name."""

    __slots__ = ("bound",)
    bound: str

    def __new__(cls, error: BoundError, before: str = "") -> Self:
        """Make a fault of an error, with `before` in front of its text."""
        fault = super().__new__(cls, f"{before}{error}")
        fault.bound = error.bound
        return fault
