"""proxy.forwarder.client.lookup_mode: what a client hears of its requests, whatever became of their Envelope."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import ALICE, CLIENT, FakeWorkerClients, Peer, SentEnvelope, lookup, lookup_answer, make_config
from prometheus_client import CollectorRegistry
from relay_fakes import unblocked_pair

from proto.client_machine import is_plainly_lookup
from proto.commands import CommandCorrupt
from proto.envelope import ENVELOPE_VERSION
from proto.errors import RemoteProtocolError
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeResponse, RefusedRequest, Status
from proxy.forwarder.client import lookup_mode
from proxy.forwarder.client.lookup_mode import LookupMode
from proxy.forwarder.client.transport import ClientSlow, ClientTransport
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientIdentity
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.rpc.client import RETRIES_MAX
from proxy.runtime.rpc.errors import RpcCallRefused

METADATA = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 7})
SCHEMA = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 7})
IDENTITY = ClientIdentity(ALICE, b"sealed")


def topics(request_id: int = 7) -> BaseCommand:
    """A request for a topic list."""
    return BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "n", "request_id": request_id}
    )


class Setup:
    """One client's lookup mode, between a client and fake lookup workers."""

    def __init__(
        self, nursery: trio.Nursery, streams: tuple[Any, Any], *, fast_path: bool = True, **limits: int
    ) -> None:
        self.workers = FakeWorkerClients(make_config(limits=limits), nursery)
        self.workers.answer_by, self.workers.fast_path = None, fast_path
        ours, theirs = streams
        self.client = Peer(theirs)
        self.transport = ClientTransport(ours, nursery, max_frame_bytes=1 << 20, write_timeout_ms=5000)
        self.metrics = ForwarderMetrics(CollectorRegistry())
        self.told: list[bool] = []
        self.corrupt: list[RemoteProtocolError] = []
        self.ends: list[Exception | None] = []
        self.mode = LookupMode(
            CLIENT,
            self.workers,  # type: ignore[arg-type]
            self.metrics,
            self.transport,
            self.corrupt.append,
        )
        self.mode.set_identity(IDENTITY)
        self.transport.start_reading(self._on_room, self.ends.append)

    def _on_room(self) -> None:
        """Answers have come, or have left: a session asks then whether there is room."""
        self.told.append(self.mode.has_room)

    async def forward(self, *requests: BaseCommand) -> None:
        """Read in one go, and taken as a session does."""
        for command in requests:
            data = command.SerializeToString()
            if is_plainly_lookup(data):
                self.mode.forward_request(data)
            else:
                self.mode.forward_parsed_request(command, data)
        self.mode.send_batch()
        await trio.testing.wait_all_tasks_blocked()

    @property
    def sent(self) -> list[SentEnvelope]:
        return self.workers.sent

    async def receive(self, count: int = 1) -> list[BaseCommand]:
        answers = []
        for _ in range(count):
            answer = await self.client.receive()
            assert answer is not None
            answers.append(answer)
        return answers

    async def receive_ids(self, count: int) -> list[tuple[int, int]]:
        """Request ids and error codes of so many answers, by id."""
        answers = [answer.lookup_topic_response for answer in await self.receive(count)]
        return sorted((answer.request_id, answer.error) for answer in answers)

    async def nothing_left(self) -> None:
        """All is answered, once, and counted back."""
        await trio.testing.wait_all_tasks_blocked()
        assert self.mode.in_flight.count == 0
        assert self.mode._kept_bytes == 0
        assert (self.mode._reserved_bytes, self.workers.budget.used_bytes) == (0, 0)
        with trio.move_on_after(0.01):
            pytest.fail(f"{await self.client.receive()} was answered twice")


Make = Callable[..., Setup]


@pytest.fixture(params=["socket", "memory"])
async def make(request: pytest.FixtureRequest, nursery: trio.Nursery) -> AsyncIterator[Make]:
    """Over a socket answers go out at once; a stream in memory is like TLS: it must be waited for."""
    sockets: list[Any] = []

    def make(**how: Any) -> Setup:
        if request.param == "memory":
            return Setup(nursery, trio.testing.memory_stream_pair(), **how)
        pair = tuple(TcpStream(end) for end in unblocked_pair())
        sockets.extend(pair)
        return Setup(nursery, pair, **how)  # type: ignore[arg-type]

    yield make
    nursery.cancel_scope.cancel()
    for stream in sockets:
        stream.socket.close()


both_ways = pytest.mark.parametrize("fast_path", [True, False])


# ---- answers


