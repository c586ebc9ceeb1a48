"""Tasks of one connection in a nursery shared by many: a connection without tasks then needs no nursery."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

from proxy.runtime.loop.tasks import ignore


class TaskSpawner(Protocol):
    """A nursery, or an object that starts tasks like one."""

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], /, *args: Any) -> None:
        """Start a task."""
        ...


class ScopedTasks:
    """Tasks that are cancelled together. ``on_internal_error`` gets what a task raises."""

    __slots__ = ("_cancelled", "_nursery", "_on_internal_error", "_scopes")

    def __init__(self, nursery: trio.Nursery, on_internal_error: Callable[[Exception], None]) -> None:
        self._nursery = nursery
        self._on_internal_error = on_internal_error
        self._scopes: set[trio.CancelScope] = set()
        self._cancelled = False

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], /, *args: Any) -> None:
        """Start a task; after ``cancel`` do nothing."""
        if not self._cancelled:
            self._nursery.start_soon(self._run, async_fn, args)

    async def _run(self, async_fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        if self._cancelled:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await async_fn(*args)
            except Exception as error:  # noqa: BLE001 -- the callback handles it
                self._on_internal_error(error)
            finally:
                self._scopes.discard(scope)
                self._drop_callback()

    def cancel(self) -> None:
        """Cancel all tasks; later calls of ``start_soon`` start none."""
        self._cancelled = True
        for scope in self._scopes:
            scope.cancel()
        self._drop_callback()

    def _drop_callback(self) -> None:
        """Leave no circle of references behind, once all tasks are over."""
        if self._cancelled and not self._scopes:
            self._on_internal_error = ignore
