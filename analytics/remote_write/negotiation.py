"""Content negotiation: a body's message type, by the specification of 2.0 ("Content-Type", "Content-Encoding")."""

import functools
from email.message import Message

from analytics.errors import AnalyticsError

_MEDIA_TYPE = "application/x-protobuf"
_MESSAGES = {"prometheus.WriteRequest": 1, "io.prometheus.write.v2.Request": 2}
_HEADER_CHARACTERS_MAX = 256


class UnsupportedError(AnalyticsError):
    """An unsupported content type or encoding (415). The text says what is supported."""


@functools.lru_cache(maxsize=64)
def protocol_version(content_type: str, content_encoding: str) -> int:
    """Return the protocol's version, 1 or 2. Raises UnsupportedError.

    An absent header (empty here) means 1.0 and snappy, as with senders older than the specification.
    """
    if content_encoding.strip().lower() not in {"", "snappy"}:
        raise UnsupportedError("only Content-Encoding: snappy (block format) is taken")
    if not content_type.strip():
        return 1
    if len(content_type) > _HEADER_CHARACTERS_MAX:
        raise UnsupportedError("the Content-Type is too long")
    if "*" in content_type:  # of mail (RFC 2231), and Python's parser raises whatever it likes on one in bad parts
        raise UnsupportedError("the Content-Type has an extended parameter")
    message = Message()
    message["Content-Type"] = content_type
    name = message.get_param("proto", "prometheus.WriteRequest")
    version = _MESSAGES.get(name) if isinstance(name, str) else None
    if message.get_content_type() != _MEDIA_TYPE or version is None:
        offers = " or ".join(f"{_MEDIA_TYPE};proto={one}" for one in _MESSAGES)
        raise UnsupportedError(f"only Content-Type: {offers} is taken")
    return version
