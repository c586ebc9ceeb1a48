"""A short-lived cache that coalesces concurrent calls."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from proxy.common.logs import get_logger
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.rpc.errors import RpcError

ValueT = TypeVar("ValueT")


class CoalescingCache(Generic[ValueT]):
    """``make`` is never run twice at a time, and not again until ``keep_s`` seconds after its end, however many ask.

    From its end, not from its beginning: what takes longer than it is kept would otherwise never pause.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], keep_s: float) -> None:
        self._make = make
        self._keep_s = keep_s
        self._value: ValueT | None = None
        self._error: RpcError | None = None
        self._ended = float("-inf")
        self._flight = SingleFlight(self._run)

    async def current(self) -> ValueT:
        """Return the value, at most ``keep_s`` old at the time of the call. Raises RpcError where there is none."""
        if self._flight.is_under_way or trio.current_time() - self._ended >= self._keep_s:
            await self._flight.result()
        if self._value is None:
            raise self._error or RpcError("no worker answered")
        return self._value

    async def _run(self) -> None:
        try:
            self._value, self._error = await self._make(), None
        except RpcError as error:
            self._value, self._error = None, error
        except Exception as error:  # noqa: BLE001 -- the next time it may succeed
            get_logger().error("the admin port met a defect", exc_info=error)
            self._value, self._error = None, None
        finally:
            self._ended = trio.current_time()
