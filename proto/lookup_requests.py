"""Requests of lookup mode as a broker gets them: what is asked, without the client's identity and request id.

Most requests differ in topic and id only. These are cut by hand, for a fraction of what it costs to parse, change and
write a message. The following rules make that as safe as parsing, whatever order and form a client gives its fields:

* Only ``type``, one message, and in it ``topic``, ``request_id`` and a trailer, in this order and without a byte in
  between, are cut by hand. Everything else is parsed.
* A trailer is taken unparsed only if it came before in a request that was parsed and checked (proto.request_rules),
  and protobuf wrote topic and trailer as the same bytes after the client's identity fields were removed. A list of
  fields means the same in any message of its type, so that trailer holds no topic, no id, no identity and nothing that
  a broker cannot read, whatever request it comes in. No rule is about the topic: brokers answer any text there.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from proto.commands import parse_command
from proto.frames import encode_frame
from proto.lookup_kinds import KINDS, LookupKind, client_request_id, kind_of, strip_identity, subject_of
from proto.pulsar_pb2 import BaseCommand
from proto.request_rules import check_request
from proto.varints import read_varint, tag, varint

PROXY_ID_BYTES = 5
PROXY_ID_MIN = 1 << 28
PROXY_ID_MAX = (1 << 35) - 1
"""The proxy's own request ids are those whose varint has five bytes, so one can replace another in place."""

TRAILERS_MAX = 1024
"""Known trailers of one kind of request; each has less than 128 bytes."""

_VARINT, _BYTES = 0, 2
_ONE_BYTE_MAX = 0x7F
_TOPIC_TAG, _ID_TAG = tag(1, _BYTES)[0], tag(2, _VARINT)[0]
_ID_BYTES_MAX = 9
"""A tenth byte may hold bits beyond 64."""


class LookupRequest(NamedTuple):
    """What a client asks, without its identity and its request id; equal to any other request that asks the same."""

    kind: LookupKind
    prefix: bytes
    """All of BaseCommand but the request's message, and the tag of that message."""
    body: bytes
    """The request's message without its id."""

    def frame_with_id(self, proxy_id: bytes) -> bytes:
        """Return the frame that asks this under one of the proxy's own ids, a varint of PROXY_ID_BYTES.

        The id stands last in the message: the order of fields has no meaning in protobuf.
        """
        kind, prefix, body = self
        heads = _HEADS.get(prefix)
        size = len(body)
        head = heads[size] if heads is not None and size < _HEADS_KEPT else _head(prefix, size)
        return head + body + _ID_TAGS[kind] + proxy_id

    @property
    def subject(self) -> str:
        """The topic or namespace, the client's text.

        Mostly it is the body's first field: the id, which may have a lower number, is left out.
        """
        if self.body[0] != _SUBJECT_TAGS[self.kind]:
            return subject_of(self.to_command(), self.kind)
        size, at = read_varint(self.body, 1, len(self.body))
        return self.body[at : at + size].decode(errors="replace")

    def to_command(self) -> BaseCommand:
        """Return the request as a message, with request id 0."""
        return parse_command(self.frame_with_id(_ZERO)[_SIZES_BYTES:])


_SIZES_BYTES = len(encode_frame(b""))
_ZERO = b"\x80\x80\x80\x80\x00"


def _field_number(kind: LookupKind) -> int:
    return BaseCommand.DESCRIPTOR.fields_by_name[kind.request_field].number


def _id_tag(kind: LookupKind) -> bytes:
    message = getattr(BaseCommand(), kind.request_field)
    return tag(message.DESCRIPTOR.fields_by_name["request_id"].number, _VARINT)


_ID_TAGS = {kind: _id_tag(kind) for kind in KINDS.values()}
_SUBJECT_TAGS = {
    kind: tag(getattr(BaseCommand(), kind.request_field).DESCRIPTOR.fields_by_name[kind.subject_field].number, _BYTES)[
        0
    ]
    for kind in KINDS.values()
}
_TAGS = {kind: tag(_field_number(kind), _BYTES) for kind in KINDS.values()}


def _head(prefix: bytes, body_bytes: int) -> bytes:
    """Return a frame up to the request's message, sized for a message of ``body_bytes`` and an id."""
    size = body_bytes + 1 + PROXY_ID_BYTES
    before = prefix + varint(size)
    return encode_frame(before + bytes(size))[: _SIZES_BYTES + len(before)]