@both_ways
async def test_the_frames_go_out_as_they_are(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(), lookup())
    answer = lookup_answer(7)
    answer.MergeFromString(b"\xfa\x3f\x03new")
    data = answer.SerializeToString()
    setup.sent[0].send(EnvelopeResponse(frames=encode_frame(data) * 2, answered=[1, 0]))
    assert [answer.SerializeToString() for answer in await setup.receive(2)] == [data, data]
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.13", "kip-590.14")
@pytest.mark.parametrize("identified_as", [ANONYMOUS, IDENTITY])
async def test_an_envelope_says_whose_requests_they_are(make: Make, identified_as: ClientIdentity) -> None:
    """Security: the seal is what the lookup worker believes."""
    setup = make()
    setup.mode.set_identity(identified_as)
    await setup.forward(lookup())
    envelope = setup.sent[0].envelope
    assert (envelope.principal_name, envelope.sealed_principal) == (identified_as.role, identified_as.sealed)
    assert (envelope.principal_type, envelope.client_address) == (identified_as.principal.type, CLIENT)
    assert envelope.version == ENVELOPE_VERSION
    setup.sent[0].answer(0)
    await setup.receive()
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.11", "kip-590.12")
@both_ways
async def test_an_envelope_has_the_requests_in_their_order(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    requests = [lookup(f"t{number}", number) for number in range(3)]
    await setup.forward(*requests)
    [sent] = setup.sent
    assert sent.requests == [request.SerializeToString() for request in requests]
    assert (sent.envelope.principal_name, sent.envelope.client_address) == ("alice", CLIENT)
    assert sent.deadline == pytest.approx(trio.current_time() + setup.workers.answer_timeout_s, abs=1)


async def test_without_requests_nothing_is_sent(make: Make) -> None:
    setup = make()
    setup.mode.send_batch()
    await setup.forward(lookup())
    setup.mode.send_batch()
    assert len(setup.sent) == 1


@both_ways
async def test_answers_go_out_as_they_come_in_any_order(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(*(lookup(request_id=number) for number in range(4)))
    [sent] = setup.sent
    for indices in ((2,), (3, 0), (1,)):
        sent.answer(*indices, more=indices != (1,))
        assert [answer.lookup_topic_response.request_id for answer in await setup.receive(len(indices))] == list(
            indices
        )
    await setup.nothing_left()


@both_ways
async def test_counters_follow_each_answer(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(*(lookup(request_id=number) for number in range(3)))
    assert setup.mode.in_flight.count == 3
    used = setup.mode._kept_bytes
    setup.sent[0].answer(0, more=True)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.mode.in_flight.count == 2
    assert setup.mode._kept_bytes == used * 2 // 3
    setup.sent[0].answer(1, 2)
    await setup.receive(3)
    await setup.nothing_left()


@both_ways
@pytest.mark.parametrize("twice", [(0,), (1, 1), (1, 0), (0, 2), (2,), (99,)])
async def test_an_answer_to_nothing_or_a_second_one_is_a_defect_of_the_workers(
    make: Make, fast_path: bool, twice: tuple[int, ...]
) -> None:
    """Nothing of such a reply goes out, since these frames have no known client; what waits is failed, once."""
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    [sent] = setup.sent
    sent.answer(0, more=True)
    assert await setup.receive_ids(1) == [(1, 0)]
    with structlog.testing.capture_logs() as logs:
        sent.send(EnvelopeResponse(frames=sent.frame(0), answered=twice), more=True)
        assert await setup.receive_ids(1) == [(2, ServerError.UnknownError)]
    assert [(entry["requests"], entry["log_level"]) for entry in logs] == [(1, "warning")]
    sent.answer(1)  # too late
    await setup.nothing_left()
    assert len(setup.sent) == 1, "not asked again"


@both_ways
async def test_a_refusal_of_nothing_is_dropped(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(request_id=1))
    [sent] = setup.sent
    stray = RefusedRequest(index=9, error=EnvelopeResponse.INVALID_REQUEST)
    sent.send(EnvelopeResponse(frames=sent.frame(0), answered=[0], refused=[stray, stray]))
    assert await setup.receive_ids(1) == [(1, 0)]
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.26")
@both_ways
@pytest.mark.parametrize(
    "rubbish",
    [b"\xff\xff", EnvelopeResponse(answered=[99], frames=b"x"), EnvelopeResponse()],
)
async def test_a_reply_that_does_not_answer_what_was_asked(
    make: Make, fast_path: bool, rubbish: EnvelopeResponse | bytes
) -> None:
    """conformance.md: a correlation mismatch is UNKNOWN_SERVER_ERROR to the client; no client waits for ever."""
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    setup.sent[0].answer(1, more=True)
    with structlog.testing.capture_logs() as logs:
        setup.sent[0].send(rubbish)
        assert await setup.receive_ids(2) == [(1, ServerError.UnknownError), (2, 0)]
    assert [entry["requests"] for entry in logs] == [1]
    await setup.nothing_left()
    assert len(setup.sent) == 1, "not asked again"


# ---- errors of the Envelope


ENVELOPE_ERRORS = [
    (EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE, ServerError.AuthenticationError),
    (EnvelopeResponse.CLUSTER_AUTHORIZATION_FAILED, ServerError.UnknownError),
    (EnvelopeResponse.INVALID_REQUEST, ServerError.UnknownError),
    (77, ServerError.UnknownError),
]


@pytest.mark.conforms("kip-590.23", "kip-590.26")
@both_ways
@pytest.mark.parametrize(("error", "code"), ENVELOPE_ERRORS)
async def test_an_envelopes_error_is_told_without_its_text(make: Make, fast_path: bool, error: int, code: int) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    with structlog.testing.capture_logs() as logs:
        setup.sent[0].send(EnvelopeResponse(error=error, error_message="internal words"))  # type: ignore[arg-type]
        answers = await setup.receive(2)
    assert [(answer.lookup_topic_response.request_id, answer.lookup_topic_response.error) for answer in answers] == [
        (1, code),
        (2, code),
    ]
    assert "internal words" not in str(answers)
    [entry] = logs
    assert (entry["client"], entry["principal"], entry["requests"]) == (CLIENT, "alice", 2)
    assert (entry["kinds"], entry["reason"]) == ("lookup", "internal words")
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.31")
@both_ways
async def test_an_envelope_of_an_unknown_version_is_reported(make: Make, fast_path: bool) -> None:
    """Kafka's forwarding broker closes the client's connection then; the session does so here."""
    setup = make(fast_path=fast_path)
    reports: list[int] = []
    setup.mode.on_unsupported_envelope = lambda: reports.append(setup.mode.in_flight.count)
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    setup.sent[0].send(EnvelopeResponse(error=EnvelopeResponse.UNSUPPORTED_VERSION, error_message="internal words"))
    answers = [answer.lookup_topic_response for answer in await setup.receive(2)]
    assert [(answer.request_id, answer.error) for answer in answers] == [
        (1, ServerError.ServiceNotReady),
        (2, ServerError.ServiceNotReady),
    ]
    assert "internal words" not in str(answers)
    assert reports == [0], "once, when the requests are answered"
    await setup.nothing_left()


@both_ways
@pytest.mark.parametrize(
    ("error", "code"), [*ENVELOPE_ERRORS, (EnvelopeResponse.UNSUPPORTED_VERSION, ServerError.UnknownError)]
)
async def test_a_refused_request_fails_alone_in_its_envelope(
    make: Make, fast_path: bool, error: int, code: int
) -> None:
    setup = make(fast_path=fast_path)
    setup.mode.on_unsupported_envelope = lambda: pytest.fail("only one request was refused")
    await setup.forward(lookup(request_id=1), METADATA, lookup(request_id=3))
    [sent] = setup.sent
    bad = RefusedRequest(index=1, error=error, error_message="internal words")  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        sent.send(EnvelopeResponse(frames=sent.frame(0) + sent.frame(2), answered=[0, 2], refused=[bad]))
        first, third, metadata = await setup.receive(3)
    assert (first, third) == (lookup_answer(1), lookup_answer(3))
    body = metadata.partition_metadata_response
    assert (body.request_id, body.error) == (7, code)
    assert "internal words" not in str(metadata)
    assert [(entry["requests"], entry["kinds"]) for entry in logs] == [(1, "partitions_metadata")]
    await setup.nothing_left()


# ---- lookup workers that go, refuse, or say nothing


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.TOO_MANY_REQUESTS, ServerError.TooManyRequests),
        (Status.REQUEST_TIMED_OUT, ServerError.ServiceNotReady),
        (Status.CLUSTER_AUTHORIZATION_FAILED, ServerError.ServiceNotReady),
        # conformance.md: an unknown error is UNKNOWN_SERVER_ERROR to the client.
        (Status.UNKNOWN_SERVER_ERROR, ServerError.UnknownError),
        (99, ServerError.ServiceNotReady),
    ],
)
async def test_a_refusal_is_told_without_its_text(make: Make, status: int, code: int) -> None:
    setup = make(fast_path=False)
    await setup.forward(lookup())
    with structlog.testing.capture_logs() as logs:
        setup.sent[0].refuse(status)
        [answer] = await setup.receive()
    assert (answer.lookup_topic_response.request_id, answer.lookup_topic_response.error) == (7, code)
    assert "internal words" not in str(answer)
    assert "internal words" in logs[0]["reason"]
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.28")
@pytest.mark.parametrize("loss", [SentEnvelope.lose, lambda sent: sent.refuse(Status.TOO_MANY_REQUESTS)])
async def test_requests_left_unanswered_by_the_fast_path_are_sent_again_within_their_deadline(
    make: Make, loss: Callable[[SentEnvelope], None]
) -> None:
    setup = make()
    await setup.forward(*(lookup(f"t{number}", number) for number in range(4)))
    setup.sent[0].answer(1, 3, more=True)
    loss(setup.sent[0])
    await trio.testing.wait_all_tasks_blocked()
    assert [sent.topics for sent in setup.sent] == [["t0", "t1", "t2", "t3"], ["t0", "t2"]]
    assert setup.sent[1].deadline == pytest.approx(setup.sent[0].deadline, abs=0.5), "no time is added"
    setup.sent[1].answer(1, 0)
    assert await setup.receive_ids(4) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    await setup.nothing_left()


