"""Base of the messages of which a packet of a SOCK_SEQPACKET socket pair holds one, as JSON."""

from typing import Self

import msgspec


class PacketMessage(msgspec.Struct, frozen=True):
    """A message between the supervisor and a process of its own."""

    def encode(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode what ``encode`` returned. Raises msgspec.MsgspecError."""
        return msgspec.json.decode(data, type=cls)
