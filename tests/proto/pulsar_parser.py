"""A model of how a broker reads a request of lookup mode: Pulsar 4.0.8's LightProto, and what its handlers throw upon.

It was compared with the generated classes themselves. Where it is not sure it throws: what it reads, Pulsar reads.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Throws(Exception):
    """The broker closes the connection."""


class Field(NamedTuple):
    name: str
    wire_type: int
    required: bool = False
    message: str = ""
    repeated: bool = False


IDENTITY = ("original_principal", "original_auth_data", "original_auth_method")

SCHEMAS: dict[str, dict[int, Field]] = {
    "key_value": {1: Field("key", BYTES, True), 2: Field("value", BYTES, True)},
    "lookup_topic": {
        1: Field("topic", BYTES, True),
        2: Field("request_id", VARINT, True),
        3: Field("authoritative", VARINT),
        **{number: Field(name, BYTES) for number, name in zip((4, 5, 6), IDENTITY, strict=True)},
        7: Field("advertised_listener_name", BYTES),
        8: Field("properties", BYTES, message="key_value", repeated=True),
    },
    "partition_metadata": {
        1: Field("topic", BYTES, True),
        2: Field("request_id", VARINT, True),
        **{number: Field(name, BYTES) for number, name in zip((3, 4, 5), IDENTITY, strict=True)},
        6: Field("metadata_auto_creation_enabled", VARINT),
    },
    "get_topics_of_namespace": {
        1: Field("request_id", VARINT, True),
        2: Field("namespace", BYTES, True),
        3: Field("mode", VARINT),
        4: Field("topics_pattern", BYTES),
        5: Field("topics_hash", BYTES),
    },
    "get_schema": {
        1: Field("request_id", VARINT, True),
        2: Field("topic", BYTES, True),
        3: Field("schema_version", BYTES),
    },
}
MESSAGES = {23: "lookup_topic", 21: "partition_metadata", 32: "get_topics_of_namespace", 34: "get_schema"}
COMMAND = {1: Field("type", VARINT, True), **{n: Field(name, BYTES, message=name) for n, name in MESSAGES.items()}}

NAMESPACE = re.compile(rb"[-=:._a-zA-Z0-9]+(/[-=:._a-zA-Z0-9]+){1,2}/*")

Value = object
Message = dict[str, Value]


def read(data: bytes) -> tuple[int, Message]:
    """The type of a command and its message, as a broker's handler sees them. Raises Throws."""
    reader = _Reader(data)
    command = reader.message(COMMAND, len(data), outer=True)
    kind = command["type"]
    assert isinstance(kind, int)
    message = command.get(MESSAGES.get(kind, ""))
    if not isinstance(message, dict):
        raise Throws(f"type {kind} without its message")
    namespace, version = message.get("namespace"), message.get("schema_version", b"")
    assert isinstance(version, bytes)
    if isinstance(namespace, bytes) and NAMESPACE.fullmatch(namespace) is None:
        raise Throws("NamespaceName.get")
    if 0 < len(version) < 8:
        raise Throws("SchemaStorage.versionFromBytes")
    return kind, message


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def message(self, schema: dict[int, Field], size: int, *, outer: bool = False) -> Message:
        """Fields until the size is reached, or passed: a field that is longer than its message is read all the same."""
        found: Message = {}
        end = self._at + size
        while self._at < end:
            tag = self._varint() & 0xFFFFFFFF
            number, wire_type = tag >> 3, tag & 7
            known = schema.get(number)
            if known is not None and known.wire_type == wire_type:
                self._known(known, found)
            elif outer and 1 < number <= 68 and wire_type == BYTES:
                raise Throws("another command's message, which is not modelled")
            else:
                self._skip(wire_type)
        for field in schema.values():
            if field.required and field.name not in found:
                raise Throws(f"no {field.name}")
        return found

    def _known(self, field: Field, found: Message) -> None:
        value: Value
        if field.message:
            value = self.message(SCHEMAS[field.message], self._size())  # the last one is the whole: nothing is merged
        elif field.wire_type == BYTES:
            value = self._bytes(self._size())
        else:
            value = self._varint()
        if field.repeated:
            others = found.setdefault(field.name, [])
            assert isinstance(others, list)
            others.append(value)
        else:
            found[field.name] = value

    def _skip(self, wire_type: int) -> None:
        if wire_type == VARINT:
            self._varint()
        elif wire_type == BYTES:
            self._bytes(self._size())
        elif wire_type in {FIXED32, FIXED64}:
            self._bytes(4 if wire_type == FIXED32 else 8)
        else:
            raise Throws(f"wire type {wire_type}")

    def _size(self) -> int:
        size = self._varint() & 0xFFFFFFFF
        if size >= 1 << 31:
            raise Throws("a negative size")
        return size

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise Throws("beyond the buffer")
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        value = 0
        for index in range(10):
            byte = self._bytes(1)[0]
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return value & (1 << 64) - 1
        raise Throws("a varint without an end")
