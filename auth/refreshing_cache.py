"""Cache of one value from an issuer (its keys, a token of ours), fetched on demand when it grows old.

Many clients need it at the same time, and any of them may disconnect while it is being fetched; an issuer may be slow
or down. So a fetch is a task of its own, which all of them wait for and none of them can cancel; after a failure there
is no new fetch for a while; and an old value is used for a bounded time.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from auth.errors import AuthError
from auth.http import HttpFailed
from proxy.common.eager import enter_task
from proxy.common.logs import get_logger
from proxy.runtime.loop.single_flight import SingleFlight

ValueT = TypeVar("ValueT")


class NotAvailable(AuthError):
    """There is no usable value; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetched(Generic[ValueT]):
    """A fetched value; after ``fresh_s`` it is fetched again, after ``usable_s`` it is not used any more."""

    value: ValueT
    fresh_s: float
    usable_s: float


@dataclass(frozen=True, slots=True)
class _CachedValue(Generic[ValueT]):
    value: ValueT
    fresh_until: float
    usable_until: float


class RefreshingCache(Generic[ValueT]):
    """Cache of one value. ``fetch`` may raise HttpFailed; ``what`` names the value in logs.

    ``retry_interval_s``: from the end of one fetch to the start of the next, unless the value has just grown old.
    """

    def __init__(self, what: str, fetch: Callable[[], Awaitable[Fetched[ValueT]]], *, retry_interval_s: float) -> None:
        self._what = what
        self._fetch = fetch
        self._retry_interval_s = retry_interval_s
        self._cached: _CachedValue[ValueT] | None = None
        self._failure = ""
        self._ended_at = float("-inf")
        self._flight = SingleFlight(self._run_fetch)

    @property
    def failure(self) -> str:
        """Why the last fetch failed; empty: it did not."""
        return self._failure

    async def current_value(self) -> ValueT:
        """Return the value, fetched if need be. Raises NotAvailable.

        While the issuer is known to be down, no caller that can use the old value waits for the next fetch.
        """
        kept = self._cached
        if kept is None or trio.current_time() >= kept.fresh_until:
            self._start_fetch_unless_failed_lately()
            if not (self._failure and self._is_usable()):
                await self._wait_for_fetch()
        return self._usable_value()

    async def refreshed_value(self) -> ValueT:
        """Return the value after a new fetch, for a caller that the present one does not help. Raises NotAvailable.

        Where the last fetch was less than ``retry_interval_s`` ago, it is the same value: so no client can cause
        fetches without end.
        """
        if trio.current_time() - self._ended_at >= self._retry_interval_s:
            self._flight.start()
        await self._wait_for_fetch()
        return self._usable_value()

    def _is_usable(self) -> bool:
        return self._cached is not None and trio.current_time() < self._cached.usable_until

    def _usable_value(self) -> ValueT:
        if self._cached is None or not self._is_usable():
            raise NotAvailable(self._failure or "the fetch was broken off")
        return self._cached.value

    def _start_fetch_unless_failed_lately(self) -> None:
        if not self._failure or trio.current_time() - self._ended_at >= self._retry_interval_s:
            self._flight.start()

    async def _wait_for_fetch(self) -> None:
        if self._flight.is_under_way:
            await enter_task()
        if self._flight.is_under_way:  # still: without a run there would be a new one
            await self._flight.result()

    async def _run_fetch(self) -> None:
        try:
            fetched = await self._fetch()
            now = trio.current_time()
            self._cached = _CachedValue(fetched.value, now + fetched.fresh_s, now + fetched.usable_s)
            self._failure = ""
        except HttpFailed as failure:
            self._record_failure(str(failure))
        except Exception as error:  # noqa: BLE001 -- in a task of its own, a defect would end the process
            self._record_failure(f"a defect of ours: {type(error).__name__}")
        finally:
            self._ended_at = trio.current_time()

    def _record_failure(self, reason: str) -> None:
        self._failure = reason
        get_logger().error(
            "an issuer does not give what is needed",
            what=self._what,
            reason=reason,
            going_on_with_the_old_one=self._is_usable(),
        )
