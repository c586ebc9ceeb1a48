"""Brokers' answers on their way to clients: encoded once but for the request id, and recognized when they come again.

Most answers of a broker differ only in their request id, which is one of the proxy's own: a varint of five bytes
(proto.lookup_requests). So an answer that was parsed once can be recognized by all of its other bytes.
"""

from typing import NamedTuple

from proto.commands import parse_command
from proto.frames import encode_frame
from proto.lookup_kinds import error_of, response_field, response_request_id, set_response_request_id
from proto.lookup_requests import PROXY_ID_BYTES, PROXY_ID_MAX, encode_proxy_id
from proto.pulsar_pb2 import BaseCommand
from proto.varints import tag, varint

TEMPLATES_MAX = 1024
TEMPLATE_BYTES_MAX = 512

_VARINT, _BYTES = 0, 2
_MORE = 0x80
"""A byte of a varint that another one follows has this bit."""
_HEADER_BYTES = len(encode_frame(b""))


class ClientAnswer:
    """An answer encoded for clients, each of which has its own request id. The command must not be used afterwards."""

    __slots__ = ("_before", "_heads", "_message", "error")

    def __init__(self, command: BaseCommand) -> None:
        self.error = error_of(command)
        """Pulsar's ServerError; None: success."""
        field = response_field(command)
        if field is None:
            raise ValueError(f"command type {command.type} answers no request")
        message = getattr(command, field)
        id_tag = tag(message.DESCRIPTOR.fields_by_name["request_id"].number, _VARINT)
        message.ClearField("request_id")
        self._message: bytes = message.SerializePartialToString() + id_tag
        command.ClearField(field)
        # The order of fields says nothing, so the message can stand last, and the id last in it.
        message_tag = tag(BaseCommand.DESCRIPTOR.fields_by_name[field].number, _BYTES)
        self._before: bytes = command.SerializePartialToString() + message_tag
        self._heads: dict[int, bytes] = {}

    def frame_for(self, request_id: bytes) -> bytes:
        """Return the frame for a client's request id (a varint)."""
        return (self._heads.get(len(request_id)) or self._head(len(request_id))) + request_id

    def _head(self, id_bytes: int) -> bytes:
        """Build the frame up to an id of this size."""
        message_bytes = len(self._message) + id_bytes
        command = self._before + varint(message_bytes) + self._message
        head = self._heads[id_bytes] = encode_frame(command + bytes(id_bytes))[:-id_bytes]
        return head


class BrokerAnswer:
    """An answer as the broker wrote it; it may match later frames, so it is never changed."""

    __slots__ = ("client_answer", "command")

    def __init__(self, command: BaseCommand) -> None:
        self.command = command
        self.client_answer: ClientAnswer | None = None
        """The answer for clients, shared by all that asked; None until one was made, and where it is no final
        success."""


class _IdPosition(NamedTuple):
    """Position of the request id in frames of one size, and the answers with it there."""

    frame_bytes: int
    begins: int
    ends: int
    answers: dict[bytes, BrokerAnswer]
    """By all bytes but the id's."""


class AnswerTemplates:
    """Answers that came before, by all of their bytes but the request id; bounded."""

    def __init__(self) -> None:
        self._positions: dict[bytes, _IdPosition] = {}
        """By a frame's two sizes."""
        self._count = 0

    def find_answer(self, data: bytes, at: int) -> tuple[BrokerAnswer, bytes, int] | None:
        """Match the frame that begins at an offset with the known answers.

        Returns the answer, its request id (a varint of PROXY_ID_BYTES) and the offset of the frame's end; None where
        the frame is unknown or incomplete, or its id is not one of the proxy's own.
        """
        place = self._positions.get(data[at : at + _HEADER_BYTES])
        if place is None:
            return None
        size, begins, ends, answers = place
        begins += at
        ends += at
        end = at + size
        answer = answers.get(data[at:begins] + data[ends:end])
        if answer is None or end > len(data):
            return None
        number = data[begins:ends]
        # Other bytes there are a shorter id and fields behind it, or none: then the frame says something else.
        one, two, three, four, last = number
        if one & two & three & four < _MORE or not 0 < last < _MORE:
            return None
        return answer, number, end

    def learn_answer(self, command: bytes, answer: BrokerAnswer) -> None:
        """Remember an answer; ``command`` is its serialized BaseCommand, without a payload."""
        begins = _id_position(command) if len(command) <= TEMPLATE_BYTES_MAX else None
        if begins is None:
            return
        if self._count >= TEMPLATES_MAX:
            self._positions.clear()
            self._count = 0
        frame = encode_frame(command)
        begins += _HEADER_BYTES
        ends = begins + PROXY_ID_BYTES
        place = self._positions.get(frame[:_HEADER_BYTES])
        if place is None or place.begins != begins:
            place = self._positions[frame[:_HEADER_BYTES]] = _IdPosition(len(frame), begins, ends, {})
        place.answers[frame[:begins] + frame[ends:]] = answer
        self._count += 1


def _id_position(command: bytes) -> int | None:
    """Return the offset of the request id in an answer that is written as protobuf would, with PROXY_ID_BYTES.

    Then another id of as many bytes may replace it, and nothing else changes. None where that does not hold.
    """
    parsed = parse_command(command)
    request_id = response_request_id(parsed)
    if request_id is None or encode_proxy_id(request_id) is None or parsed.SerializePartialToString() != command:
        return None
    set_response_request_id(parsed, request_id ^ PROXY_ID_MAX)  # different in each of its bytes
    other = parsed.SerializePartialToString()
    places = [place for place, (ours, theirs) in enumerate(zip(command, other, strict=False)) if ours != theirs]
    return places[0] if len(other) == len(command) and len(places) == PROXY_ID_BYTES else None
