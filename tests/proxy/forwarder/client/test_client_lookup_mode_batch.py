"""proxy.forwarder.client.lookup_mode: requests by number, until they are answered."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from proxy.forwarder.client.lookup_mode import LookupBatch
from proxy.runtime.rpc.client import RpcDeadlineExceeded


def test_unanswered_requests_are_renumbered_from_zero() -> None:
    batch = LookupBatch([b"a", b"b", b"c"], 7.0)
    del batch.waiting[1]
    batch.renumber_waiting()
    assert batch.waiting == {0: b"a", 1: b"c"}


def test_taking_the_waiting_requests_leaves_none_waiting() -> None:
    batch = LookupBatch([b"a", b"b"], 7.0)
    assert batch.take_waiting() == [b"a", b"b"]
    assert batch.take_waiting() == []
    assert batch.waiting == {}


async def test_nothing_is_waited_for_past_the_deadline(autojump_clock: trio.testing.MockClock) -> None:
    batch = LookupBatch([b"a"], trio.current_time() + 3)
    with pytest.raises(RpcDeadlineExceeded), batch.fail_at_deadline():
        await trio.sleep_forever()
    assert trio.current_time() == pytest.approx(3)
