"""The supervisor's request to the fork server, and its reply: a message each on a SOCK_SEQPACKET socket pair.

The request carries the worker's descriptors (SCM_RIGHTS) in the order of ``names``.
"""

from proto.roles import Role
from proxy.runtime.process.hardening import FileAccess
from proxy.runtime.process.packet import PacketMessage

REQUEST_BYTES_MAX = 64 * 1024
DESCRIPTORS_MAX = 16

READY = b"ready"
"""First message of the fork server: all kinds of workers are imported."""


class ForkRequest(PacketMessage, frozen=True):
    """Request for a worker. ``names``: the fields of ``proxy.runtime.process.descriptors.Descriptors`` that come with
    it. ``files``: what it may open by itself.
    """

    role: Role
    names: tuple[str, ...]
    files: FileAccess = FileAccess()


class ForkReply(PacketMessage, frozen=True):
    """Reply of the fork server: the worker's process id, or the errno of a fork that failed."""

    pid: int = 0
    error: int = 0
