"""Receivers of RPC replies: for a task that waits, and for a callback.

A reply may come in parts. Each call under way has one receiver, which gets all parts of its reply.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from proto.rpc_frames import Reply
from proto.rpc_pb2 import ConnectionsPage, ConnectionSums, Status
from proto.varints import has_more_fields
from proxy.common.logs import get_logger
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcResponseCorrupt

ResponseT = TypeVar("ResponseT", bound=Message)

RESPONSE_BYTES_MAX: dict[type[Message], int] = {ConnectionSums: 64 * 1024, ConnectionsPage: 8 * 1024 * 1024}
"""Of responses that are lists: a frame full of empty entries from a captured worker takes ten seconds to parse, and 80
times its size.
"""
RESPONSE_FIELDS_MAX = 8_192
"""Fields of those responses: more than the rows of a page (proxy.supervisor.operators.connections.ROWS_MAX), or the
forwarders of the largest cluster.
"""

_OK = int(Status.OK)  # the enum would look the name up at each use


class CallbackReply:
    """A reply receiver without a task: calls ``on_reply`` with each part, and with None once no more will come.

    ``deadline``: in Trio's time.
    """

    __slots__ = ("deadline", "on_reply")

    def __init__(self, on_reply: Callable[[Reply | None], None], deadline: float) -> None:
        self.on_reply = on_reply
        self.deadline = deadline

    def on_part(self, reply: Reply | None) -> None:
        """Pass a part to the callback. An error in it is logged: it must not end the connection of all other calls."""
        try:
            self.on_reply(reply)
        except Exception as error:  # noqa: BLE001 -- see the docstring
            get_logger().error("a reply met a defect", exc_info=error)

    def on_lost(self) -> None:
        """Pass None to the callback."""
        self.on_part(None)


class PendingCall:
    """A reply receiver that one task awaits, part by part."""

    __slots__ = ("_arrived", "_lost", "_replies")

    def __init__(self) -> None:
        self._arrived = trio.Event()
        self._replies: deque[Reply] = deque()
        self._lost = False

    def on_part(self, reply: Reply) -> None:
        """Queue a part and wake the waiting task."""
        self._replies.append(reply)
        self._arrived.set()

    def on_lost(self) -> None:
        """Wake the waiting task; after the queued parts it gets RpcConnectionLost."""
        self._lost = True
        self._arrived.set()

    async def next_part(self) -> tuple[bytes, bool]:
        """Wait for the next part; return it and True if more follow. Raises RpcCallRefused, RpcConnectionLost."""
        while not self._replies:
            if self._lost:
                raise RpcConnectionLost("the worker went away")
            self._arrived = trio.Event()
            await self._arrived.wait()
        reply = self._replies.popleft()
        return response_of(reply), reply.has_more


ReplyReceiver = CallbackReply | PendingCall
"""Receives the parts of an RPC's reply; ``on_lost``: none will come any more."""


def response_of(reply: Reply) -> bytes:
    """Return the response in a reply. Raises RpcCallRefused where the reply is none."""
    if reply.status != _OK:
        raise RpcCallRefused(reply.status, reply.detail)
    return reply.response


def parse_whole(part: bytes, response_type: type[ResponseT], *, more: bool) -> ResponseT:
    """Return the response of a method that replies in one part; ``more``: further parts follow.

    Raises RpcResponseCorrupt.
    """
    if more:
        raise RpcResponseCorrupt("a part, where the whole was expected")
    bytes_max = RESPONSE_BYTES_MAX.get(response_type)
    if bytes_max is not None and (len(part) > bytes_max or has_more_fields(part, RESPONSE_FIELDS_MAX)):
        raise RpcResponseCorrupt(f"a {response_type.__name__} of {len(part)} bytes is too much")
    try:
        return response_type.FromString(part)
    except DecodeError:
        raise RpcResponseCorrupt(f"bytes that are no {response_type.__name__}") from None
