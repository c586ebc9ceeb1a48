"""Coroutines that are started eagerly: without a task, which they get only where they have to wait.

To start a Trio task costs more than many an answer does. An *eager* coroutine runs at once, within the callback that
has its request, and calls ``enter_task`` before the first thing that may wait: there it is suspended, and goes on in a
task. So one function has the rules for both ways. (asyncio has eager tasks since Python 3.12; in Trio what waits must
have its task from the beginning, hence the call.)

A function that others may replace by one of their own, as third parties do with providers', is marked ``@eager`` if it
calls ``enter_task`` in time. One that overrides it has no mark, and gets a task first (``call_eagerly``).
"""

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

ResultT = TypeVar("ResultT")
Parameters = ParamSpec("Parameters")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Awaitable[Any]])

_TASK_NEEDED = object()
_marked: set[object] = set()
_is_starting = False
"""Whether this thread's event loop is in ``start_eagerly``. Other threads run no coroutines."""


class Readable:
    """What ``readable_soon`` may wait for; who makes the steps knows how."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[ResultT]):
    """The result of a coroutine that needed no task."""

    value: ResultT


def start_eagerly(coroutine: Coroutine[Any, Any, ResultT]) -> Finished[ResultT] | None:
    """Run a coroutine until it ends or needs a task; None: await ``continue_in_task`` there. Raises what it raises.

    A coroutine that waits without ``enter_task`` is ended by RuntimeError: a defect, after which Trio may resume the
    caller's task in its place.
    """
    started = step_eagerly(coroutine)
    if isinstance(started, Readable):
        raise _waited_without_task(coroutine)
    return started


def step_eagerly(
    coroutine: Coroutine[Any, Any, ResultT], *, is_readable: bool = False
) -> Finished[ResultT] | Readable | None:
    """Do the same for a coroutine that may call ``readable_soon``, too, from its start or from where that waits.

    Where it waits so, return for what: step on with ``is_readable``, or go on in a task after too long a time.
    """
    global _is_starting  # noqa: PLW0603 -- what enter_task asks
    _is_starting = True
    try:
        suspended_by = coroutine.send(True if is_readable else None)
    except StopIteration as end:
        return Finished(end.value)
    finally:
        _is_starting = False
    if suspended_by is _TASK_NEEDED:
        return None
    if isinstance(suspended_by, Readable):
        return suspended_by
    raise _waited_without_task(coroutine)


def _waited_without_task(coroutine: Coroutine[Any, Any, Any]) -> RuntimeError:
    coroutine.close()
    return RuntimeError("an eager coroutine has waited without a task")


@types.coroutine
def readable_soon(stream: Readable) -> Generator[Any, Any, bool | None]:
    """Wait without a task until a stream is readable. False: it took long, and this has become a task; None: it was one
    before, and nothing was waited for.
    """
    return bool((yield stream)) if _is_starting else None


@types.coroutine
def continue_in_task(coroutine: Coroutine[Any, Any, ResultT]) -> Generator[Any, Any, ResultT]:
    """Run the rest of a coroutine for which ``start_eagerly`` returned None; what it awaits waits in this task."""
    result: ResultT = yield from coroutine
    return result


@types.coroutine
def _suspend() -> Generator[Any, Any, None]:
    yield _TASK_NEEDED


async def enter_task() -> None:
    """Go on in a task; does nothing in a coroutine that is in one already."""
    if _is_starting:
        await _suspend()


def eager(function: FunctionT) -> FunctionT:
    """Mark a function that calls ``enter_task``, or ``call_eagerly``, before whatever may wait."""
    _marked.add(function)  # no attribute of its own, which functools.wraps would copy to whatever wraps it
    return function


def is_eager(function: Callable[..., Any]) -> bool:
    """Return True if a function, or a method's function, is marked."""
    return getattr(function, "__func__", function) in _marked


async def call_eagerly(
    function: Callable[Parameters, Awaitable[ResultT]], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> ResultT:
    """Call a function that may be anyone's: without the mark, in a task."""
    if not is_eager(function):
        await enter_task()
    return await function(*args, **kwargs)
