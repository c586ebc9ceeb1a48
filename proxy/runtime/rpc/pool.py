"""RPC clients of all workers of one role: each call goes to the least busy worker."""

import itertools
from collections.abc import Sequence

import trio
from google.protobuf.message import Message

from proxy.runtime.rpc.client import RpcClient


class RpcPool:
    """The clients of all workers of one role; each call goes to the worker with the fewest calls in flight."""

    def __init__(self, clients: Sequence[RpcClient]) -> None:
        self._clients = clients
        self._round_robin = itertools.count()

    def pick_client(self) -> RpcClient:
        """Return the least busy client, round robin where several are equal.

        A client whose last call missed its deadline, that has no connection, or whose connection has not brought a
        reply yet (except for one call, which tests it) is picked only if there is no other.
        """
        if len(self._clients) == 1:
            return self._clients[0]
        start = next(self._round_robin) % len(self._clients)
        rotated = [*self._clients[start:], *self._clients[:start]]
        return min(rotated, key=_rank)

    def notify_all(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Send a call to each worker and ignore the replies. A worker without a connection is left out."""
        for client in self._clients:
            client.send_notification(method, request, timeout_s=timeout_s)

    async def run(self) -> None:
        """Keep all connections until cancelled."""
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.run)


def _rank(client: RpcClient) -> tuple[bool, bool, bool, int]:
    return client.suspect, not client.connected, client.awaits_first_reply, client.in_flight
