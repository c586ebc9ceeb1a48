"""Receivers of RPC replies: for a task that waits, and for a callback.

A reply may come in parts. Each call under way has one receiver, which gets all parts of its reply.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from proto.rpc_frames import Reply
from proto.rpc_pb2 import Status
from proxy.common.logs import get_logger
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost


class ReplyReceiver(Protocol):
    """Who waits for a call's reply."""

    def on_part(self, reply: Reply) -> None:
        """A part has come, or the whole."""
        ...

    def on_lost(self) -> None:
        """Nothing will come any more."""
        ...


class CallbackReply:
    """Somebody without a task: ``on_reply`` gets each part, or None where nothing will come any more."""

    __slots__ = ("deadline", "on_reply")

    def __init__(self, on_reply: Callable[[Reply | None], None], deadline: float) -> None:
        self.on_reply = on_reply
        self.deadline = deadline

    def on_part(self, reply: Reply | None) -> None:
        """Pass it on. A defect that one reply meets must not end the connection of all the others."""
        try:
            self.on_reply(reply)
        except Exception as error:  # noqa: BLE001 -- see above
            get_logger().error("a reply met a defect", exc_info=error)

    def on_lost(self) -> None:
        """Pass that on, too."""
        self.on_part(None)


class PendingCall:
    """A call that a task waits for. Its reply may come in parts."""

    __slots__ = ("_arrived", "_lost", "_replies")

    def __init__(self) -> None:
        self._arrived = trio.Event()
        self._replies: deque[Reply] = deque()
        self._lost = False

    def on_part(self, reply: Reply) -> None:
        """A part has come."""
        self._replies.append(reply)
        self._arrived.set()

    def on_lost(self) -> None:
        """Nothing will come any more."""
        self._lost = True
        self._arrived.set()

    async def next_part(self) -> tuple[bytes, bool]:
        """The next part, and whether more follow it. Raises RpcCallRefused, RpcConnectionLost."""
        while not self._replies:
            if self._lost:
                raise RpcConnectionLost("the worker went away")
            self._arrived = trio.Event()
            await self._arrived.wait()
        reply = self._replies.popleft()
        if reply.status != Status.OK:
            raise RpcCallRefused(reply.status, reply.detail)
        return reply.response, reply.has_more
