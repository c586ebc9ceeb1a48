"""Questions to a running cluster over control.sock."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from proxy.runtime.rpc.errors import RpcError

AnswerT = TypeVar("AnswerT")


async def ask_while(run: Callable[[], Awaitable[None]], ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Run a client until ``ask`` has its answer, and return that. Raises RpcError, in no group."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            return await ask()
        except RpcError as error:
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    raise failure
