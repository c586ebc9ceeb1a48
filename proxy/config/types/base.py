"""Base of all configuration tables, and the value types that several of them share."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
PortPair = Annotated[tuple[Port, ...], Meta(min_length=2, max_length=2)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Meta(ge=1, le=256)]
NonEmpty = Annotated[str, Meta(min_length=1)]
TlsVersion = Literal["1.2", "1.3"]
TlsGroup = Literal[
    "X25519MLKEM768", "SecP256r1MLKEM768", "SecP384r1MLKEM1024", "X25519", "X448", "P-256", "P-384", "P-521"
]
TlsGroups = Annotated[tuple[TlsGroup, ...], Meta(max_length=8)]
TlsCiphers = Annotated[str, Meta(max_length=4096)]
ProxyProtocol = Literal["off", "optional", "required"]
CongestionControl = Annotated[str, Meta(min_length=1, max_length=15, pattern="^[a-z][a-z0-9_-]*$")]

MIB = 1024 * 1024
PULSAR_FRAME_BYTES_MAX = 5 * MIB + 10 * 1024
"""Pulsar's largest frame: its default maxMessageSize and 10 KiB."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: frozen, keyword-only, and an unknown field is an error."""
