"""The channel between a forwarder and the supervisor's fd store: messages with descriptors (unix(7), SCM_RIGHTS).

A socket of sequenced packets: each message arrives whole or not at all. Once one is sent, it arrives even if its sender
is killed at that very moment, since it and its descriptors are in the kernel.
"""

import array
import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from proto.rpc_pb2 import StoreMessage
from proxy.common.errors import ProxyError

DESCRIPTORS_MAX = 250
"""In one message; the kernel takes 253 (SCM_MAX_FD)."""

MESSAGE_BYTES_MAX = 160 * 1024
"""Below the usual send buffer (net.core.wmem_default, 208 KiB), of which a packet must leave some for the kernel."""

RECORD_BYTES_MAX = 8 * 1024
"""The largest record of a relay: much of it is what its client claimed, and the supervisor holds all records."""

LEFT_BEHIND_PER_MESSAGE_MAX = 1_000
CLIENT_IP_CHARACTERS_MAX = 64
"""The longest IP address of a relay that is left behind: IPv6 with its scope."""

MessageT = TypeVar("MessageT", bound=Message)

_INT_BYTES = array.array("i").itemsize
_RIGHTS_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * _INT_BYTES)
_BUFFER = memoryview(bytearray(MESSAGE_BYTES_MAX))
"""For all messages of this process: to allocate one of this size for each costs more than the message."""
_BUFFERS = [_BUFFER]
_TOO_MANY_IN_FLIGHT_PAUSE_S = 0.005
_SO_PEEK_OFF = 42
"""socket(7); Python does not name it."""


class StoreLost(ProxyError):
    """The other end of the channel is gone."""


class MessageTooLong(ProxyError):
    """The content is more than one message may hold."""


def create_store_sockets() -> tuple[socket.socket, socket.socket]:
    """Create the two sockets of a channel: the supervisor's end and the forwarder's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setblocking(False)
    return ours, theirs


class DescriptorChannel(Generic[MessageT]):
    """One end of such a channel. One task may send and one receive at a time."""

    def __init__(self, sock: socket.socket, message_type: type[MessageT]) -> None:
        self.sock = sock
        self._message_type = message_type
        self._hang_up: select.epoll | None = None
        """Readable once the other end is closed, also where messages are still to be received."""
        self._is_queue_kept = False

    def keep_queue(self) -> None:
        """Receive all messages from the first one on, and leave them in the queue for another. Raises OSError."""
        self.sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        self._is_queue_kept = True

    def send_now(self, message: MessageT, descriptors: Sequence[int] = ()) -> None:
        """Send without waiting. Raises BlockingIOError if there is no room, MessageTooLong, StoreLost."""
        data = message.SerializeToString()
        if len(data) > MESSAGE_BYTES_MAX or len(descriptors) > DESCRIPTORS_MAX:
            raise MessageTooLong(f"{len(data)} bytes and {len(descriptors)} descriptors in one message")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self.sock.sendmsg([data], rights)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise StoreLost(error.strerror) from None

    async def send(self, message: MessageT, descriptors: Sequence[int] = ()) -> None:
        """Send, and wait for room. Raises MessageTooLong, StoreLost, OSError. If cancelled, nothing was sent."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.send_now(message, descriptors)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
            except OSError as error:
                # The kernel bounds the descriptors that one user may have on their way.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                await trio.sleep(_TOO_MANY_IN_FLIGHT_PAUSE_S)
            else:
                return

    async def receive(
        self, *, gather_s: float = 0.0, keep: Callable[[MessageT, list[int]], None] | None = None
    ) -> tuple[MessageT, list[int]] | None:
        """Receive the next message and its descriptors, which are this process's to close; None if the other end is
        gone. Raises DecodeError.

        Fewer descriptors than the message names mean that this process may open no more files. ``gather_s``: where a
        message has to be waited for, how long further ones are let come before it is received; not after the other
        end is closed, since a successor waits for the last one then. ``keep``: called with the message before it leaves
        the queue, so that a kill at any moment leaves it in one place or in both.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (socket.MSG_PEEK if keep or self._is_queue_kept else 0)
        # First, not last: between its arrival and its return a message must not be lost to anything.
        await trio.lowlevel.checkpoint()
        while True:
            try:
                size, ancillary, _flags, _address = self.sock.recvmsg_into(_BUFFERS, _RIGHTS_BYTES, flags)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.sock)
                if gather_s:
                    with trio.move_on_after(gather_s):
                        await self._wait_for_hang_up()
            except ConnectionResetError:
                continue  # reported once, before what the other end had sent: that comes now
            else:
                break
        received = self._parse(size, ancillary)
        if received is not None and keep is not None:
            keep(*received)
            self.sock.recv(1)  # takes it out, with the queue's own copies of the descriptors
        return received

    def _parse(self, size: int, ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[MessageT, list[int]] | None:
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % _INT_BYTES])
        if not size:
            close_descriptors(descriptors)
            return None
        try:
            return self._message_type.FromString(bytes(_BUFFER[:size])), list(descriptors)
        except DecodeError:
            close_descriptors(descriptors)
            raise

    async def _wait_for_hang_up(self) -> None:
        if self._hang_up is None:
            self._hang_up = select.epoll()
            self._hang_up.register(self.sock, 0)  # which is told of a hang-up alone
        await trio.lowlevel.wait_readable(self._hang_up)

    def close(self) -> None:
        """Close this end."""
        if self._hang_up is not None:
            trio.lowlevel.notify_closing(self._hang_up)
            self._hang_up.close()
            self._hang_up = None
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()


class StoreChannel(DescriptorChannel[StoreMessage]):
    """One end of the channel between a forwarder and the fd store."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, StoreMessage)


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close descriptors that were received and are not needed."""
    for descriptor in descriptors:
        os.close(descriptor)
