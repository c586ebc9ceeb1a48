"""proxy.forwarder.client.transport: when a client is read no further, and the memory for what it has begun to send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    AUTHENTICATED,
    Play,
    authenticated,
    connect,
    lookup,
    lookup_answer,
)

from proto import commands
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import (
    EnvelopeResponse,
)
from proxy.forwarder.client.phases import Phase
from proxy.forwarder.client.transport import PONGS_BYTES_MAX

Start = Callable[..., Play]


# ---- ping and pong


@pytest.mark.parametrize("when", ["before CONNECT", "in lookup mode"])
async def test_a_client_that_asks_for_pongs_and_does_not_read_them_is_read_no_further(
    play: Start, nursery: trio.Nursery, when: str
) -> None:
    """Security: a PING costs its sender nothing, so few of the answers may wait here."""
    it = play(lockstep=True)
    if when == "in lookup mode":
        await it.in_lookup_mode()
    pings = 5_000
    nursery.start_soon(it.client.send, commands.ping() * pings)
    await trio.testing.wait_all_tasks_blocked()
    assert it.session._transport.unsent_bytes <= PONGS_BYTES_MAX + len(commands.pong())
    for _ in range(pings):
        await it.client.expect_command(BaseCommand.PONG)
    await it.client.send(commands.ping())
    await it.client.expect_command(BaseCommand.PONG)


# ---- limits and slowness


def answer_lookups_behind_a_gate(it: Play) -> trio.Event:
    """All lookups are answered once this is set."""
    gate = trio.Event()

    async def answer_by(request: bytes) -> BaseCommand:
        await gate.wait()
        return lookup_answer(commands.parse_command(request).lookup_topic.request_id)

    it.workers.answer_by = answer_by
    return gate


async def test_the_limit_of_lookups_in_one_connection(play: Start) -> None:
    it = await play(limits={"max_concurrent_lookups_per_connection": 2}).in_lookup_mode()
    gate = answer_lookups_behind_a_gate(it)
    await it.client.send(*(lookup(request_id=number) for number in (1, 2, 3)))
    refused = (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (refused.request_id, refused.error) == (3, ServerError.TooManyRequests)
    metadata = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 4})
    await it.client.send(metadata)
    body = (await it.client.expect_command(BaseCommand.PARTITIONED_METADATA_RESPONSE)).partition_metadata_response
    assert (body.request_id, body.error) == (4, ServerError.TooManyRequests)
    assert it.value("pulsar_proxy_refused_commands_total", reason="too_many_requests") == 2
    gate.set()
    answered = {
        (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id for _ in range(2)
    }
    assert answered == {1, 2}
    await it.client.send(lookup(request_id=5))
    answer = (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (answer.request_id, answer.error) == (5, 0)


async def test_a_client_is_not_read_while_its_requests_in_flight_exceed_the_byte_limit(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests are answered in the end."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 1000)
    it = await play().in_lookup_mode()
    gate = answer_lookups_behind_a_gate(it)
    for number in range(5):
        await it.client.send(lookup("t" * 400, request_id=number))
        await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 3, "the last one may pass it"
    gate.set()
    answered = {
        (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id for _ in range(5)
    }
    assert answered == set(range(5))


async def test_topic_lists_count_for_the_answers_that_they_may_bring(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 1000)
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.LARGE_ANSWER_BYTES", 600)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    topics = BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "n", "request_id": 1}
    )
    await it.client.send(topics, topics, topics)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 2, "the last one may pass it"
    it.workers.sent[0].answer(0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 3


async def test_a_client_that_does_not_read_its_answers(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.send, connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    started = trio.current_time()
    await it.client.send(lookup())
    assert await it.end() == "client_does_not_read"
    assert trio.current_time() - started == pytest.approx(5)


async def test_a_client_that_does_not_read_its_pong(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.send, commands.ping())
    assert await it.end() == "client_does_not_read"


async def test_many_answers_to_a_client_that_does_not_read_end_it_as_soon(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.send, connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    started = trio.current_time()
    await it.client.send(*(lookup(request_id=number) for number in range(5)))
    assert await it.end() == "client_does_not_read"
    assert trio.current_time() - started == pytest.approx(5)


async def test_a_client_is_read_on_once_it_has_taken_a_large_answer(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone is more than the bound: what has left must not count any more when it is asked whether there is room."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 100_000)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    for number in range(3):
        await it.client.send(lookup(request_id=number))
        await trio.testing.wait_all_tasks_blocked()
        it.workers.sent[-1].answer(0, padding=3_000_000)
        await it.client.send(commands.ping())
        await trio.testing.wait_all_tasks_blocked()
        answer = (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
        assert (answer.request_id, len(answer.broker_service_url)) == (number, 3_000_000 + len("pulsar://b0:6650"))
        with trio.fail_after(60):
            await it.client.expect_command(BaseCommand.PONG)


# ---- requests that were not parsed


TORN = b"\x08\x17\xba\x01\x02\x0a\x7f"
"""It begins as a lookup, and cannot be parsed."""


async def test_room_that_comes_with_the_end_resumes_no_reading(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over is read no further, or its descriptor would be watched while it is closed."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 100)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("t" * 100), encode_frame(TORN))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.send(commands.ping())
    await trio.testing.wait_all_tasks_blocked()
    resumed: list[bool] = []
    monkeypatch.setattr(it.session._transport, "resume_reading", lambda: resumed.append(True))
    [sent] = it.workers.sent
    sent.send(EnvelopeResponse(error=EnvelopeResponse.INVALID_REQUEST))
    await it.client.expect_error()
    assert await it.end() == "protocol_error"
    assert resumed == []


# ---- frames that are never finished


async def test_unfinished_large_frames_are_bounded_in_bytes_over_all_clients(play: Start) -> None:
    """Security: 10,000 connections with 128 KiB each would be more memory than there is."""
    it = play(limits={"max_lookup_bytes": 100 * 1024})
    others = it.workers.budget
    assert others.reserve_bytes("others", 50 * 1024)
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    unfinished = encode_frame(bytes(100_000))[: 40 * 1024]
    await it.client.stream.send_all(unfinished)
    error = (await it.client.expect_command(BaseCommand.ERROR)).error
    assert error.error == ServerError.ServiceNotReady
    assert await it.end() == "no_memory"
    assert others._by_owner == {"others": 50 * 1024}


async def test_whole_frames_of_a_client_that_is_not_read_do_not_end_it(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy itself lets them lie; others have taken the memory."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 1000)
    monkeypatch.setattr("proxy.forwarder.client.transport.PARTIAL_FRAME_BYTES_MIN", 1)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(*(lookup("t" * 400, number) for number in range(3)))
    await trio.testing.wait_all_tasks_blocked()
    it.workers.budget.resize(1)
    await it.client.send(*(lookup("t" * 400, number) for number in range(3, 9)))
    await trio.testing.wait_all_tasks_blocked()
    assert it.session._inbound.is_full
    assert it.session._transport.partial_frame_bytes
    assert it.session.phase is Phase.SERVING


async def test_an_unfinished_frame_is_charged_to_the_clients_principal(play: Start) -> None:
    """Security: not to its address, which many clients share."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [authenticated()]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.stream.send_all(encode_frame(bytes(100_000))[: 30 * 1024])
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget._by_owner == {"principal alice": 30 * 1024}


async def test_a_large_frame_that_is_finished_counts_no_more(play: Start) -> None:
    it = play()
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    frame = commands.encode(lookup("t" * (40 * 1024)))
    await it.client.stream.send_all(frame[: 30 * 1024])
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget.used_bytes == 30 * 1024
    await it.client.stream.send_all(frame[30 * 1024 :])
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget.used_bytes == 0
