"""Frames of the RPC between the cluster's own processes: ``[size u32, big-endian][Frame]``."""

from google.protobuf.message import DecodeError

from proto.errors import RemoteProtocolError
from proto.rpc_pb2 import Frame

_SIZE_BYTES = 4


class RpcCorrupt(RemoteProtocolError):
    """Bytes that are no RPC frame, or one above the limit. The connection cannot go on."""


def encode_rpc(frame: Frame) -> bytes:
    """A frame as it stands on the socket."""
    body = frame.SerializeToString()
    return len(body).to_bytes(_SIZE_BYTES, "big") + body


class RpcDecoder:
    """Cut a stream into RPC frames; bounded by ``max_frame_bytes`` and what came with a frame."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes as they came from the socket."""
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        """Whether no part of a frame waits for the rest."""
        return not self._buffer

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive; raises RpcCorrupt."""
        if len(self._buffer) < _SIZE_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_SIZE_BYTES], "big")
        if size > self._max_frame_bytes:
            raise RpcCorrupt(f"an RPC frame of {size} bytes; the limit is {self._max_frame_bytes}")
        end = _SIZE_BYTES + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_SIZE_BYTES:end])
        del self._buffer[:end]
        try:
            return Frame.FromString(body)
        except DecodeError:
            raise RpcCorrupt("bytes that are not an RPC frame") from None
