"""A client's request of lookup mode, on its way to a broker: what it asks, apart from who asks and under which id.

Most requests look alike but for topic and id. Those are cut by hand, for a fraction of what it costs to parse, change
and write a message; in what order and how protobuf's parsers take fields is as safe as the following rules make it:

* Only ``type``, one message, and in it ``topic``, ``request_id`` and a rest, in this order and each of it to the last
  byte, are cut by hand. Everything else is parsed.
* A rest is taken as it is only where it once came in a request that was parsed and checked (proto.request_rules), and
  protobuf wrote topic and rest just the same after the client's word on its identity was taken out. A field list says
  the same wherever it stands, so that rest has no topic, no id, no identity and nothing in it that a broker cannot
  read, whatever request it comes in. No rule is about the topic itself: brokers answer whatever text stands there.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from proto.commands import parse_command
from proto.frames import encode_frame
from proto.lookup_kinds import KINDS, LookupKind, client_request_id, forget_asker, kind_of
from proto.pulsar_pb2 import BaseCommand
from proto.request_rules import check_request
from proto.varints import tag, varint

NUMBER_BYTES = 5
NUMBER_MIN = 1 << 28
NUMBER_MAX = (1 << 35) - 1
"""The request ids that the proxy uses itself: those whose varint has five bytes, so that each fits in any's place."""

RESTS_MAX = 1024
"""Of what clients write no more is kept than this; each is of less than 128 bytes."""

_VARINT, _BYTES = 0, 2
_ONE_BYTE_MAX = 0x7F
_TOPIC_TAG, _ID_TAG = tag(1, _BYTES)[0], tag(2, _VARINT)[0]
_ID_BYTES_MAX = 9
"""A tenth byte may hold bits that are none of a number's."""


class Request(NamedTuple):
    """What is asked; equal to another one that asks the same."""

    kind: LookupKind
    prefix: bytes
    """All of BaseCommand but the request's message, and the tag before it."""
    body: bytes
    """The request's message without its id."""

    def numbered(self, number: bytes) -> bytes:
        """The frame that asks it under an id, a varint of NUMBER_BYTES; the order of fields says nothing."""
        kind, prefix, body = self
        heads = _HEADS.get(prefix)
        size = len(body)
        head = heads[size] if heads is not None and size < _HEADS_KEPT else _head(prefix, size)
        return head + body + _ID_TAGS[kind] + number

    def command(self) -> BaseCommand:
        """The request as a message, under id 0."""
        return parse_command(self.numbered(_ZERO)[_SIZES_BYTES:])


_SIZES_BYTES = len(encode_frame(b""))
_ZERO = b"\x80\x80\x80\x80\x00"


def _field_number(kind: LookupKind) -> int:
    return BaseCommand.DESCRIPTOR.fields_by_name[kind.request_field].number


def _id_tag(kind: LookupKind) -> bytes:
    message = getattr(BaseCommand(), kind.request_field)
    return tag(message.DESCRIPTOR.fields_by_name["request_id"].number, _VARINT)


_ID_TAGS = {kind: _id_tag(kind) for kind in KINDS.values()}
_TAGS = {kind: tag(_field_number(kind), _BYTES) for kind in KINDS.values()}


def _head(prefix: bytes, body_bytes: int) -> bytes:
    """A frame up to the request's message, to which an id is added."""
    size = body_bytes + 1 + NUMBER_BYTES
    before = prefix + varint(size)
    return encode_frame(before + bytes(size))[: _SIZES_BYTES + len(before)]


_CUT_BY_HAND: dict[bytes, tuple[LookupKind, bytes, set[bytes]]] = {
    prefix: (KINDS[command_type], prefix, set())
    for command_type in (BaseCommand.LOOKUP, BaseCommand.PARTITIONED_METADATA)
    for prefix in [tag(1, _VARINT) + varint(command_type) + _TAGS[KINDS[command_type]]]
}
"""By how the command begins: its kind, that beginning, and the rests that may follow topic and id."""
_PREFIX_BYTES = 4

_HEADS_KEPT = 256
_HEADS = {prefix: [_head(prefix, size) for size in range(_HEADS_KEPT)] for prefix in _CUT_BY_HAND}

_new_request: Callable[[tuple[LookupKind, bytes, bytes]], Request] = partial(tuple.__new__, Request)
"""Half of the time of a NamedTuple's own way."""


def parse_request(data: bytes) -> tuple[Request, bytes]:
    """What a client's BaseCommand asks, and its request id, a varint. Raises CommandCorrupt, RequestRefused where no
    broker must see it, KeyError if it asks for nothing of lookup mode.
    """
    entry = _CUT_BY_HAND.get(data[:_PREFIX_BYTES])
    cut = None if entry is None else _cut(data)
    if entry is None or cut is None:
        return _parse(data)
    kind, prefix, rests = entry
    topic, request_id, rest = cut
    if rest in rests:
        return _new_request((kind, prefix, topic + rest)), request_id
    parsed = _parse(data)
    if parsed == (Request(kind, prefix, topic + rest), request_id):
        if len(rests) >= RESTS_MAX:
            rests.clear()
        rests.add(rest)
    return parsed


def _cut(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The parts of a request that is written as most are: its topic (the whole field), its id (a varint) and its rest;
    None where it is written otherwise. What it begins with was looked at.
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


def _parse(data: bytes) -> tuple[Request, bytes]:
    """See parse_request."""
    command = parse_command(data)
    kind = kind_of(command)
    check_request(command, kind)
    return request_of(command, kind)


def request_of(command: BaseCommand, kind: LookupKind) -> tuple[Request, bytes]:
    """A request that is parsed already, and its id; the command is used up."""
    request_id = varint(client_request_id(command, kind))
    forget_asker(command, kind)
    body = getattr(command, kind.request_field).SerializePartialToString()
    command.ClearField(kind.request_field)
    return Request(kind, command.SerializePartialToString() + _TAGS[kind], body), request_id


# ---- the proxy's own ids

_LOWEST = tuple(bytes([0x80 | bits]) for bits in range(128))


def request_numbers() -> Iterator[bytes]:
    """The ids from NUMBER_MIN to NUMBER_MAX, in order, again and again."""
    more = range(0x80, 0x100)
    while True:
        for bits in product(range(1, 128), more, more, more):
            upper = bytes(reversed(bits))
            for lowest in _LOWEST:
                yield lowest + upper


def number_of(request_id: int) -> bytes | None:
    """An id as request_numbers gives it; None if that never does."""
    return varint(request_id) if NUMBER_MIN <= request_id <= NUMBER_MAX else None
