"""An answer that is made once for all who ask at the same time, and kept for a moment."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcError

ValueT = TypeVar("ValueT")


class Kept(Generic[ValueT]):
    """``make`` is never run twice at a time, and at most once in ``keep_s`` seconds, however many ask.

    It runs in a task of ``nursery``: that one of those who wait goes away does not disturb the others.
    """

    def __init__(self, nursery: trio.Nursery, make: Callable[[], Awaitable[ValueT]], keep_s: float) -> None:
        self._nursery = nursery
        self._make = make
        self._keep_s = keep_s
        self._value: ValueT | None = None
        self._error: RpcError | None = None
        self._began = float("-inf")
        self._under_way: trio.Event | None = None

    async def current(self) -> ValueT:
        """The value, at most ``keep_s`` old when it was asked for. Raises RpcError where it could not be made."""
        if self._under_way is None and trio.current_time() - self._began >= self._keep_s:
            self._began = trio.current_time()
            self._under_way = trio.Event()
            self._nursery.start_soon(self._run, self._under_way)
        if self._under_way is not None:
            await self._under_way.wait()
        if self._value is None:
            raise self._error or RpcError("nobody answered")
        return self._value

    async def _run(self, done: trio.Event) -> None:
        try:
            self._value, self._error = await self._make(), None
        except RpcError as error:
            self._value, self._error = None, error
        except Exception as error:  # noqa: BLE001 -- the next time it may succeed
            get_logger().error("the admin port met a defect", exc_info=error)
            self._value, self._error = None, None
        finally:
            self._under_way = None
            done.set()
