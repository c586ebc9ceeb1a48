"""RPC clients of all workers of one role: each call goes to the least busy worker."""

import itertools
from collections.abc import Sequence

import trio

from proxy.runtime.rpc.client import RpcClient


class RpcPool:
    """The workers of one role; each call goes to the one with the fewest in flight."""

    def __init__(self, clients: Sequence[RpcClient]) -> None:
        self._clients = clients
        self._turn = itertools.count()

    def pick_client(self) -> RpcClient:
        """The least busy client, in turn where several are. One that let a deadline pass, has no connection, or heard
        nothing on it (but for one call, which finds out), only where there is no other.
        """
        if len(self._clients) == 1:
            return self._clients[0]
        start = next(self._turn) % len(self._clients)
        rotated = [*self._clients[start:], *self._clients[:start]]
        return min(rotated, key=_rank)

    async def run(self) -> None:
        """Keep all connections."""
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.run)


def _rank(client: RpcClient) -> tuple[bool, bool, bool, int]:
    return client.suspect, not client.connected, client.awaits_first_reply, client.in_flight
