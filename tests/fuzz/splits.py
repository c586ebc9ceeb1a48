"""Ways in which a stream may arrive."""

from collections.abc import Iterator

CUTS_MAX = 64


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Yield the data byte by byte, then in two pieces, cut at every place; of long data at CUTS_MAX places."""
    yield [data[at : at + 1] for at in range(len(data))]
    for cut in range(1, len(data), max(1, len(data) // CUTS_MAX)):
        yield [data[:cut], data[cut:]]
