"""Identification of RPC callers: the kernel's peer credentials of a Unix socket, looked up in the supervisor's table.

KIP-590 wants the sender of an Envelope to hold the right to ClusterAction. Here a caller proves its role by being the
process that the supervisor started for it: SO_PEERCRED gives the process id that connected, the supervisor sends every
worker the table of its children and their roles. Nothing that a caller says about itself counts.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from proto.roles import Role
from proto.rpc_pb2 import Peer

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that makes a call, and its role."""

    role: Role
    pid: int


def peer_credentials(sock: trio.socket.SocketType) -> tuple[int, int]:
    """Return the peer's process id and user id, as the kernel recorded them at connect time."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def bound_path(sock: trio.socket.SocketType) -> Path:
    """Return the path at which the peer's Unix socket was bound; no rename changes it."""
    return Path(os.fsdecode(sock.getpeername()))


class PeerTable:
    """Table of the supervisor's children: process id → role. Each update replaces it as a whole."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self._roles: dict[int, Role] = {}
        self.replace_peers(peers)

    def replace_peers(self, peers: Iterable[Peer]) -> None:
        """Replace the whole table."""
        self._roles = {peer.pid: Role(peer.role) for peer in peers}

    def identify_caller(self, sock: trio.socket.SocketType) -> Caller | None:
        """Return the caller at the other end of a connected socket; None if it is no process of this cluster."""
        pid, uid = peer_credentials(sock)
        role = self._roles.get(pid)
        if role is None or uid != os.geteuid():
            return None
        return Caller(role, pid)
