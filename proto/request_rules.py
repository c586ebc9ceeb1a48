"""Rules that decide which requests of lookup mode a broker can read; the others are refused.

Pulsar's parser (LightProto) throws where a required field is missing, where an unknown field is a group, and where any
message beside the request's own is incomplete; and some of a broker's handlers throw before they answer. Whatever is
thrown there closes the connection (4.0.8; each was tried), which other clients share. So a request is refused here
instead, with an answer to its client alone. What passes is written again by protobuf, so each field occurs once and in
one form: where parsers differ (fields that come twice, lengths that lie, numbers that are longer than need be) there is
nothing to differ on.
"""

import re
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from proto.errors import ProtoError
from proto.lookup_kinds import LookupKind, client_request_id
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.varints import varint

NEWER_FIELDS_MAX = 64
"""Fields that are newer than this proxy, of one request: each is looked at."""

PROPERTIES_MAX = 1024
"""Of one LOOKUP."""

COMMAND_FIELDS_MAX = 127
"""Numbers from 2 to this in BaseCommand are commands' (81 is the last in 5.0.0-M1), and of those there is but one."""

SCHEMA_VERSION_BYTES_MIN = 8
"""Of fewer a broker makes no number; none at all is answered."""

_NAMESPACE = re.compile(r"[-=:.\w]+(/[-=:.\w]+){1,2}/*", re.ASCII)
"""NamespaceName's rule: tenant/namespace, or tenant/cluster/namespace as they once were."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPE_BITS = 3
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES_MAX = 10
_MORE = 0x80


class RequestRefused(ProtoError):
    """A request that is not sent to any broker. ``code`` is Pulsar's, the text is for the client.

    The answer goes under the request's own id.
    """

    def __init__(self, kind: LookupKind, request_id: int, reason: str, code: int, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.request_id = request_id
        self.reason = reason
        """A short stable name, for metrics."""
        self.code = code


def check_request(command: BaseCommand, kind: LookupKind) -> None:
    """Check that every broker can read a request, which has an id (see kind_of). Raises RequestRefused."""
    failed = _failed_rule(command, kind)
    if failed is not None:
        reason, code, message = failed
        raise RequestRefused(kind, client_request_id(command, kind), reason, code, message)


_Failed = tuple[str, int, str]


def _failed_rule(command: BaseCommand, kind: LookupKind) -> _Failed | None:
    body = getattr(command, kind.request_field)
    if not body.HasField(kind.subject_field):
        return "incomplete", ServerError.InvalidTopicName, f"The request has no {kind.subject_field}"
    properties = body.properties if kind.request_field == "lookup_topic" else ()
    if properties:
        if len(properties) > PROPERTIES_MAX:
            return "too_large", ServerError.NotAllowedError, f"The request has more than {PROPERTIES_MAX} properties"
        if not body.IsInitialized():
            return "incomplete", ServerError.NotAllowedError, "A property of the request lacks its key or its value"
    if len(command.ListFields()) != len(("type", kind.request_field)):
        return "second_message", ServerError.NotAllowedError, "A command has one message, and this one has another"
    return _failed_handlers_rule(body, kind) or _failed_newer_fields(command, body, properties)


def _failed_handlers_rule(body: Any, kind: LookupKind) -> _Failed | None:
    """Return the rule that a broker's handler would throw upon, though its parser reads the request."""
    if kind.request_field == "get_topics_of_namespace" and _NAMESPACE.fullmatch(body.namespace) is None:
        return "namespace", ServerError.InvalidTopicName, "The request's namespace is no tenant/namespace"
    if kind.request_field == "get_schema" and 0 < len(body.schema_version) < SCHEMA_VERSION_BYTES_MIN:
        return "schema_version", ServerError.IncompatibleSchema, "The request's schema version is none"
    return None


def _failed_newer_fields(command: BaseCommand, body: Any, properties: Sequence[Message]) -> _Failed | None:
    """Return the rule that an unknown field breaks, in whatever message of the request.

    A broker that does not know these fields either must be able to skip them.
    """
    left = NEWER_FIELDS_MAX
    for message in (command, body, *properties):
        count = len(UnknownFieldSet(message))
        if not count:
            continue
        left -= count
        if left < 0:
            return "too_large", ServerError.NotAllowedError, "The request has too many unknown fields"
        numbers = _skippable_field_numbers(_newer_fields(message))
        if numbers is None:
            return "unknown_field", ServerError.NotAllowedError, "An unknown field of the request cannot be skipped"
        if message is command and any(number <= COMMAND_FIELDS_MAX for number in numbers):
            return "second_message", ServerError.NotAllowedError, "A command has one message, and this one has another"
    return None


def _newer_fields(message: Message) -> bytes:
    """Return a message's unknown fields, as they were written."""
    rest = type(message)()
    rest.CopyFrom(message)
    for field, _ in message.ListFields():
        rest.ClearField(field.name)
    return rest.SerializePartialToString()


def _skippable_field_numbers(data: bytes) -> set[int] | None:
    """Return the numbers of the fields in a list; None where parsers may not all skip them in the same way."""
    numbers: set[int] = set()
    at = 0
    while at < len(data):
        tag, at = _varint_at(data, at)
        number, wire_type = tag >> _WIRE_TYPE_BITS, tag & (1 << _WIRE_TYPE_BITS) - 1
        if wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        elif wire_type in {_VARINT, _BYTES}:
            value, at = _varint_at(data, at)
            if wire_type == _BYTES:
                at += max(0, value)
        else:
            return None  # a group, or nothing
        if number < 1 or at > len(data):
            return None
        numbers.add(number)
    return numbers


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint in its shortest form, and the offset of its end; an end beyond the data where there is none."""
    value = 0
    for index, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & (_MORE - 1)) << 7 * index
        if byte < _MORE:
            end = at + index + 1
            return (value, end) if varint(value) == data[at:end] else (value, len(data) + 1)
    return 0, len(data) + 1
