"""proxy.common.eager: what is answered without a task, and what gets one."""

import functools
from typing import Any

import pytest
import trio

from proxy.common.eager import (
    Finished,
    Readable,
    call_eagerly,
    continue_in_task,
    eager,
    enter_task,
    is_eager,
    readable_soon,
    start_eagerly,
    step_eagerly,
)


async def test_what_needs_no_task_is_finished_at_once() -> None:
    async def answer() -> str:
        return "done"

    assert start_eagerly(answer()) == Finished("done")


async def test_what_waits_goes_on_in_a_task_of_its_own() -> None:
    steps: list[tuple[str, trio.lowlevel.Task]] = []

    async def answer() -> str:
        steps.append(("before", trio.lowlevel.current_task()))
        await enter_task()
        steps.append(("in the task", trio.lowlevel.current_task()))
        with trio.move_on_after(60):
            await trio.lowlevel.checkpoint()
        await enter_task()
        return "done"

    answers: list[str] = []

    async def go_on(coroutine: Any) -> None:
        answers.append(await continue_in_task(coroutine))

    here = trio.lowlevel.current_task()
    coroutine = answer()
    assert start_eagerly(coroutine) is None
    assert steps == [("before", here)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on, coroutine)
    assert answers == ["done"]
    assert [what for what, task in steps if task is not here] == ["in the task"]


async def test_an_error_is_raised_on_both_ways() -> None:
    async def fail(*, late: bool) -> None:
        if late:
            await enter_task()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_eagerly(fail(late=False))
    coroutine = fail(late=True)
    assert start_eagerly(coroutine) is None
    with pytest.raises(ZeroDivisionError):
        await continue_in_task(coroutine)


async def test_in_a_task_nothing_is_to_be_entered() -> None:
    with pytest.raises(ZeroDivisionError):
        start_eagerly(_fail())
    await enter_task()  # also after an error: the mark of a start is gone


async def _fail() -> None:
    raise ZeroDivisionError


async def test_a_wait_without_a_task_is_a_defect() -> None:
    ended: list[str] = []

    async def careless() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("ended")

    with pytest.raises(RuntimeError, match="without a task"):
        start_eagerly(careless())
    assert ended == ["ended"], "what it holds is given back"


class Marked:
    @eager
    async def answer(self) -> str:
        return "marked"


class Overriding(Marked):
    async def answer(self) -> str:
        await trio.lowlevel.checkpoint()
        return await super().answer() + ", overridden"


class Wrapping(Marked):
    @functools.wraps(Marked.answer)
    async def answer(self) -> str:
        await trio.lowlevel.checkpoint()
        return await super().answer() + ", wrapped"


class Inheriting(Marked):
    pass


@pytest.mark.parametrize("kind", [Marked, Inheriting])
async def test_a_marked_function_is_called_without_a_task(kind: type[Marked]) -> None:
    assert is_eager(kind().answer)
    assert start_eagerly(call_eagerly(kind().answer)) == Finished("marked")


@pytest.mark.parametrize(
    ("kind", "answer"), [(Overriding, "marked, overridden"), (Wrapping, "marked, wrapped")], ids=["overrides", "wraps"]
)
async def test_one_that_takes_its_place_gets_a_task_first(kind: type[Marked], answer: str) -> None:
    assert not is_eager(kind().answer)
    coroutine = call_eagerly(kind().answer)
    assert start_eagerly(coroutine) is None
    assert await continue_in_task(coroutine) == answer


async def test_a_socket_is_waited_for_by_callback_or_in_a_task() -> None:
    async def answer(sock: Readable) -> tuple[bool | None, bool | None]:
        return await readable_soon(sock), await readable_soon(sock)

    sock = Readable()
    both = answer(sock)
    assert step_eagerly(both) is sock
    assert step_eagerly(both, is_readable=True) is sock
    assert step_eagerly(both, is_readable=True) == Finished((True, True))
    late = answer(sock)
    assert step_eagerly(late) is sock
    assert await continue_in_task(late) == (False, None)
    assert await answer(sock) == (None, None)
    with pytest.raises(RuntimeError, match="waited without a task"):
        start_eagerly(answer(sock))


async def test_a_step_ends_in_a_task_an_error_or_a_defect() -> None:
    async def needs_task() -> None:
        await enter_task()

    async def fail() -> None:
        raise ZeroDivisionError

    async def wait() -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()

    coroutine = needs_task()
    assert step_eagerly(coroutine) is None
    await continue_in_task(coroutine)
    with pytest.raises(ZeroDivisionError):
        step_eagerly(fail())
    with pytest.raises(RuntimeError, match="waited without a task"):
        step_eagerly(wait())
