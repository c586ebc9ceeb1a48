"""The size of text where a bound counts bytes."""


def utf8_bytes(text: str) -> int:
    """Return the number of bytes that a text takes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
