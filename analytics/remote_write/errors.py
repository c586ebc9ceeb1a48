"""What can be wrong with a request."""

from typing import Self


class DecodeError(Exception):
    """A body that can never be decoded, however often it is sent; its text says what is wrong with it."""


class TooLargeError(DecodeError):
    """A body beyond a bound of its bytes; its text names it."""


class BoundError(DecodeError):
    """More of something than a bound allows. `bound` is the name of the bound; the receiver's key is limits.max_<name>.

    what: the things that are counted, for the text
    """

    def __init__(self, bound: str, limit: int, what: str) -> None:
        super().__init__(f"more than {limit} {what} (limits.max_{bound})")
        self.bound = bound


class BoundFault(str):
    """What is wrong with one series: it is beyond a bound, which has this name."""

    __slots__ = ("bound",)
    bound: str

    def __new__(cls, error: BoundError, before: str = "") -> Self:
        """Make a fault of an error; `before` stands in front of its text."""
        fault = super().__new__(cls, f"{before}{error}")
        fault.bound = error.bound
        return fault
