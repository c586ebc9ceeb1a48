"""Pulsar's frames: ``[total size u32][command size u32][BaseCommand][payload]``, big-endian.

The total size does not count its own four bytes. The payload (magic, checksum, metadata, message) stays opaque: a
proxy never looks into it. The decoder is incremental and bounded: it holds at most one frame and what came with it.
"""

from dataclasses import dataclass

from proto.errors import RemoteProtocolError

_SIZE_BYTES = 4
_MIN_FRAME_BYTES = _SIZE_BYTES

_OTHER_PROTOCOLS = {
    b"\x16\x03\x01": ": this is TLS, where plain Pulsar is spoken",
    b"GET": ": this is HTTP",
    b"POS": ": this is HTTP",
    b"PRO": ": this is the PROXY protocol, which is not spoken here",
}
"""What a size says that is none, by its first bytes."""


class FrameTooLarge(RemoteProtocolError):
    """A frame announces more bytes than the limit; nothing of it is buffered."""


class FrameCorrupt(RemoteProtocolError):
    """The two sizes of a frame contradict each other."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: the serialized BaseCommand, and what follows it."""

    command: bytes
    payload: bytes = b""

    def encode(self) -> bytes:
        """The frame as it stands on the wire; equal to the bytes it was decoded from."""
        return encode_frame(self.command, self.payload)


def encode_frame(command: bytes, payload: bytes = b"") -> bytes:
    """Put the sizes before a serialized BaseCommand and its opaque payload."""
    total = _SIZE_BYTES + len(command) + len(payload)
    return b"".join((total.to_bytes(4, "big"), len(command).to_bytes(4, "big"), command, payload))


class FrameDecoder:
    """Cut a byte stream into frames, however it was split on the way.

    ``max_frame_bytes`` limits the total size that a frame may announce. It is checked as soon as the first four bytes
    are there, so a peer cannot make the decoder wait for (and keep) more than that.
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes as they came from the peer."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive.

        Raises FrameTooLarge or FrameCorrupt; the stream has no further boundary to find after either.
        """
        buffer = self._buffer
        if len(buffer) < _SIZE_BYTES:
            return None
        total = int.from_bytes(buffer[:_SIZE_BYTES], "big")
        if total > self._max_frame_bytes:
            text = f"a frame of {total} bytes; the limit is {self._max_frame_bytes}"
            raise FrameTooLarge(text + _OTHER_PROTOCOLS.get(bytes(buffer[: _SIZE_BYTES - 1]), ""))
        if total < _MIN_FRAME_BYTES:
            raise FrameCorrupt(f"a frame of {total} bytes has no room for its command size")
        end = _SIZE_BYTES + total
        if len(buffer) < end:
            return None
        command_bytes = int.from_bytes(buffer[_SIZE_BYTES : 2 * _SIZE_BYTES], "big")
        command_end = 2 * _SIZE_BYTES + command_bytes
        if command_end > end:
            raise FrameCorrupt(f"a command of {command_bytes} bytes in a frame of {total}")
        frame = Frame(bytes(buffer[2 * _SIZE_BYTES : command_end]), bytes(buffer[command_end:end]))
        del buffer[:end]
        return frame

    def take_rest(self) -> bytes:
        """Hand over what was received but not decoded, and forget it: a relay's first bytes."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
