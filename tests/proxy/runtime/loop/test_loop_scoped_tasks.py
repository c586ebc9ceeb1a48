"""proxy.runtime.loop.scoped_tasks: tasks of one owner, in a shared nursery."""

from __future__ import annotations

import trio
import trio.testing

from proxy.runtime.loop.scoped_tasks import ScopedTasks


async def test_tasks_of_one_owner_end_together_and_leave_the_others(nursery: trio.Nursery) -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(name)

    mine, others = ScopedTasks(nursery, lambda _: None), ScopedTasks(nursery, lambda _: None)
    for name in ("a", "b"):
        mine.start_soon(work, name)
    others.start_soon(work, "other")
    await trio.testing.wait_all_tasks_blocked()
    mine.start_soon(work, "not begun yet")
    mine.cancel()
    mine.start_soon(work, "too late")
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(ended) == ["a", "b"]
    others.cancel()


async def test_a_defect_is_the_owners(nursery: trio.Nursery) -> None:
    defects: list[Exception] = []

    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    tasks = ScopedTasks(nursery, defects.append)
    tasks.start_soon(broken)
    await trio.testing.wait_all_tasks_blocked()
    assert [type(defect) for defect in defects] == [ZeroDivisionError]


async def test_a_task_may_end_its_owner(nursery: trio.Nursery) -> None:
    reached: list[bool] = []
    tasks = ScopedTasks(nursery, lambda _: None)

    async def last() -> None:
        tasks.cancel()
        reached.append(True)
        await trio.lowlevel.checkpoint()
        reached.append(False)

    tasks.start_soon(last)
    await trio.testing.wait_all_tasks_blocked()
    assert reached == [True]
