"""Tasks of one owner among those of many in a nursery: a connection that needs none, needs no nursery either."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio


class TaskSpawner(Protocol):
    """A nursery, or what stands for one."""

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], /, *args: Any) -> None:
        """Begin a task."""
        ...


class ScopedTasks:
    """Tasks that are cancelled together. What one of them raises is its owner's matter: ``on_defect`` gets it."""

    __slots__ = ("_cancelled", "_nursery", "_on_defect", "_scopes")

    def __init__(self, nursery: trio.Nursery, on_internal_error: Callable[[Exception], None]) -> None:
        self._nursery = nursery
        self._on_defect = on_internal_error
        self._scopes: set[trio.CancelScope] = set()
        self._cancelled = False

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], /, *args: Any) -> None:
        """Begin a task; none after ``cancel``."""
        if not self._cancelled:
            self._nursery.start_soon(self._run, async_fn, args)

    async def _run(self, async_fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        if self._cancelled:
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await async_fn(*args)
            except Exception as error:  # noqa: BLE001 -- the owner's to handle
                self._on_defect(error)
            finally:
                self._scopes.discard(scope)

    def cancel(self) -> None:
        """For good."""
        self._cancelled = True
        for scope in self._scopes:
            scope.cancel()
