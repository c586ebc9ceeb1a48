"""Whether more is read from a client: frames that must wait, answers that it does not take, memory for large frames."""

from proxy.forwarder.client.lookup_mode import LookupMode
from proxy.forwarder.client.transport import ClientTransport
from proxy.runtime.fairness.byte_budget import ByteReservation

PARTIAL_FRAME_BYTES_MIN = 16 * 1024
"""The part of a frame that is here is counted above this size; a client that connects and asks sends less."""


class InboundFlow:
    """The flow of frames from one client. While it is stopped, the client's bytes stay in the kernel.

    ``is_held``: frames wait for a verdict, a broker's profile or the relay, or the connection is over. ``is_full``: as
    much is kept for the client as may be. ``is_at_end``: the client has ended its direction.
    """

    __slots__ = ("_lookup_mode", "_partial_frame", "_transport", "is_at_end", "is_full", "is_held")

    def __init__(self, transport: ClientTransport, lookup_mode: LookupMode, partial_frame: ByteReservation) -> None:
        self._transport = transport
        self._lookup_mode = lookup_mode
        self._partial_frame = partial_frame
        self.is_held = self.is_full = self.is_at_end = False

    def is_unread(self) -> bool:
        """Return True while nothing is read from the client, so that an answer to a PING may be here unseen."""
        return self.is_full or self.is_at_end or self.is_held

    def hold_frames(self) -> None:
        """Take no more frames until ``release_frames``."""
        self.is_held = True
        self._transport.pause_reading()

    def release_frames(self) -> None:
        """Let frames be taken again."""
        self.is_held = False
        self._transport.resume_reading()

    def check_room(self) -> bool:
        """Return whether more may be taken from the client, and pause or resume reading where that has changed.

        Where there is no room, the connection asks again after each answer that has left.
        """
        has_room = self._lookup_mode.has_room and not self._transport.has_many_unsent_pongs
        if has_room is self.is_full:
            self.is_full = not has_room
            if has_room:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        return has_room

    def count_partial_frame(self) -> bool:
        """Count the part of a large frame that is here; return False if there is no memory for it.

        A client that is not read does not end for what others use: what is here may be whole frames, and no more comes.
        """
        size_bytes = self._transport.partial_frame_bytes
        if size_bytes < PARTIAL_FRAME_BYTES_MIN:
            size_bytes = 0
        if size_bytes == self._partial_frame.size_bytes or self._partial_frame.resize(size_bytes):
            return True
        return self.is_full or self.is_held

    def set_owner(self, owner: str) -> None:
        """Count partial frames for this owner from now on: see proxy.runtime.fairness.owners.owner_of."""
        self._partial_frame.transfer_to(owner)

    def release_memory(self) -> None:
        """Count nothing any more: the connection is over."""
        self._partial_frame.resize(0)
