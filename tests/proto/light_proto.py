"""A model of LightProto, the parser of Pulsar's broker: which type it finds in a command.

It was compared with the parser itself (test_command_heads).
"""

from __future__ import annotations

from proto.pulsar_pb2 import BaseCommand

VALUES = frozenset(BaseCommand.Type.values()) - {0}
"""Of Pulsar's own; ours begin with one that stands for what is not said."""
VALUES_OF_BROKERS = (VALUES, frozenset(value for value in VALUES if value < BaseCommand.SCALABLE_TOPIC_LOOKUP))
"""Of Pulsar 5's brokers, and of those before it, to which a newer command is a field to skip."""


class Thrown(Exception):
    """The broker closes the connection: nothing of the command is carried out."""


class LightProto:
    """See the module; of messages within the command only where they end is known."""

    def __init__(self, data: bytes, values: frozenset[int] = VALUES) -> None:
        self.data = data
        self.values = values
        self.at = 0

    def command_type(self, size: int) -> int | None:
        """The type that the broker acts upon, of a command of so many bytes; None where it throws."""
        try:
            return self._command_type(size)
        except Thrown:
            return None

    def _command_type(self, size: int) -> int:
        end, found = self.at + size, None
        while self.at < end:
            field_tag = self._varint()
            if field_tag == 8:
                number = self._varint()
                found = number if number in self.values else found
            elif field_tag & 7 == 2 and field_tag >> 3 in self.values:
                self._message(self._varint())
            else:
                self._skip(field_tag)
        if found is None:
            raise Thrown("type is required")
        return found

    def _message(self, size: int) -> None:
        """With fields that are not known: as those of CommandPing, CommandPong and all newer ones."""
        end = self.at + size
        while self.at < end:
            self._skip(self._varint())

    def _varint(self) -> int:
        value = 0
        for place in range(10):
            if self.at >= len(self.data):
                raise Thrown("beyond the frame")
            byte = self.data[self.at]
            self.at += 1
            if place < 5:
                value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                value &= 0xFFFFFFFF
                return value - (1 << 32) if value >> 31 else value
        raise Thrown("a malformed varint")

    def _skip(self, field_tag: int) -> None:
        kind = field_tag & 7
        if kind == 0:
            self._varint()
            return
        length = {1: 8, 5: 4}.get(kind, -1) if kind != 2 else self._varint()
        if length < 0 or self.at + length > len(self.data):
            raise Thrown("what cannot be skipped")
        self.at += length
