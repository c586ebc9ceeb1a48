"""What can be wrong with a request."""


class DecodeError(Exception):
    """A body that can never be decoded, however often it is sent; its text says what is wrong with it."""


class TooLargeError(DecodeError):
    """A body beyond a bound; its text names it."""
