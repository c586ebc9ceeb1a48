"""Calls of RPC handlers that are started without a task, as the RPC server makes them."""

from typing import Any

from proxy.common.eager import continue_in_task, start_eagerly
from proxy.runtime.rpc.peers import Caller


async def carry_out(handler: Any, request: bytes, caller: Caller) -> bytes:
    """The response of an EagerHandler, in this task as far as it needs one."""
    coroutine = handler.handle(request, caller)
    finished = start_eagerly(coroutine)
    response: bytes = await continue_in_task(coroutine) if finished is None else finished.value
    return response


def answer_at_once(handler: Any, request: bytes, caller: Caller) -> bytes | None:
    """The response of an EagerHandler that needs no task; None where it does."""
    coroutine = handler.handle(request, caller)
    finished = start_eagerly(coroutine)
    if finished is None:
        coroutine.close()
        return None
    response: bytes = finished.value
    return response
