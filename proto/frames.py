"""Pulsar's frames: ``[total size u32][command size u32][BaseCommand][payload]``, big-endian.

The total size does not count its own four bytes. The payload (magic, checksum, metadata, message) stays opaque: a
proxy never reads it. The decoder is incremental and bounded: it holds at most one frame and the bytes received with it.
"""

import struct
from typing import NamedTuple

from proto.errors import RemoteProtocolError
from proto.receive_buffer import ReceiveBuffer

_SIZE_BYTES = 4
_MIN_FRAME_BYTES = _SIZE_BYTES

_pack_sizes = struct.Struct(">II").pack
_sizes = struct.Struct(">II").unpack_from

_PROXY_PROTOCOL = ": this is the PROXY protocol, which is not taken here (see the listener's proxy_protocol)"

_OTHER_PROTOCOLS = {
    b"\x16\x03\x01": ": this is TLS, where plain Pulsar is spoken",
    b"GET": ": this is HTTP",
    b"POS": ": this is HTTP",
    b"\r\n\r": _PROXY_PROTOCOL,
    b"PRO": _PROXY_PROTOCOL,
}
"""Other protocols that a size field's first bytes reveal, as an addition to the error text."""


class FrameTooLarge(RemoteProtocolError):
    """A frame announces more bytes than the limit. No further bytes of it are buffered."""


class FrameCorrupt(RemoteProtocolError):
    """The two sizes of a frame contradict each other."""


class Frame(NamedTuple):
    """One frame: the serialized BaseCommand and the payload behind it."""

    command: bytes
    payload: bytes = b""

    def encode(self) -> bytes:
        """Encode the frame for the wire; equal to the bytes it was decoded from."""
        return encode_frame(self.command, self.payload)


def encode_frame(command: bytes, payload: bytes = b"") -> bytes:
    """Put the sizes before a serialized BaseCommand and its opaque payload."""
    size = len(command)
    return _pack_sizes(_SIZE_BYTES + size + len(payload), size) + command + payload


class FrameDecoder(ReceiveBuffer):
    """Incremental decoder of a byte stream into frames, independent of how the stream was split on the way.

    ``max_frame_bytes`` limits the total size that a frame may announce. It is checked as soon as the first four bytes
    have arrived, so a peer cannot make the decoder wait for (and hold) more than that.
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__()
        self._max_frame_bytes = max_frame_bytes

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None until more bytes arrive.

        Raises FrameTooLarge or FrameCorrupt, after which no further frame can be found in the stream.
        """
        buffer, at = self._buffer, self._at
        there = len(buffer) - at
        if there < 2 * _SIZE_BYTES:
            self._check_start(there)
            return None
        total, command_bytes = _sizes(buffer, at)
        end = at + _SIZE_BYTES + total
        command_start = at + 2 * _SIZE_BYTES
        command_end = command_start + command_bytes
        if total > self._max_frame_bytes or command_end > end or there < _SIZE_BYTES + total:
            self._check(total)
            if there < _SIZE_BYTES + total:
                return None
            raise FrameCorrupt(f"a command of {command_bytes} bytes in a frame of {total}")
        self._at = end
        return Frame(bytes(buffer[command_start:command_end]), bytes(buffer[command_end:end]))

    def _check_start(self, there: int) -> None:
        """Check the size field of a frame that is incomplete, if all of that field has arrived."""
        if there >= _SIZE_BYTES:
            self._check(int.from_bytes(self._buffer[self._at : self._at + _SIZE_BYTES], "big"))

    def _check(self, total: int) -> None:
        if total > self._max_frame_bytes:
            text = f"a frame of {total} bytes; the limit is {self._max_frame_bytes}"
            raise FrameTooLarge(text + _OTHER_PROTOCOLS.get(bytes(self._buffer[self._at : self._at + 3]), ""))
        if total < _MIN_FRAME_BYTES:
            raise FrameCorrupt(f"a frame of {total} bytes has no room for its command size")