async def test_where_there_is_no_fast_path_nothing_is_lost(make: Make) -> None:
    setup = make(fast_path=False)
    await setup.forward(lookup(request_id=1))
    setup.workers.fast_path = True
    await setup.forward(lookup(request_id=2))
    for sent in setup.sent:
        sent.answer(0)
    assert await setup.receive_ids(2) == [(1, 0), (2, 0)]
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.28")
async def test_each_retry_sends_only_the_requests_still_unanswered(make: Make) -> None:
    setup = make(fast_path=False)
    await setup.forward(*(lookup(f"t{number}", number) for number in range(RETRIES_MAX + 1)))
    for number in range(RETRIES_MAX):
        sent = setup.sent[number]
        sent.answer(0, more=True)
        sent.lose()
        await trio.testing.wait_all_tasks_blocked()
        assert setup.sent[number + 1].topics == [f"t{left}" for left in range(number + 1, RETRIES_MAX + 1)]
    setup.sent[-1].answer(0)
    assert await setup.receive_ids(RETRIES_MAX + 1) == [(number, 0) for number in range(RETRIES_MAX + 1)]
    await setup.nothing_left()


@both_ways
async def test_a_request_whose_answer_kills_each_worker_is_given_up(make: Make, fast_path: bool) -> None:
    setup = make(fast_path=fast_path)
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    asked = 0
    with structlog.testing.capture_logs():
        while asked < len(setup.sent):
            setup.sent[asked].lose()
            asked += 1
            await trio.testing.wait_all_tasks_blocked()
        assert await setup.receive_ids(2) == [(1, ServerError.ServiceNotReady), (2, ServerError.ServiceNotReady)]
    assert asked == RETRIES_MAX + 1 + fast_path
    await setup.nothing_left()