_FAST_PREFIXES = {
    tag(1, _VARINT) + varint(command_type) + _TAGS[KINDS[command_type]]: KINDS[command_type]
    for command_type in (BaseCommand.LOOKUP, BaseCommand.PARTITIONED_METADATA)
}
"""The first bytes of commands that may be cut by hand, and their kinds."""
_PREFIX_BYTES = 4

_HEADS_KEPT = 256
_HEADS = {prefix: [_head(prefix, size) for size in range(_HEADS_KEPT)] for prefix in _FAST_PREFIXES}

_new_request: Callable[[tuple[LookupKind, bytes, bytes]], LookupRequest] = partial(tuple.__new__, LookupRequest)
"""Takes half of the time of a NamedTuple's own constructor."""


class RequestParser:
    """Parser of clients' requests, with a bounded memory of the trailers that are safe to take without parsing."""

    __slots__ = ("_fast_paths",)

    def __init__(self) -> None:
        self._fast_paths: dict[bytes, tuple[LookupKind, bytes, set[bytes]]] = {
            prefix: (kind, prefix, set()) for prefix, kind in _FAST_PREFIXES.items()
        }
        """By the command's first bytes: its kind, these bytes, and the trailers known to be safe after them."""

    def parse_request(self, data: bytes) -> tuple[LookupRequest, bytes]:
        """Return what a client's serialized BaseCommand asks, and its request id as a varint.

        Raises CommandCorrupt; RequestRefused where no broker must see the request; KeyError where the command is no
        request of lookup mode.
        """
        entry = self._fast_paths.get(data[:_PREFIX_BYTES])
        cut = None if entry is None else _cut(data)
        if entry is None or cut is None:
            return _parse(data)
        kind, prefix, trailers = entry
        topic, request_id, trailer = cut
        if trailer in trailers:
            return _new_request((kind, prefix, topic + trailer)), request_id
        parsed = _parse(data)
        if parsed == (LookupRequest(kind, prefix, topic + trailer), request_id):
            if len(trailers) >= TRAILERS_MAX:
                trailers.clear()
            trailers.add(trailer)
        return parsed


def _cut(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Cut a request into its topic (the whole field), its id (a varint) and its trailer.

    Returns None where the fields stand in another order or form. The caller has checked the prefix.
    """
    try:
        size, topic_bytes = data[_PREFIX_BYTES], data[_PREFIX_BYTES + 2]
        id_tag = _PREFIX_BYTES + 3 + topic_bytes
        if (
            size != len(data) - _PREFIX_BYTES - 1
            or size > _ONE_BYTE_MAX  # the topic's size is less
            or data[_PREFIX_BYTES + 1] != _TOPIC_TAG
            or data[id_tag] != _ID_TAG
        ):
            return None
        id_end = id_tag + 2
        while data[id_end - 1] > _ONE_BYTE_MAX:
            id_end += 1
    except IndexError:
        return None
    topic, request_id = data[_PREFIX_BYTES + 1 : id_tag], data[id_tag + 1 : id_end]
    if not topic.isascii() or len(request_id) > _ID_BYTES_MAX:
        return None
    return topic, request_id, data[id_end:]


def _parse(data: bytes) -> tuple[LookupRequest, bytes]:
    """Parse a request with protobuf; raises as RequestParser.parse_request does."""
    command = parse_command(data)
    kind = kind_of(command)
    check_request(command, kind)
    return request_from_command(command, kind)


def request_from_command(command: BaseCommand, kind: LookupKind) -> tuple[LookupRequest, bytes]:
    """Return what a parsed command asks, and its request id as a varint; the command must not be used afterwards."""
    request_id = varint(client_request_id(command, kind))
    strip_identity(command, kind)
    body = getattr(command, kind.request_field).SerializePartialToString()
    command.ClearField(kind.request_field)
    return LookupRequest(kind, command.SerializePartialToString() + _TAGS[kind], body), request_id


# ---- the proxy's own ids

_LOWEST = tuple(bytes([0x80 | bits]) for bits in range(128))


def proxy_request_ids() -> Iterator[bytes]:
    """Yield the ids from PROXY_ID_MIN to PROXY_ID_MAX as varints, in order, and start again at the end."""
    more = range(0x80, 0x100)
    while True:
        for bits in product(range(1, 128), more, more, more):
            upper = bytes(reversed(bits))
            for lowest in _LOWEST:
                yield lowest + upper


def encode_proxy_id(request_id: int) -> bytes | None:
    """Return an id as proxy_request_ids yields it; None where it is none of the proxy's own ids."""
    return varint(request_id) if PROXY_ID_MIN <= request_id <= PROXY_ID_MAX else None
