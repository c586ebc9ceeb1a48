"""The four requests of lookup mode (PIP-1) and their answers, as one family of kinds.

A lookup worker sends a client's request on to a broker under a request id of its own and gives the answer back under
the client's. Everything else in the two messages stays as it was written: listener names, properties, and fields that
are newer than this proxy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proto.commands import CommandCorrupt
from proto.pulsar_pb2 import (
    BaseCommand,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadataResponse,
    ServerError,
)

_IDENTITY_FIELDS = ("original_principal", "original_auth_data", "original_auth_method")


@dataclass(frozen=True, slots=True, eq=False)
class LookupKind:
    """Kind of request: how it and its answer are written. There is one object for each kind."""

    name: str
    """Fit for a metric's label and a log."""
    request_field: str
    response_type: BaseCommand.Type
    response_field: str
    subject_field: str
    """Where the request names its topic or namespace."""
    identity_fields: tuple[str, ...] = ()
    """What the request says about who asks."""
    may_be_large: bool = False
    """Whether an honest answer may be of any size: then there must be room for it before it is asked for."""


KINDS: Mapping[int, LookupKind] = MappingProxyType(
    {
        BaseCommand.LOOKUP: LookupKind(
            "lookup", "lookup_topic", BaseCommand.LOOKUP_RESPONSE, "lookup_topic_response", "topic", _IDENTITY_FIELDS
        ),
        BaseCommand.PARTITIONED_METADATA: LookupKind(
            "partitions_metadata",
            "partition_metadata",
            BaseCommand.PARTITIONED_METADATA_RESPONSE,
            "partition_metadata_response",
            "topic",
            _IDENTITY_FIELDS,
        ),
        BaseCommand.GET_TOPICS_OF_NAMESPACE: LookupKind(
            "get_topics_of_namespace",
            "get_topics_of_namespace",
            BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE,
            "get_topics_of_namespace_response",
            "namespace",
            may_be_large=True,
        ),
        BaseCommand.GET_SCHEMA: LookupKind(
            "get_schema",
            "get_schema",
            BaseCommand.GET_SCHEMA_RESPONSE,
            "get_schema_response",
            "topic",
            may_be_large=True,
        ),
    }
)
"""Request type → its kind. What is not here is not served in lookup mode."""

_FIELD_BY_RESPONSE_TYPE = {
    BaseCommand.ERROR: "error",
    **{kind.response_type: kind.response_field for kind in KINDS.values()},
}

_FAILED: dict[int, int] = {
    BaseCommand.LOOKUP_RESPONSE: CommandLookupTopicResponse.Failed,
    BaseCommand.PARTITIONED_METADATA_RESPONSE: CommandPartitionedTopicMetadataResponse.Failed,
}


def kind_of(command: BaseCommand) -> LookupKind:
    """Return the kind of a request of lookup mode.

    Raises CommandCorrupt where its message is missing, or the id under which it could be answered; KeyError where the
    command is no such request.
    """
    kind = KINDS[command.type]
    if not command.HasField(kind.request_field):
        raise CommandCorrupt(f"{kind.name} without its message")
    if not getattr(command, kind.request_field).HasField("request_id"):
        raise CommandCorrupt(f"{kind.name} without a request id")
    return kind


def client_request_id(command: BaseCommand, kind: LookupKind) -> int:
    """Return the request id under which the client waits for the answer."""
    return int(getattr(command, kind.request_field).request_id)


def subject_of(command: BaseCommand, kind: LookupKind) -> str:
    """Return the topic or namespace of a request; the client's text, for logs."""
    return str(getattr(getattr(command, kind.request_field), kind.subject_field))


def strip_identity(command: BaseCommand, kind: LookupKind) -> None:
    """Remove the client's identity and request id from a request.

    A client that writes an original principal would otherwise choose as which principal the broker treats it: only the
    connection's handshake, which is the proxy's, may say that.
    """
    body = getattr(command, kind.request_field)
    body.ClearField("request_id")
    for field in kind.identity_fields:
        body.ClearField(field)


def response_field(command: BaseCommand) -> str | None:
    """Return the field of a broker's answer that has the request id: that of its response, or of a CommandError.

    None where the command is no answer.
    """
    return _FIELD_BY_RESPONSE_TYPE.get(command.type)


def response_request_id(command: BaseCommand) -> int | None:
    """Return the request id of a broker's answer; None where the command is no answer."""
    field = response_field(command)
    return None if field is None else int(getattr(command, field).request_id)


def set_response_request_id(command: BaseCommand, request_id: int) -> None:
    """Write another request id into a broker's answer (see response_field for what is one)."""
    getattr(command, _FIELD_BY_RESPONSE_TYPE[command.type]).request_id = request_id


def failure_answer(kind: LookupKind, request_id: int, code: int, message: str) -> BaseCommand:
    """Build the answer of a kind that reports a failure, with Pulsar's error code and a text for the client.

    A topic list has no field for an error of its own; its failures are plain CommandErrors, as a broker sends them.
    """
    fields: dict[str, Any] = {"request_id": request_id}
    if kind.response_type == BaseCommand.GET_SCHEMA_RESPONSE:
        fields |= {"error_code": code, "error_message": message}
    elif kind.response_type in _FAILED:
        fields |= {"response": _FAILED[kind.response_type], "error": code, "message": message}
    else:
        return BaseCommand(type=BaseCommand.ERROR, error={**fields, "error": code, "message": message})
    answer: dict[str, Any] = {"type": kind.response_type, kind.response_field: fields}
    return BaseCommand(**answer)


def shorten_answer(answer: BaseCommand, kind: LookupKind) -> BaseCommand:
    """Replace an answer that is larger than an honest one of its kind by an error.

    The error keeps the answer's own code, if it has one, and the request id; the text is another.
    """
    code = error_of(answer)
    text = "The broker's answer is too large"
    return failure_answer(
        kind, response_request_id(answer) or 0, ServerError.UnknownError if code is None else code, text
    )


def error_of(command: BaseCommand) -> int | None:
    """Return the ServerError of an answer; None where it is a success."""
    if command.type == BaseCommand.ERROR:
        return int(command.error.error)
    if command.type == BaseCommand.LOOKUP_RESPONSE:
        lookup = command.lookup_topic_response
        return int(lookup.error) if lookup.response == CommandLookupTopicResponse.Failed else None
    if command.type == BaseCommand.PARTITIONED_METADATA_RESPONSE:
        metadata = command.partition_metadata_response
        failed = metadata.response == CommandPartitionedTopicMetadataResponse.Failed
        return int(metadata.error) if failed else None
    schema = command.get_schema_response
    return int(schema.error_code) if schema.HasField("error_code") else None
