"""Frames of the RPC between the cluster's own processes: a header of fixed size, then an opaque body.

``[size u32][kind u8][more u8][code u16][correlation id u64][number u32][body]``, big-endian; the size counts the
bytes behind it. A call's code is its Method, and its number the milliseconds that are left of the caller's deadline. A
reply's code is its Status, and its number the size of the detail at the start of the body. The header is no protobuf
message because each lookup needs two of them: encoding and decoding a message costs several times as much.
"""

import struct
from typing import NamedTuple

from proto.errors import RemoteProtocolError
from proto.receive_buffer import ReceiveBuffer

_HEADER = struct.Struct(">IBBHQI")
_SIZE_BYTES = 4
_REST_BYTES = _HEADER.size - _SIZE_BYTES
_NUMBER_MAX = (1 << 32) - 1

_CALL, _REPLY, _CANCEL = 1, 2, 3

_pack = _HEADER.pack
_unpack_from = _HEADER.unpack_from


class RpcCorrupt(RemoteProtocolError):
    """Bytes that are no RPC frame, or one above the limit. The connection cannot continue."""


class Call(NamedTuple):
    """A call of a Method; ``request`` is its serialized message."""

    correlation_id: int
    method: int
    timeout_ms: int
    request: bytes


class Reply(NamedTuple):
    """A reply, or a part of one where ``has_more`` is set. ``detail`` is for logs, never for a Pulsar client."""

    correlation_id: int
    status: int = 0
    response: bytes = b""
    has_more: bool = False
    detail: str = ""


class Cancel(NamedTuple):
    """Notice that the caller of a call no longer waits for the reply."""

    correlation_id: int


Frame = Call | Reply | Cancel


def encode_call(call: Call) -> bytes:
    """Encode a call for the socket."""
    correlation_id, method, timeout_ms, request = call
    number = min(timeout_ms, _NUMBER_MAX)
    return _pack(_REST_BYTES + len(request), _CALL, 0, method, correlation_id, number) + request


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply for the socket."""
    correlation_id, status, response, has_more, detail = reply
    encoded_detail = detail.encode(errors="replace")
    size = _REST_BYTES + len(encoded_detail) + len(response)
    return _pack(size, _REPLY, has_more, status, correlation_id, len(encoded_detail)) + encoded_detail + response


def encode_cancel(cancel: Cancel) -> bytes:
    """Encode a cancel for the socket."""
    return _pack(_REST_BYTES, _CANCEL, 0, 0, cancel.correlation_id, 0)


class RpcDecoder(ReceiveBuffer):
    """Incremental decoder of RPC frames. It holds at most ``max_frame_bytes`` and the bytes received with a frame."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__()
        self._max_frame_bytes = max_frame_bytes

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None until more bytes arrive. Raises RpcCorrupt."""
        buffer, at = self._buffer, self._at
        there = len(buffer) - at
        if there < _HEADER.size:
            if there >= _SIZE_BYTES:
                self._check_size(int.from_bytes(buffer[at : at + _SIZE_BYTES], "big"))
            return None
        size, kind, more, code, correlation_id, number = _unpack_from(buffer, at)
        end = at + _SIZE_BYTES + size
        if len(buffer) < end or size > self._max_frame_bytes or size < _REST_BYTES:
            self._check_size(size)
            return None
        self._at = end
        start = at + _HEADER.size
        if kind == _CALL:
            return Call(correlation_id, code, number, bytes(buffer[start:end]))
        if kind == _REPLY and start + number <= end:
            detail = bytes(buffer[start : start + number]).decode(errors="replace") if number else ""
            return Reply(correlation_id, code, bytes(buffer[start + number : end]), more != 0, detail)
        if kind == _CANCEL:
            return Cancel(correlation_id)
        raise RpcCorrupt(f"an RPC frame of unknown kind or with a wrong detail: kind {kind}, {size} bytes")

    def _check_size(self, size: int) -> None:
        if size > self._max_frame_bytes:
            raise RpcCorrupt(f"an RPC frame of {size} bytes; the limit is {self._max_frame_bytes}")
        if size < _REST_BYTES:
            raise RpcCorrupt("bytes that are not an RPC frame")
