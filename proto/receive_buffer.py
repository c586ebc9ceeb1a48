"""Buffer between a byte stream and a decoder that cuts frames out of it."""


class ReceiveBuffer:
    """Received bytes that are not decoded yet: ``_buffer`` from ``_at`` on.

    A portion that arrives while the buffer is empty is kept without a copy; only a frame in pieces is reassembled.
    """

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self._at = 0

    def receive_data(self, data: bytes | bytearray) -> None:
        """Append received bytes."""
        if self._at == len(self._buffer):
            self._buffer, self._at = bytes(data), 0
            return
        if isinstance(self._buffer, bytearray):
            del self._buffer[: self._at]
        else:  # grows in place from now on, in however many pieces the frame arrives
            self._buffer = bytearray(self._buffer[self._at :])
        self._at = 0
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        """Whether all received bytes are decoded, so that no frame is incomplete."""
        return self._at == len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        """Number of received bytes that are not decoded."""
        return len(self._buffer) - self._at

    def take_unread_data(self) -> bytes:
        """Return the bytes that are received but not decoded, and clear the buffer."""
        rest = bytes(self._buffer[self._at :])
        self._buffer, self._at = b"", 0
        return rest