async def test_a_worker_that_answers_in_part_and_then_says_nothing(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(fast_path=False, lookup_timeout_ms=4000)
    started = trio.current_time()
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    setup.sent[0].answer(1, more=True)
    with structlog.testing.capture_logs():
        assert await setup.receive_ids(2) == [(1, ServerError.ServiceNotReady), (2, 0)]
    assert trio.current_time() - started == pytest.approx(5.0)
    setup.sent[0].answer(0)
    await setup.nothing_left()


async def test_a_fast_path_whose_time_is_over_is_not_begun_again(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(lookup_timeout_ms=4000)
    await setup.forward(lookup(request_id=1))
    await trio.sleep(5.2)
    with structlog.testing.capture_logs():
        setup.sent[0].lose()  # as RpcClient tells
        assert await setup.receive_ids(1) == [(1, ServerError.ServiceNotReady)]
    await setup.nothing_left()


async def test_no_worker_at_all(
    make: Make, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make(fast_path=False)

    def no_answer(*_: object) -> None:
        raise RpcCallRefused(Status.TOO_MANY_REQUESTS, "the worker does not keep up")

    monkeypatch.setattr(setup.workers, "forward_envelope", no_answer)
    with structlog.testing.capture_logs():
        await setup.forward(lookup(request_id=1))
        assert await setup.receive_ids(1) == [(1, ServerError.TooManyRequests)]
    await setup.nothing_left()


@pytest.mark.conforms("kip-590.27")
async def test_failures_have_the_requests_own_form(make: Make) -> None:
    setup = make(fast_path=False)
    await setup.forward(METADATA)
    await setup.forward(topics(), SCHEMA)
    with structlog.testing.capture_logs() as logs:
        for sent in setup.sent:
            sent.refuse(Status.REQUEST_TIMED_OUT)
        answers = {answer.type: answer for answer in await setup.receive(3)}
    metadata = answers[BaseCommand.PARTITIONED_METADATA_RESPONSE].partition_metadata_response
    assert (metadata.request_id, metadata.error) == (7, ServerError.ServiceNotReady)
    error = answers[BaseCommand.ERROR].error
    assert (error.request_id, error.error) == (7, ServerError.ServiceNotReady)
    schema = answers[BaseCommand.GET_SCHEMA_RESPONSE].get_schema_response
    assert (schema.request_id, schema.error_code) == (7, ServerError.ServiceNotReady)
    assert {entry["kinds"] for entry in logs} == {"get_schema", "partitions_metadata", "get_topics_of_namespace"}
    await setup.nothing_left()


# ---- requests that are none


async def test_a_request_without_its_message(make: Make) -> None:
    setup = make()
    with pytest.raises(CommandCorrupt):
        await setup.forward(BaseCommand(type=BaseCommand.LOOKUP))
    await setup.nothing_left()


TORN = b"\x08\x17\xba\x01\x02\x0a\x7f"
NO_REQUEST_ID = b"\x08\x17\xba\x01\x03\x0a\x01t"
NOT_A_LOOKUP = lookup().SerializeToString() + b"\x08\x12"


@both_ways
@pytest.mark.parametrize("corrupt", [TORN, NOT_A_LOOKUP, NO_REQUEST_ID])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_malformed_request_is_reported_to_the_session_as_a_corrupt_command(
    make: Make, fast_path: bool, corrupt: bytes, whole: bool
) -> None:
    """The lookup worker refuses it; the other request of its envelope is answered before."""
    setup = make(fast_path=fast_path)
    assert is_plainly_lookup(corrupt) is (corrupt is not NOT_A_LOOKUP)
    for request in (lookup(request_id=1).SerializeToString(), corrupt):
        setup.mode.forward_request(request)
    setup.mode.send_batch()
    await trio.testing.wait_all_tasks_blocked()
    [sent] = setup.sent
    with structlog.testing.capture_logs() as logs:
        if whole:
            sent.send(EnvelopeResponse(error=EnvelopeResponse.INVALID_REQUEST))
        else:
            refused = RefusedRequest(index=1, error=EnvelopeResponse.UNSUPPORTED_VERSION)
            sent.send(EnvelopeResponse(frames=sent.frame(0), answered=[0], refused=[refused]))
            assert await setup.receive_ids(1) == [(1, 0)]
        await setup.nothing_left()
    assert [type(error) for error in setup.corrupt] == [CommandCorrupt]
    assert logs == [], "it is for the session to say"


@pytest.mark.parametrize("corrupt", [TORN, NOT_A_LOOKUP, NO_REQUEST_ID])
async def test_nor_is_it_one_above_the_number(make: Make, corrupt: bytes) -> None:
    setup = make(max_concurrent_lookups_per_connection=1)
    await setup.forward(lookup())
    with pytest.raises(CommandCorrupt):
        setup.mode.forward_request(corrupt)
    assert setup.mode.in_flight.count == 1


# ---- bounds


async def test_a_session_without_room_is_told_when_answers_have_made_some(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_mode, "BYTES_MAX", 100)
    setup = make()
    assert setup.mode.has_room
    await setup.forward(lookup("t" * 60, 1), lookup("t" * 60, 2), lookup("t" * 60, 3))
    assert not setup.mode.has_room
    [sent] = setup.sent
    sent.answer(2, more=True)
    await setup.receive()
    assert not setup.mode.has_room
    assert True not in setup.told
    sent.answer(1, more=True)
    await setup.receive()
    await trio.testing.wait_all_tasks_blocked()
    assert setup.mode.has_room
    assert setup.told[-1:] == [True]
    sent.answer(0)
    await setup.receive()
    await setup.nothing_left()


LARGE = pytest.mark.parametrize("command", [topics(), SCHEMA])
"""What may have a large answer."""

ONE_ANSWER = {"max_topic_lists_bytes": 1024, "max_broker_frame_bytes": 1024}
"""Room for one large answer at a time."""


@LARGE
async def test_a_large_answer_counts_beforehand(
    make: Make, monkeypatch: pytest.MonkeyPatch, command: BaseCommand
) -> None:
    """In the very moment: a chunk may bring hundreds of these requests."""
    monkeypatch.setattr(lookup_mode, "BYTES_MAX", lookup_mode.LARGE_ANSWER_BYTES)
    setup = make()
    setup.mode.forward_parsed_request(command, command.SerializeToString())
    assert not setup.mode.has_room
    await trio.testing.wait_all_tasks_blocked()
    setup.sent[0].answer(0)
    await setup.receive()
    await setup.nothing_left()
    assert setup.mode.has_room
    assert setup.told[-1:] == [True]


async def test_of_one_client_only_two_requests_wait_for_room(make: Make) -> None:
    """All others stay unread, however many it writes: a client that waits costs a task."""
    setup = make(**ONE_ANSWER)
    others = await setup.workers.room.reserve("another client")
    command = topics()
    for waiting in range(2):
        assert setup.mode.has_room, waiting
        setup.mode.forward_parsed_request(command, command.SerializeToString())
    assert not setup.mode.has_room
    others.release()
    await trio.testing.wait_all_tasks_blocked()
    assert setup.mode.has_room
    for _ in range(2):
        setup.sent[-1].answer(0)
        await trio.testing.wait_all_tasks_blocked()
    await setup.receive(2)
    await setup.nothing_left()
    assert setup.workers.room.free_bytes == 1024


class Gate:
    """A client that takes what is sent to it only when told."""

    def __init__(self, setup: Setup) -> None:
        self.opened = trio.Event()
        send_all = setup.transport.stream.send_all

        async def slowly(data: bytes) -> None:
            await self.opened.wait()
            await send_all(data)

        setup.transport.stream.send_all = slowly  # type: ignore[method-assign]


@LARGE
async def test_a_large_answer_keeps_its_room_until_it_has_left(make: Make, command: BaseCommand) -> None:
    setup = make(max_topic_lists_bytes=4 << 20, max_broker_frame_bytes=2 << 20)
    gate = Gate(setup)
    await setup.forward(command)
    room = setup.workers.room
    assert room.free_bytes == 2 << 20
    setup.sent[0].answer(0, padding=1 << 20)
    await trio.testing.wait_all_tasks_blocked()
    assert 0 < (3 << 20) - room.free_bytes < 100, "now that it is there, it takes what it needs"
    gate.opened.set()
    await setup.receive()
    await setup.nothing_left()
    assert room.free_bytes == 4 << 20


async def test_a_small_answer_behind_a_large_one_does_not_keep_the_room(make: Make) -> None:
    setup = make(max_topic_lists_bytes=4 << 20, max_broker_frame_bytes=2 << 20)
    gate = Gate(setup)
    await setup.forward(topics(1))
    setup.sent[0].answer(0, padding=1 << 20)
    await trio.testing.wait_all_tasks_blocked()
    await setup.forward(lookup(request_id=2))
    setup.sent[1].answer(0, padding=1 << 20)
    await trio.testing.wait_all_tasks_blocked()
    gate.opened.set()
    gate.opened = trio.Event()
    await setup.receive()
    await trio.testing.wait_all_tasks_blocked()
    assert setup.workers.room.free_bytes == 4 << 20
    gate.opened.set()
    await setup.receive()
    await setup.nothing_left()


@LARGE
async def test_a_client_that_does_not_read_a_large_answer_is_closed_once_others_wait(
    make: Make, autojump_clock: trio.testing.MockClock, command: BaseCommand
) -> None:
    """Security: a client that asks and does not read must not keep others from their answers."""
    setup = make(**ONE_ANSWER, lookup_timeout_ms=1000)
    setup.transport._write_timeout_s = 60
    Gate(setup)
    await setup.forward(command)
    setup.sent[0].answer(0, padding=1 << 20)
    await trio.sleep(30)
    assert setup.ends == [], "no other session wants its room"
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(setup.workers.room.reserve, "another client")
            await trio.sleep(0.5)
            assert [type(error) for error in setup.ends] == [ClientSlow]
    assert [(entry["client"], entry["limit"]) for entry in logs] == [(CLIENT, "limits.max_topic_lists_bytes")]


async def test_a_client_that_reads_a_large_answer_in_time_is_not_closed(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(**ONE_ANSWER, lookup_timeout_ms=3000)
    gate = Gate(setup)
    await setup.forward(topics())
    setup.sent[0].answer(0, padding=1 << 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.workers.room.reserve, "another client")
        await trio.sleep(1.5)
        assert setup.ends == []
        gate.opened.set()
        await setup.receive()
    await setup.nothing_left()


async def test_a_session_that_ends_while_it_waits_for_room_leaves_no_reservation(nursery: trio.Nursery) -> None:
    async with trio.open_nursery() as session:
        setup = Setup(session, trio.testing.memory_stream_pair(), **ONE_ANSWER)
        others = setup.workers.room.try_reserve("another client")
        assert others is not None
        await setup.forward(topics(1), topics(2))
        assert setup.workers.room.has_waiters
        setup.mode.close()
        session.cancel_scope.cancel()
    assert not setup.workers.room.has_waiters
    assert (setup.mode.in_flight.count, setup.mode._kept_bytes) == (0, 0)
    others.release()
    assert setup.workers.room.free_bytes == 1024


async def test_room_is_shared_by_principal_and_without_one_by_address(make: Make) -> None:
    for identity, owner in ((IDENTITY, "principal alice"), (ANONYMOUS, "address 192.0.2.7")):
        setup = make(max_topic_lists_bytes=3 * 1024, max_broker_frame_bytes=1024)
        setup.mode.set_identity(identity)
        await setup.forward(topics())
        assert list(setup.workers.room._held) == [owner]


async def test_clients_of_the_anonymous_role_reserve_room_by_address(make: Make) -> None:
    """All anonymous clients share the role: one of them must not take the room of all."""
    setup = make(max_topic_lists_bytes=3 * 1024, max_broker_frame_bytes=1024)
    authentication = msgspec.structs.replace(setup.workers.config.authentication, anonymous_role=IDENTITY.role)
    setup.workers.config = msgspec.structs.replace(setup.workers.config, authentication=authentication)
    setup.mode.set_identity(IDENTITY)
    await setup.forward(topics())
    assert list(setup.workers.room._held) == ["address 192.0.2.7"]


async def test_room_that_was_lent_to_a_task_that_never_began_comes_back(nursery: trio.Nursery) -> None:
    """The session ended in the same moment."""

    class NoTasks:
        def start_soon(self, *_: object) -> None: ...

    setup = Setup(nursery, trio.testing.memory_stream_pair(), **ONE_ANSWER)
    setup.mode._tasks = NoTasks()
    setup.mode.forward_parsed_request(topics(), topics().SerializeToString())
    assert setup.workers.room.free_bytes == 0
    setup.mode.close()
    assert setup.workers.room.free_bytes == 1024


async def test_too_many_are_answered_so_and_the_others_go_on(make: Make) -> None:
    setup = make(max_concurrent_lookups_per_connection=2)
    await setup.forward(*(lookup(f"t{number}", number) for number in range(4)))
    assert await setup.receive_ids(2) == [(2, ServerError.TooManyRequests), (3, ServerError.TooManyRequests)]
    [sent] = setup.sent
    assert sent.topics == ["t0", "t1"]
    assert setup.metrics.refused_commands.labels(reason="too_many_requests")._value.get() == 2
    sent.answer(0, 1)
    assert await setup.receive_ids(2) == [(0, 0), (1, 0)]
    await setup.nothing_left()


@LARGE
async def test_requests_with_large_answers_are_sent_separately_and_wait_for_room(
    make: Make, monkeypatch: pytest.MonkeyPatch, command: BaseCommand
) -> None:
    monkeypatch.setattr(lookup_mode, "LARGE_ANSWER_BYTES", 0)
    setup = make(max_topic_lists_bytes=3 * 1024, max_broker_frame_bytes=1024)
    await setup.forward(command, lookup(request_id=2), command, command)
    assert sorted(len(sent.requests) for sent in setup.sent) == [1, 1, 1]
    large = [sent for sent in setup.sent if sent.topics == [""]]
    assert len(large) == 2, "the third one waits: the last room is for others"
    assert setup.mode.in_flight.count == 4
    large[0].answer(0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(setup.sent) == 4
    for sent in setup.sent:
        if sent is not large[0]:
            sent.answer(0)
    await setup.receive(4)
    await setup.nothing_left()
    assert setup.workers.room.free_bytes == 3 * 1024


@LARGE
async def test_a_request_that_waits_too_long_for_room_is_refused_with_too_many_requests(
    make: Make, autojump_clock: trio.testing.MockClock, command: BaseCommand
) -> None:
    setup = make(**ONE_ANSWER, lookup_timeout_ms=4000)
    others = await setup.workers.room.reserve("another client")
    with structlog.testing.capture_logs() as logs:
        await setup.forward(command)
        [answer] = await setup.receive()
    told = answer.error if answer.type == BaseCommand.ERROR else answer.get_schema_response
    assert told.request_id == 7
    assert ServerError.TooManyRequests in {answer.error.error, answer.get_schema_response.error_code}
    assert [entry["reason"] for entry in logs] == ["limits.max_topic_lists_bytes"]
    assert setup.metrics.refused_commands.labels(reason="too_many_requests")._value.get() == 1
    assert trio.current_time() == pytest.approx(5.0)
    assert setup.sent == []
    others.release()
    await setup.nothing_left()
    assert setup.workers.room.free_bytes == 1024


async def test_a_large_answer_counts_until_it_has_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes its answers slowly is read no further."""
    monkeypatch.setattr(lookup_mode, "BYTES_MAX", 100_000)
    setup = make()
    gate = trio.Event()
    send_all = setup.transport.stream.send_all

    async def slowly(data: bytes) -> None:
        await gate.wait()
        await send_all(data)

    setup.transport.stream.send_all = slowly  # type: ignore[method-assign]
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    assert setup.mode.has_room
    setup.sent[0].answer(0, padding=1 << 20, more=True)
    await trio.testing.wait_all_tasks_blocked()
    assert not setup.mode.has_room
    setup.sent[0].answer(1)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.mode._kept_bytes == setup.mode.in_flight.count == 0, "all is answered, but has not left"
    assert True not in setup.told
    gate.set()
    large, _small = await setup.receive(2)
    assert len(large.lookup_topic_response.broker_service_url) > 1 << 20
    await setup.nothing_left()
    assert setup.told[-1:] == [True]


async def test_answers_leave_in_order_behind_what_waits(make: Make) -> None:
    setup = make()
    gate = trio.Event()
    send_all = setup.transport.stream.send_all

    async def slowly(data: bytes) -> None:
        await gate.wait()
        await send_all(data)

    setup.transport.stream.send_all = slowly  # type: ignore[method-assign]
    await setup.forward(*(lookup(request_id=number) for number in range(6)))
    [sent] = setup.sent
    sent.answer(0, padding=1 << 20, more=True)  # more than a socket takes at once
    sent.answer(1, more=True)
    await trio.testing.wait_all_tasks_blocked()
    sent.answer(2, 3, padding=100, more=True)
    await trio.testing.wait_all_tasks_blocked()
    sent.answer(4, more=True)
    gate.set()
    heard = [answer.lookup_topic_response.request_id for answer in await setup.receive(5)]
    sent.answer(5)
    heard += [answer.lookup_topic_response.request_id for answer in await setup.receive()]
    assert heard == list(range(6))
    await setup.nothing_left()


async def test_a_client_that_does_not_take_its_answers(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    setup = make()

    async def never(_data: bytes) -> None:
        await trio.sleep_forever()

    setup.transport.stream.send_all = never  # type: ignore[method-assign]
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    setup.sent[0].answer(0, padding=1 << 20, more=True)
    await trio.sleep(6)
    assert [type(error) for error in setup.ends] == [ClientSlow]
    setup.sent[0].answer(1)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.mode.in_flight.count == 0
    assert setup.mode._kept_bytes == 0


async def test_a_client_that_has_gone(make: Make) -> None:
    setup = make()
    await setup.forward(lookup(request_id=1), lookup(request_id=2))
    await setup.client.stream.aclose()
    setup.sent[0].answer(0, more=True)
    await trio.testing.wait_all_tasks_blocked()
    setup.sent[0].answer(1)
    await trio.testing.wait_all_tasks_blocked()
    assert (setup.mode.in_flight.count, setup.mode._kept_bytes) == (0, 0)


# ---- the end of the session


@both_ways
@pytest.mark.parametrize(
    "late",
    [
        lambda sent: sent.answer(0, 1),
        lambda sent: sent.answer(1, more=True),
        lambda sent: sent.refuse(Status.TOO_MANY_REQUESTS),
        SentEnvelope.lose,
        lambda sent: sent.send(b"\xff\xff"),
    ],
)
async def test_answers_after_the_session_has_ended_are_dropped(
    nursery: trio.Nursery, fast_path: bool, late: Callable[[SentEnvelope], None]
) -> None:
    async with trio.open_nursery() as session:
        setup = Setup(session, trio.testing.memory_stream_pair(), fast_path=fast_path)
        setup.workers.nursery = nursery
        await setup.forward(lookup(request_id=1), lookup(request_id=2))
        setup.mode.close()
        session.cancel_scope.cancel()
    late(setup.sent[0])
    await trio.testing.wait_all_tasks_blocked()
    assert len(setup.sent) == 1, "no request is sent for a client that has gone"
    with trio.move_on_after(0.01):
        pytest.fail(f"{await setup.client.receive()}")


@pytest.mark.parametrize("after", range(4))
async def test_counters_are_right_when_the_session_ends(nursery: trio.Nursery, after: int) -> None:
    async with trio.open_nursery() as session:
        setup = Setup(session, trio.testing.lockstep_stream_pair(), fast_path=False)
        setup.workers.nursery = nursery
        await setup.forward(lookup(request_id=1), lookup(request_id=2))
        await setup.forward(topics(3))
        if after > 0:
            setup.sent[0].answer(0, more=True)
        if after > 1:
            await trio.testing.wait_all_tasks_blocked()  # it waits for its client
        if after > 2:
            setup.sent[0].lose()
        setup.mode.close()
        session.cancel_scope.cancel()
        nursery.start_soon(setup.client.read_all)
    assert (setup.mode.in_flight.count, setup.mode._kept_bytes) == (0, 0)
    assert setup.workers.room.free_bytes == setup.workers.config.limits.max_topic_lists_bytes


# ---- the process's bound in bytes


async def test_requests_are_bounded_in_bytes_over_all_clients(make: Make) -> None:
    setup = make(max_lookup_bytes=100 * 1024)
    requests = [lookup(f"{number}" + "x" * (15 * 1024), request_id=number) for number in range(4)]
    await setup.forward(*requests)
    (refused,) = await setup.receive()
    assert refused.lookup_topic_response.request_id == 3
    assert refused.lookup_topic_response.error == ServerError.TooManyRequests
    setup.sent[0].answer(0, 1, 2)
    await setup.receive(3)
    await setup.nothing_left()


@LARGE
async def test_requests_with_large_answers_count_there_too(make: Make, command: BaseCommand) -> None:
    setup = make(max_lookup_bytes=1024)
    await setup.forward(command)
    await setup.receive()
    assert setup.sent == []
    await setup.nothing_left()


async def test_a_client_that_leaves_releases_the_memory_of_its_requests_in_flight(make: Make) -> None:
    setup = make()
    await setup.forward(lookup(request_id=1), topics(2))
    assert setup.workers.budget.used_bytes > 0
    setup.mode.close()
    assert (setup.workers.budget.used_bytes, setup.workers.budget._by_owner) == (0, {})


async def test_memory_of_requests_sent_before_authentication_is_released_once(make: Make) -> None:
    setup = make()
    await setup.forward(lookup(request_id=1))
    setup.mode.set_identity(ANONYMOUS)
    await setup.forward(lookup(request_id=2))
    assert len(setup.workers.budget._by_owner) == 1
    setup.sent[0].answer(0)
    setup.sent[1].answer(0)
    await setup.receive(2)
    await setup.nothing_left()


async def test_a_client_that_takes_no_answers_is_closed_once_others_need_the_memory(make: Make) -> None:
    setup = make(max_lookup_bytes=4 << 20)
    gate = Gate(setup)
    await setup.forward(lookup(request_id=1))
    await setup.forward(lookup(request_id=2))
    setup.sent[0].answer(0, padding=1500 << 10)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.ends == []
    with structlog.testing.capture_logs() as logs:
        setup.sent[1].answer(0, padding=1500 << 10)
        await trio.testing.wait_all_tasks_blocked()
    assert [type(end) for end in setup.ends] == [ClientSlow]
    assert [entry["limit"] for entry in logs] == ["limits.max_lookup_bytes"]
    setup.mode.close()
    assert setup.workers.budget.used_bytes == 0
    await setup.client.stream.aclose()
    gate.opened.set()


async def test_a_client_with_much_under_way_is_read_no_more_where_memory_is_short(make: Make) -> None:
    setup = make(max_lookup_bytes=200 * 1024)
    await setup.forward(lookup("x" * (70 * 1024), request_id=1))
    assert setup.mode.has_room
    assert setup.workers.budget.reserve_bytes("carol", 60 * 1024)
    assert not setup.mode.has_room
    setup.sent[0].answer(0)
    await setup.receive()
    assert setup.mode.has_room
    setup.workers.budget.release_bytes("carol", 60 * 1024)
    await setup.nothing_left()
