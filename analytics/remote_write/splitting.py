"""Requests split into encoded series."""

import google.protobuf.message

from analytics.remote_write.bounds import CEILING, Bounds
from analytics.remote_write.errors import DecodeError
from analytics.remote_write.protobuf_fields import count_fields
from analytics.remote_write.remote_pb2 import SplitRequest, SplitRequestV2

COUNT_BYTES_MIN = 2 * 1024 * 1024
"""Bodies up to this size are parsed without counting fields first: at two bytes a field the parser allocates some ten
times as much.
"""

Split = SplitRequest | SplitRequestV2

_COUNTED = {1: {0x0A: "series"}, 2: {0x2A: "series", 0x22: "symbols"}}
"""Version → tag → the name of the bound on its fields."""


def split_request(raw: bytes, version: int, bounds: Bounds) -> Split:
    """Split a body into its series. Raises DecodeError, and BoundError beyond the bounds of series and symbols.

    The parser allocates some 30 bytes for an empty series or symbol of two, so those of a large body are counted first.
    """
    if len(raw) > COUNT_BYTES_MIN:
        count_fields(raw, bounds, _COUNTED[version])
    message: type[Split] = SplitRequest if version == 1 else SplitRequestV2
    try:
        split = message.FromString(raw)
    except google.protobuf.message.DecodeError:
        raise DecodeError(f"the body is no remote-write {version}.0 request") from None
    bounds.check("series", len(split.timeseries))
    others = split.symbols if isinstance(split, SplitRequestV2) else split.metadata
    bounds.check("symbols" if version > 1 else "fields", len(others))
    if raw and not split.timeseries and not others:
        raise DecodeError(f"the body holds nothing of a remote-write {version}.0 request; is the Content-Type right?")
    return split


def remove_series(raw: bytes, version: int, places: set[int], bounds: Bounds = CEILING) -> bytes:
    """Return the request without the series at these positions."""
    split = split_request(raw, version, bounds)
    kept = [part for place, part in enumerate(split.timeseries) if place not in places]
    del split.timeseries[:]
    split.timeseries.extend(kept)
    return split.SerializeToString()
