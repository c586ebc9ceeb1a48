"""A worker's requests for files: the supervisor opens what the worker's role needs by the configuration.

A message each on a SOCK_SEQPACKET socket pair; the reply carries the file's descriptor (SCM_RIGHTS).
"""

import errno
import os
import socket
import threading

from proxy.runtime.process.packet import PacketMessage

REQUEST_BYTES_MAX = 8192
"""More than the longest path (PATH_MAX)."""
REPLY_BYTES_MAX = 256

TIMEOUT_S = 10.0
"""Longest wait for a file: its file system may hang."""


class FileRequest(PacketMessage, frozen=True):
    """Request for a file. ``number``: the reply's, since one that came too late must not be taken for another's."""

    number: int
    path: str


class FileReply(PacketMessage, frozen=True):
    """Reply to a request, with the descriptor, or the errno of the refusal."""

    number: int
    error: int = 0


class FileClient:
    """A worker's end of the socket. ``open_file`` blocks, and may be called in any thread."""

    def __init__(self, descriptor: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._sock.settimeout(timeout_s)
        self._lock = threading.Lock()
        self._number = 0

    def open_file(self, path: str) -> int:
        """Return a descriptor for reading a file. Raises OSError; PermissionError for one that the role has no use for,
        TimeoutError where the supervisor does not answer in time.
        """
        with self._lock:
            self._number += 1
            request = FileRequest(self._number, path).encode()
            if len(request) > REQUEST_BYTES_MAX:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            self._sock.send(request)
            while True:
                reply, descriptors = self._receive()
                if reply.number == self._number:
                    break
                for late in descriptors:
                    os.close(late)
        if not descriptors:
            raise OSError(reply.error, os.strerror(reply.error), path)
        return descriptors[0]

    def close(self) -> None:
        """Close the socket; the supervisor then serves this worker no more."""
        self._sock.close()

    def _receive(self) -> tuple[FileReply, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._sock, REPLY_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("the supervisor has gone")
        return FileReply.decode(data), descriptors
