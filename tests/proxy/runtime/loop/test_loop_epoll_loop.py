"""proxy.runtime.loop.epoll_loop: batches of events and the run queue, beside what the reactor's tests show."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from proxy.runtime.loop.epoll_loop import EVENTS_PER_BATCH, EpollLoop, Events


class Processed:
    """A loop's batches; the run queue holds how often each of its entries is still to be processed."""

    def __init__(self) -> None:
        self.run_queue: deque[int] = deque()
        self.batches: list[int] = []
        self.from_queue = 0
        self.loop = EpollLoop(self.process, self.run_queue, may_linger=lambda: False)

    def process(self, events: Events) -> None:
        self.batches.append(len(events))
        for descriptor, _mask in events:
            if descriptor in self.readers:
                self.readers[descriptor].recv(1)
        for _ in range(len(self.run_queue)):
            left = self.run_queue.popleft()
            self.from_queue += 1
            if left > 1:
                self.run_queue.append(left - 1)

    readers: dict[int, socket.socket]


@pytest.fixture
async def processed(nursery: trio.Nursery) -> AsyncIterator[Processed]:
    processed = Processed()
    processed.readers = {}
    nursery.start_soon(processed.loop.run)
    await trio.testing.wait_all_tasks_blocked()
    yield processed
    nursery.cancel_scope.cancel()


async def until_idle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.02)


async def test_without_events_nothing_is_processed(processed: Processed) -> None:
    await until_idle()
    assert processed.batches == []


async def test_to_wake_it_has_the_run_queue_processed_until_it_is_empty(processed: Processed) -> None:
    processed.run_queue.append(3)
    processed.loop.wake()
    await until_idle()
    assert (processed.from_queue, len(processed.run_queue)) == (3, 0)


async def test_other_tasks_run_while_the_run_queue_never_empties(processed: Processed) -> None:
    processed.run_queue.append(10**9)
    processed.loop.wake()
    for _ in range(20):
        await trio.lowlevel.checkpoint()
    assert processed.from_queue > 0
    processed.run_queue.clear()


async def test_a_batch_is_bounded(processed: Processed) -> None:
    pairs = [socket.socketpair() for _ in range(EVENTS_PER_BATCH + 10)]
    for ours, theirs in pairs:
        processed.readers[ours.fileno()] = ours
        processed.loop.epoll.register(ours, select.EPOLLIN)
        theirs.send(b"x")
    await until_idle()
    assert max(processed.batches) == EVENTS_PER_BATCH
    assert sum(processed.batches) == len(pairs)
    for one in (sock for pair in pairs for sock in pair):
        one.close()


async def test_another_task_may_have_few_events_processed_in_its_own_way(processed: Processed) -> None:
    """And the loop goes on with the run queue, although the timer that woke it is used up."""
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, theirs in pairs:
        processed.loop.epoll.register(ours, select.EPOLLIN | select.EPOLLET)
        theirs.send(b"x")
    processed.run_queue.append(1)
    processed.loop.wake()
    seen: list[Events] = []
    for _ in range(3):
        processed.loop.process_once(seen.append, 2)
    assert max(map(len, seen)) == 2
    assert {ours.fileno() for ours, _ in pairs} <= {descriptor for events in seen for descriptor, _mask in events}
    assert not processed.from_queue
    await until_idle()
    assert processed.from_queue == 1
    for one in (sock for pair in pairs for sock in pair):
        one.close()


async def test_once_stopped_it_processes_nothing_more(processed: Processed) -> None:
    """Also where it was woken before: a successor may have the sockets already."""
    processed.run_queue.append(1)
    processed.loop.wake()
    processed.loop.stop()
    await until_idle()
    assert processed.from_queue == 0


async def test_to_wake_it_within_a_batch_is_not_needed(nursery: trio.Nursery) -> None:
    run_queue: deque[int] = deque()
    done: list[int] = []

    def process(_events: Events) -> None:
        if not done:
            run_queue.append(1)
            loop.wake()
        elif run_queue:
            run_queue.popleft()
        done.append(len(run_queue))

    loop = EpollLoop(process, run_queue, may_linger=lambda: False)
    nursery.start_soon(loop.run)
    run_queue.append(0)
    loop.wake()
    await until_idle()
    assert run_queue == deque()
    nursery.cancel_scope.cancel()


async def test_the_loop_is_busy_for_a_moment_after_a_batch() -> None:
    now = [100.0]
    loop = EpollLoop(lambda _events: run_queue.clear(), run_queue := deque([1]), clock=lambda: now[0])
    assert not loop.is_busy
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await until_idle()
        assert loop.is_busy
        now[0] += 1
        assert not loop.is_busy
        nursery.cancel_scope.cancel()
