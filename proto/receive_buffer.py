"""Bytes as they come from a stream, for decoders that cut frames out of them."""


class ReceiveBuffer:
    """What has come and was not taken: ``_buffer`` from ``_at`` on.

    A portion that comes when nothing waits is kept as it is; only a frame that comes in pieces is put together.
    """

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self._at = 0

    def receive_data(self, data: bytes | bytearray) -> None:
        """Add bytes as they came."""
        if self._at == len(self._buffer):
            self._buffer, self._at = bytes(data), 0
            return
        if isinstance(self._buffer, bytearray):
            del self._buffer[: self._at]
        else:  # grows in place from now on, however many pieces its frame comes in
            self._buffer = bytearray(self._buffer[self._at :])
        self._at = 0
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        """Whether no part of a frame waits for the rest."""
        return self._at == len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        """How much has come and was not taken."""
        return len(self._buffer) - self._at

    def take_unread_data(self) -> bytes:
        """Hand over what was received but not decoded, and forget it."""
        rest = bytes(self._buffer[self._at :])
        self._buffer, self._at = b"", 0
        return rest
