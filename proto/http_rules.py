"""What an HTTP request is to the proxy."""

from dataclasses import dataclass

from proto.errors import ProtoError

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order received."""


class RequestRefused(ProtoError):
    """A request that the proxy refuses. ``reason``: a short stable name; the text is for the client."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request."""

    method: bytes
    target: bytes
    path: str
    headers: Headers
    http_version: bytes
    has_body: bool
    content_length: int | None
    expects_continue: bool
    upgrade: bytes


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where an upstream redirects a request to."""

    scheme: str
    host: str
    port: int
    target: bytes
    keeps_method: bool


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the only value of a header. Raises RequestRefused where there are two different ones."""
    values = {value for key, value in headers if key == name}
    if len(values) > 1:
        raise RequestRefused(400, f"two different headers {name.decode()}")
    return next(iter(values), None)
