"""lookup.service: Envelopes (KIP-590), row by row; targets; profile; reload."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from eager_calls import answer_at_once, carry_out
from google.protobuf.message import DecodeError
from lookup_fakes import (
    CONNECT,
    FakeAuth,
    FakeBroker,
    Network,
    connect_to,
    lookup,
    lookup_response,
    make_config,
    redirect_to,
)
from prometheus_client import CollectorRegistry

from lookup.connections import principals
from lookup.requests.envelope_reply import PART_BYTES_MAX
from lookup.requests.executor import LookupExecutor
from lookup.service import LookupService
from proto import commands
from proto.envelope import ENVELOPE_VERSION
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.roles import MAY_CALL, Role
from proto.rpc_frames import Call, Reply, RpcDecoder, encode_call
from proto.rpc_pb2 import (
    BrokerCredentialsRequest,
    BrokerProfileRequest,
    BrokerProfileResponse,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    Principal,
    ReportOutlierRequest,
    ResolveTargetRequest,
    ResolveTargetResponse,
    Status,
)
from proto.sealed_principal import seal
from proxy.common.errors import ConfigError
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcRefused, RpcServer
from proxy.runtime.rpc.writer import BatchedWriter

KEY = b"k" * 32
FORWARDER = Caller(Role.FORWARDER, 1)
NOW_S = 1_700_000_000.0
ALICE = Principal(type="User", name="alice", method="token")
BOB = Principal(type="User", name="bob", method="token")


@dataclass
class Embedded:
    """What came for one request."""

    index: int
    response: bytes = b""
    """A BaseCommand."""
    error: int = EnvelopeResponse.NONE
    error_message: str = ""


def embedded_in(part: EnvelopeResponse) -> list[Embedded]:
    """All that one part has."""
    decoder = FrameDecoder(max_frame_bytes=1 << 24)
    decoder.receive_data(part.frames)
    found = []
    for index in part.answered:
        frame = decoder.next_frame()
        assert frame is not None
        found.append(Embedded(index, frame.command))
    assert decoder.take_unread_data() == b""
    return [*found, *(Embedded(one.index, b"", one.error, one.error_message) for one in part.refused)]


class EnvelopeReply:
    """What is answered to one Envelope, part by part."""

    def __init__(self) -> None:
        self.parts: list[tuple[EnvelopeResponse, bool]] = []
        self._over = trio.Event()

    def __call__(self, part: bytes, more: bool) -> None:
        assert not self._over.is_set(), "nothing follows the last part"
        self.parts.append((EnvelopeResponse.FromString(part), more))
        if not more:
            self._over.set()

    async def wait_until_sent(self) -> None:
        await trio.lowlevel.checkpoint()

    def close_connection(self, reason: str) -> None:
        pytest.fail(reason)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def all(self) -> list[Embedded]:
        """All answers, by their numbers."""
        await self._over.wait()
        for part, _ in self.parts:
            assert part.error == EnvelopeResponse.NONE, part.error_message
        return sorted((one for part, _ in self.parts for one in embedded_in(part)), key=lambda one: one.index)


class Served:
    """A lookup worker's service over a fake network, spoken to as a forwarder does."""

    def __init__(self, nursery: trio.Nursery, **tables: dict[str, Any]) -> None:
        brokers = {"service_url": "pulsar://b0:6650", "allowed_addresses": ["10.0.0.0/8"], **tables.get("brokers", {})}
        tables["brokers"] = brokers
        tables.setdefault("authentication", {"enabled": True})
        self.tables = tables
        self.registry = CollectorRegistry()
        no_reactor: Any = None
        context = WorkerContext(
            Role.LOOKUP,
            0,
            make_config(**tables),
            KEY,
            Descriptors(channel=-1, liveness=-1),
            self.registry,
            nursery,
            no_reactor,
        )
        self.service = LookupService(context)
        self._started = False
        nursery.start_soon(self._find_brokers)

    async def start(self) -> None:
        """All that the service does of its own."""
        self._started = True
        await self.service.start()

    async def _find_brokers(self) -> None:
        """Where a test does not start the service: brokers are found, but not looked at."""
        if not self._started:
            await self.service._brokers.discovery.run()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def send(self, *requests: BaseCommand | bytes, **changes: Any) -> EnvelopeReply:
        """An Envelope, as a forwarder sends it."""
        fields: dict[str, Any] = {
            "version": ENVELOPE_VERSION,
            "requests": [one if isinstance(one, bytes) else one.SerializeToString() for one in requests],
            "principal_type": "User",
            "principal_name": "alice",
            "sealed_principal": seal(ALICE, KEY),
            "client_address": "192.0.2.7:4000",
        }
        fields.update(changes)
        reply = EnvelopeReply()
        handler: Any = self.service.handlers()[Method.ENVELOPE]
        handler.handle(EnvelopeRequest(**fields).SerializeToString(), FORWARDER, reply)
        return reply

    async def answer(self, request: BaseCommand | None = None, **changes: Any) -> BaseCommand:
        """The answer to one request."""
        [embedded] = await self.send(lookup() if request is None else request, **changes).all()
        assert embedded.error == EnvelopeResponse.NONE, embedded.error_message
        return BaseCommand.FromString(embedded.response)

    def refusal(self, **changes: Any) -> int:
        """The error of an Envelope as a whole, which comes at once."""
        [(part, more)] = self.send(lookup(), **changes).parts
        assert not more
        assert not embedded_in(part)
        assert part.error_message
        assert self.value("pulsar_proxy_envelope_errors_total", error=EnvelopeResponse.Error.Name(part.error)) == 1
        return part.error

    @staticmethod
    def _resolve_request(target: str, **changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "target": target,
            "client_address": "192.0.2.7:4000",
            "principal_name": "alice",
            "sealed_principal": seal(ALICE, KEY),
            **changes,
        }
        return ResolveTargetRequest(**fields).SerializeToString()

    async def resolve(self, target: str, **changes: Any) -> ResolveTargetResponse:
        handler: Any = self.service.handlers()[Method.RESOLVE_TARGET]
        data = await carry_out(handler, self._resolve_request(target, **changes), FORWARDER)
        return ResolveTargetResponse.FromString(data)

    def resolve_at_once(self, target: str, **changes: Any) -> ResolveTargetResponse | None:
        """The answer that comes without a task; None where it needs one."""
        handler: Any = self.service.handlers()[Method.RESOLVE_TARGET]
        data = answer_at_once(handler, self._resolve_request(target, **changes), FORWARDER)
        return None if data is None else ResolveTargetResponse.FromString(data)

    async def profile(self) -> BrokerProfileResponse:
        handler: Any = self.service.handlers()[Method.BROKER_PROFILE]
        return BrokerProfileResponse.FromString(
            await carry_out(handler, BrokerProfileRequest().SerializeToString(), FORWARDER)
        )

    async def configure(self, **tables: dict[str, Any]) -> None:
        await self.service.configure(make_config(**{**self.tables, **tables}))


Serve = Callable[..., Served]


@pytest.fixture
def broker(network: Network) -> FakeBroker:
    return network.add("b0", "10.0.0.1", FakeBroker(connect_to("pulsar://b0:6650")))


@pytest.fixture
def serve(network: Network, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def never(_path: str, **_: Any) -> Any:
        return trio.sleep_forever

    monkeypatch.setattr("proxy.runtime.process.worker.unix_connector", never)
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    return lambda **tables: Served(nursery, **tables)


# ---- Envelope, row by row


@pytest.mark.conforms("kip-590.1", "kip-590.17")
async def test_a_sealed_principal_is_answered_for(serve: Serve, broker: FakeBroker) -> None:
    served = serve()
    answer = await served.answer()
    assert answer.lookup_topic_response.response == CONNECT
    assert answer.lookup_topic_response.request_id == 7
    assert broker.requests[0][0] == "alice"


@pytest.mark.conforms("kip-590.18")
@pytest.mark.parametrize("credentials", [None, {"method": "token", "file": "x"}], ids=["without", "with"])
async def test_no_client_is_authenticated_again(
    serve: Serve, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, credentials: dict[str, str] | None
) -> None:
    """An auth worker is asked for nothing but the proxy's own credentials, whatever a client's may be worth by now."""
    auth = FakeAuth()
    monkeypatch.setattr(WorkerContext, "new_rpc_pool", lambda *_: auth)
    served = serve(brokers={} if credentials is None else {"credentials": credentials})
    for token in ("", "a token that is none"):
        answer = await served.answer(original_auth_method="token" if token else "", original_auth_data=token)
        assert answer.lookup_topic_response.response == CONNECT
    assert [principal for principal, _ in broker.requests] == ["alice", "alice"], "the sealed principal counts"
    assert {type(call) for call in auth.calls} == (set() if credentials is None else {BrokerCredentialsRequest})


async def test_forwarded_credentials_reach_the_broker_behind_the_sealed_principal(
    serve: Serve, broker: FakeBroker
) -> None:
    served = serve()
    with structlog.testing.capture_logs() as logs:
        for token in ("first-s3cret", "second-s3cret", "first-s3cret"):
            await served.answer(original_auth_method="token", original_auth_data=token)
        await served.answer()
    assert [
        (connect.original_principal, connect.original_auth_method, connect.original_auth_data)
        for connect in broker.connects
    ] == [("alice", "token", "first-s3cret"), ("alice", "token", "second-s3cret"), ("alice", "", "")]
    assert [principal for principal, _ in broker.requests] == ["alice"] * 4
    assert "s3cret" not in repr(logs)


async def test_forwarded_credentials_beyond_a_principals_share_of_memory_are_refused(
    serve: Serve, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: a captured forwarder does not fill a lookup worker by credentials, which connections keep."""
    monkeypatch.setattr(principals, "CREDENTIALS_BYTES_MAX", 4000)
    served = serve()
    codes = []
    with structlog.testing.capture_logs() as logs:
        for letter, principal in (("a", ALICE), ("b", ALICE), ("a", ALICE), ("b", BOB)):
            sealed = {"principal_name": principal.name, "sealed_principal": seal(principal, KEY)}
            answer = await served.answer(original_auth_method="token", original_auth_data=letter * 1500, **sealed)
            codes.append(answer.lookup_topic_response.error)
    assert codes == [0, ServerError.TooManyRequests, 0, ServerError.TooManyRequests]
    assert [entry["principal"] for entry in logs if "no memory left" in entry["event"]] == ["alice", "bob"]
    small = await served.answer(original_auth_method="token", original_auth_data="b", **sealed)
    assert small.lookup_topic_response.response == CONNECT
    assert [connect.original_auth_data[:1] for connect in broker.connects] == ["a", "b"]


async def test_the_end_of_forwarded_credentials_is_the_sealed_principals(serve: Serve, broker: FakeBroker) -> None:
    """A connection for lookups ends with the credentials that it was opened with."""
    served = serve()
    end_unix_ms = int(time.time() * 1000) + 60_000
    principal = Principal(type="User", name="alice", method="token", expires_at_unix_ms=end_unix_ms)
    await served.answer(
        original_auth_method="token", original_auth_data="s3cret", sealed_principal=seal(principal, KEY)
    )
    assert [asker.expires_at_unix_ms for _, asker in served.service._pool._slots] == [end_unix_ms]
    assert len(broker.connects) == 1


async def test_credentials_do_not_replace_a_principal(serve: Serve, broker: FakeBroker) -> None:
    """Security: anyone who forwards credentials has to show the seal, like any other caller."""
    served = serve()
    refused = served.refusal(
        original_auth_method="token", original_auth_data="s3cret", sealed_principal=b"", principal_name="admin"
    )
    assert refused == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE
    assert broker.connects == []


async def test_a_principal_behind_a_proxy_is_answered_for(serve: Serve, broker: FakeBroker) -> None:
    behind = Principal(type="User", name="alice", method="token", proxy="proxy-a")
    await serve().answer(sealed_principal=seal(behind, KEY))
    assert broker.requests[0][0] == "alice"


@pytest.mark.conforms("kip-590.22", "kip-590.32")
@pytest.mark.parametrize("sealed", [seal(ALICE, KEY), b"forged"], ids=["sealed", "forged"])
@pytest.mark.parametrize("role", sorted(set(Role) - {Role.FORWARDER}))
async def test_a_role_without_cluster_action_is_told_so_in_the_envelopes_words(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, role: Role, sealed: bytes
) -> None:
    """Security: KIP-590's right to ClusterAction is a forwarder's alone, whatever principal another role can show: it
    is not even looked at.
    """
    served = serve()
    ours, theirs = trio.testing.memory_stream_pair()
    server = RpcServer(served.service.handlers(), max_frame_bytes=1 << 20)
    nursery.start_soon(server.serve_connection, theirs, Caller(role, 1))
    request = EnvelopeRequest(
        version=ENVELOPE_VERSION,
        requests=[lookup().SerializeToString()],
        principal_type="User",
        principal_name="alice",
        sealed_principal=sealed,
        client_address="192.0.2.7:4000",
    )
    await ours.send_all(encode_call(Call(1, Method.ENVELOPE, 1000, request.SerializeToString())))
    decoder = RpcDecoder(max_frame_bytes=1 << 20)
    while (reply := decoder.next_frame()) is None:
        decoder.receive_data(await ours.receive_some(4096))
    assert isinstance(reply, Reply)
    assert (reply.status, reply.has_more) == (Status.OK, False)
    assert EnvelopeResponse.FromString(reply.response).error == EnvelopeResponse.CLUSTER_AUTHORIZATION_FAILED
    assert broker.connects == []
    await ours.aclose()


@pytest.mark.conforms("kip-590.20")
def test_the_errors_are_kafkas() -> None:
    """KIP-590 takes them from Kafka's protocol, names and numbers."""
    assert dict(EnvelopeResponse.Error.items()) == {
        "NONE": 0,
        "CLUSTER_AUTHORIZATION_FAILED": 31,
        "UNSUPPORTED_VERSION": 35,
        "INVALID_REQUEST": 42,
        "PRINCIPAL_DESERIALIZATION_FAILURE": 97,
    }


@pytest.mark.conforms("kip-590.24")
@pytest.mark.parametrize("address", ["", "rubbish", "192.0.2.7", "192.0.2.7:x", "a b:1"])
async def test_a_bad_client_address(serve: Serve, broker: FakeBroker, address: str) -> None:
    assert serve().refusal(client_address=address) == EnvelopeResponse.INVALID_REQUEST
    assert broker.requests == []


async def test_an_ipv6_client_address(serve: Serve, broker: FakeBroker) -> None:
    await serve().answer(client_address="[2001:db8::1]:4000")


@pytest.mark.conforms("kip-590.23")
@pytest.mark.parametrize(
    "sealed",
    [
        b"",
        b"\xff\xff\xff",
        ALICE.SerializeToString(),
        seal(ALICE, b"x" * 32),
        seal(ALICE, KEY)[:-1] + b"\x00",
    ],
)
async def test_unsealed_malformed_or_forged(serve: Serve, broker: FakeBroker, sealed: bytes) -> None:
    """Security: a forwarder cannot mint a principal."""
    refused = serve().refusal(sealed_principal=sealed)
    assert refused == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE
    assert broker.connects == []


@pytest.mark.conforms("kip-590.23")
@pytest.mark.parametrize(("expires_at_ms", "accepted"), [(-1, False), (0, False), (1, True)])
async def test_expiry(serve: Serve, broker: FakeBroker, expires_at_ms: int, accepted: bool) -> None:
    principal = Principal(
        type="User", name="alice", method="token", expires_at_unix_ms=int(NOW_S * 1000) + expires_at_ms
    )
    served = serve()
    if accepted:
        await served.answer(sealed_principal=seal(principal, KEY))
    else:
        refused = served.refusal(sealed_principal=seal(principal, KEY))
        assert refused == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE
        assert broker.connects == []


OBSERVES = {"session": {"enforcement": "observe"}}
ONE_OBSERVES = {"listener": [{}, {"session_enforcement": "observe"}]}
NONE_OBSERVES = {**OBSERVES, "listener": [{"session_enforcement": "enforce"}]}


@pytest.mark.parametrize("tables", [OBSERVES, ONE_OBSERVES])
async def test_where_a_listener_observes_ends_an_expired_principal_is_served(
    serve: Serve, broker: FakeBroker, tables: dict[str, Any]
) -> None:
    """Until all enforce them again; a relay needs one that holds in any case."""
    expired = Principal(type="User", name="alice", method="token", expires_at_unix_ms=int(NOW_S * 1000) - 1)
    sealed = seal(expired, KEY)
    served = serve(**tables)
    await served.answer(sealed_principal=sealed)
    with pytest.raises(RpcRefused):
        await served.resolve("pulsar://b0:6650", sealed_principal=sealed)
    await served.configure(**NONE_OBSERVES)
    assert served.refusal(sealed_principal=sealed) == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


@pytest.mark.parametrize("claimed", [{"principal_name": "admin"}, {"principal_type": "Group"}, {"principal_name": ""}])
async def test_the_name_must_be_the_one_under_the_seal(
    serve: Serve, broker: FakeBroker, claimed: dict[str, str]
) -> None:
    refused = serve().refusal(**claimed)
    assert refused == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE
    assert broker.connects == []


async def test_the_seal_is_not_looked_at_only_where_authentication_is_off(serve: Serve, broker: FakeBroker) -> None:
    served = serve(authentication={"enabled": False})
    await served.answer(sealed_principal=b"", principal_name="", principal_type="")
    assert broker.requests[0][0] == ""


async def test_without_authentication_no_claimed_name_reaches_the_broker(serve: Serve, broker: FakeBroker) -> None:
    served = serve(authentication={"enabled": False})
    await served.answer(sealed_principal=b"", principal_name="admin")
    assert broker.requests[0][0] == ""
    assert not broker.connects[0].HasField("original_principal")


async def test_a_version_newer_than_ours(serve: Serve, broker: FakeBroker) -> None:
    """An upgrade in the wrong order must not be read as what it is not."""
    assert serve().refusal(version=ENVELOPE_VERSION + 1) == EnvelopeResponse.UNSUPPORTED_VERSION
    assert broker.connects == []


async def test_the_time_of_the_pools_answers_to_challenges_is_measured(serve: Serve, broker: FakeBroker) -> None:
    """By the pool of a new configuration, too."""
    served = serve()
    for took_s in (0.5, 0.25):
        served.service._pool.observe_reauthentication(took_s)
        await served.configure(limits={"keep_alive_interval_ms": 7_000})
    assert served.value("pulsar_proxy_broker_reauthentication_seconds_sum") == 0.75


async def test_a_version_older_than_ours(serve: Serve, broker: FakeBroker) -> None:
    await serve().answer(version=0)


async def test_an_envelope_without_a_request(serve: Serve) -> None:
    assert serve().refusal(requests=[]) == EnvelopeResponse.INVALID_REQUEST


async def test_bytes_that_are_no_envelope(serve: Serve) -> None:
    handler: Any = serve().service.handlers()[Method.ENVELOPE]
    with pytest.raises(DecodeError):
        handler.handle(b"\xff\xff", FORWARDER, EnvelopeReply())


BAD_REQUESTS: list[tuple[BaseCommand | bytes, int]] = [
    (BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 1}), EnvelopeResponse.INVALID_REQUEST),
    (BaseCommand(type=BaseCommand.CONNECT, connect={"client_version": "x"}), EnvelopeResponse.INVALID_REQUEST),
    (BaseCommand(type=BaseCommand.PING), EnvelopeResponse.INVALID_REQUEST),
    (BaseCommand(type=BaseCommand.LOOKUP_RESPONSE), EnvelopeResponse.INVALID_REQUEST),
    (BaseCommand(), EnvelopeResponse.INVALID_REQUEST),
    (b"\xff\xff\xff\xff", EnvelopeResponse.UNSUPPORTED_VERSION),
    (BaseCommand(type=BaseCommand.LOOKUP), EnvelopeResponse.UNSUPPORTED_VERSION),
    (b"\x08\x17\xba\x01\x03\x0a\x01t", EnvelopeResponse.UNSUPPORTED_VERSION),  # no request id
]


@pytest.mark.conforms("kip-590.24", "kip-590.25")
@pytest.mark.parametrize(("bad", "error"), BAD_REQUESTS)
async def test_a_request_that_is_not_accepted(
    serve: Serve, broker: FakeBroker, bad: BaseCommand | bytes, error: int
) -> None:
    served = serve()
    with structlog.testing.capture_logs() as logs:
        [embedded] = await served.send(bad).all()
    assert (embedded.error, embedded.response) == (error, b"")
    assert embedded.error_message
    name = EnvelopeResponse.Error.Name(error)
    assert served.value("pulsar_proxy_envelope_errors_total", error=name) == 1
    assert [(entry["client"], entry["error"]) for entry in logs] == [("192.0.2.7:4000", name)]
    assert broker.connects == []
    assert served.service.status()["lookups_under_way"] == 0


async def test_a_request_that_a_broker_would_hang_up_upon_is_its_senders_own_matter(
    serve: Serve, broker: FakeBroker
) -> None:
    """Security: the connection to the broker is shared."""
    served = serve()
    nothing = BaseCommand(type=BaseCommand.LOOKUP, lookup_topic={"request_id": 2})
    namespace = {"namespace": "none", "request_id": 3}
    topics = BaseCommand(type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace=namespace)
    with structlog.testing.capture_logs() as logs:
        refused = [nothing.SerializePartialToString(), topics.SerializeToString()]
        answers = await served.send(lookup("a", 1), *refused, lookup("b", 4)).all()
    said = [BaseCommand.FromString(one.response) for one in answers]
    assert [one.lookup_topic_response.request_id for one in said] == [1, 2, 0, 4]
    assert [one.lookup_topic_response.response for one in said if one.type != BaseCommand.ERROR] == [1, 2, 1]
    assert (said[1].lookup_topic_response.error, said[1].lookup_topic_response.message) == (
        ServerError.InvalidTopicName,
        "The request has no topic",
    )
    assert (said[2].error.request_id, said[2].error.error) == (3, ServerError.InvalidTopicName)
    assert sorted(request.lookup_topic.topic for _, request in broker.requests) == ["a", "b"]
    count = "pulsar_proxy_invalid_lookup_requests_total"
    assert served.value(count, request="lookup", reason="incomplete") == 1
    assert served.value(count, request="get_topics_of_namespace", reason="namespace") == 1
    warned = [(entry["client"], entry["reason"]) for entry in logs if entry["log_level"] == "warning"]
    assert warned == [("192.0.2.7:4000", "incomplete"), ("192.0.2.7:4000", "namespace")]
    assert served.service.status()["lookups_under_way"] == 0


@pytest.mark.conforms("kip-590.12")
@pytest.mark.parametrize(("bad", "error"), BAD_REQUESTS)
async def test_a_bad_request_in_an_envelope_leaves_the_others_answered(
    serve: Serve, broker: FakeBroker, bad: BaseCommand | bytes, error: int
) -> None:
    answers = await serve().send(lookup("a", 1), bad, lookup("b", 3)).all()
    assert [embedded.index for embedded in answers] == [0, 1, 2]
    assert [embedded.error for embedded in answers] == [EnvelopeResponse.NONE, error, EnvelopeResponse.NONE]
    assert [BaseCommand.FromString(answers[index].response).lookup_topic_response.request_id for index in (0, 2)] == [
        1,
        3,
    ]
    assert sorted(request.lookup_topic.topic for _, request in broker.requests) == ["a", "b"]


# ---- several requests


async def test_requests_of_one_envelope_leave_in_one_go_and_in_order(
    serve: Serve, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    await served.answer()  # so that a connection is open
    pushes: list[BatchedWriter] = []
    push = BatchedWriter.flush

    def spy(self: BatchedWriter) -> None:
        pushes.append(self)
        push(self)

    monkeypatch.setattr(BatchedWriter, "flush", spy)
    reply = served.send(*(lookup(f"t{number}", number) for number in range(50)))
    assert len(pushes) == 1, "each costs a system call"
    await reply.all()
    assert [request.lookup_topic.topic for _, request in broker.requests[1:]] == [f"t{number}" for number in range(50)]


async def test_each_request_is_answered_under_its_own_number_and_id(serve: Serve, broker: FakeBroker) -> None:
    requests = [lookup(f"t{number}", 2**63 + number) for number in range(20)]
    broker.script = lambda request: lookup_response(request, CONNECT, f"pulsar://{request.lookup_topic.topic}:1")
    answers = await serve().send(*requests).all()
    assert [embedded.index for embedded in answers] == list(range(20))
    for number, embedded in enumerate(answers):
        response = BaseCommand.FromString(embedded.response).lookup_topic_response
        assert (response.request_id, response.broker_service_url) == (2**63 + number, f"pulsar://t{number}:1")


async def test_answers_come_back_as_they_come_and_no_slow_one_holds_up_the_others(
    serve: Serve, broker: FakeBroker
) -> None:
    broker.script = lambda _request: None
    served = serve()
    reply = served.send(*(lookup(f"t{number}", number) for number in range(3)))
    await trio.testing.wait_all_tasks_blocked()
    for number in (2, 0, 1):
        [request] = [one for _, one in broker.requests if one.lookup_topic.topic == f"t{number}"]
        await broker.ends[0].send(lookup_response(request, CONNECT, "pulsar://b0:6650"))
        await trio.testing.wait_all_tasks_blocked()
        part, more = reply.parts[-1]
        assert [embedded.index for embedded in embedded_in(part)] == [number]
        assert more is (number != 1)


async def test_answers_of_one_chunk_travel_in_one_part(serve: Serve, broker: FakeBroker) -> None:
    served = serve()
    await served.answer()
    broker.script = lambda _request: None
    reply = served.send(*(lookup(f"t{number}", number) for number in range(10)))
    await trio.testing.wait_all_tasks_blocked()
    await broker.ends[0].send(
        b"".join(
            commands.encode(lookup_response(request, CONNECT, "pulsar://b0:6650")) for _, request in broker.requests[1:]
        )
    )
    await trio.testing.wait_all_tasks_blocked()
    assert [(len(embedded_in(part)), more) for part, more in reply.parts] == [(10, False)]


async def test_a_large_answer_travels_alone(serve: Serve, broker: FakeBroker) -> None:
    served = serve()
    await served.answer()
    schema = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 10})

    def script(request: BaseCommand) -> BaseCommand:
        if request.type == BaseCommand.LOOKUP:
            return lookup_response(request, CONNECT, "pulsar://b0:6650")
        body = {"request_id": request.get_schema.request_id, "error_message": "x" * 2 * PART_BYTES_MAX}
        return BaseCommand(type=BaseCommand.GET_SCHEMA_RESPONSE, get_schema_response=body)

    broker.script = script
    reply = served.send(lookup("t0", 0), schema, lookup("t2", 2))
    assert len(await reply.all()) == 3
    assert [1] in [[embedded.index for embedded in embedded_in(part)] for part, _ in reply.parts]


async def test_clients_of_one_principal_are_answered_together(serve: Serve, broker: FakeBroker) -> None:
    broker.script = lambda _request: None
    served = serve()
    replies = [
        served.send(lookup(request_id=number), client_address=f"192.0.2.{number}:4000") for number in range(1, 5)
    ]
    other = served.send(lookup(), sealed_principal=seal(BOB, KEY), principal_name="bob")
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(principal for principal, _ in broker.requests) == ["alice", "bob"]
    [request] = [request for principal, request in broker.requests if principal == "alice"]
    await broker.end_of["alice"].send(lookup_response(request, CONNECT, "pulsar://b0:6650"))
    for number, reply in enumerate(replies, 1):
        [embedded] = await reply.all()
        assert BaseCommand.FromString(embedded.response).lookup_topic_response.request_id == number
    assert not other.over


async def test_an_answer_that_came_before_is_the_same_for_the_next_client(serve: Serve, broker: FakeBroker) -> None:
    """Led through the proxy, under the client's own id and to the broker that it names."""
    served = serve()
    broker.script = lambda request: lookup_response(
        request, CONNECT, f"pulsar://b{int(request.lookup_topic.topic[1:]) % 2}:6650"
    )
    for _ in range(3):
        for number in range(4):
            response = (await served.answer(lookup(f"t{number}", 2**40 + number))).lookup_topic_response
            assert response.request_id == 2**40 + number
            assert response.proxy_through_service_url
            url = f"pulsar://b{number % 2}:6650"
            assert (response.broker_service_url, response.broker_service_url_tls) == (url, url)
    assert served.value("pulsar_proxy_lookup_answers_total", request="lookup", error="none") == 12


async def test_the_same_request_twice_in_one_envelope(serve: Serve, broker: FakeBroker) -> None:
    answers = await serve().send(lookup(request_id=1), lookup(request_id=2), lookup(request_id=1)).all()
    ids = [BaseCommand.FromString(one.response).lookup_topic_response.request_id for one in answers]
    assert ids == [1, 2, 1]
    assert len(broker.requests) == 1


@pytest.mark.conforms("pip-1.39")
async def test_a_thousand_clients_of_one_principal_share_one_connection(serve: Serve, broker: FakeBroker) -> None:
    served = serve()
    replies = [served.send(lookup(f"t{number}", number)) for number in range(1000)]
    for reply in replies:
        await reply.all()
    assert len(broker.connects) == 1
    assert served.service.status()["broker_connections"] == 1


# ---- errors inside


@pytest.mark.conforms("kip-590.19")
async def test_an_inner_error_is_inside_the_embedded_response(serve: Serve, broker: FakeBroker) -> None:
    broker.script = lambda request: lookup_response(request, 2, error=ServerError.TopicNotFound, message="no topic")
    served = serve()
    response = (await served.answer()).lookup_topic_response
    assert (response.error, response.message) == (ServerError.TopicNotFound, "no topic")
    assert served.value("pulsar_proxy_lookup_answers_total", request="lookup", error="TopicNotFound") == 1


async def test_a_refusal_is_logged_with_who_and_why_but_no_secret(serve: Serve) -> None:
    sealed = seal(ALICE, b"x" * 32)
    with structlog.testing.capture_logs() as logs:
        serve().refusal(sealed_principal=sealed)
    [entry] = logs
    assert entry["client"] == "192.0.2.7:4000"
    assert entry["error"] == "PRINCIPAL_DESERIALIZATION_FAILURE"
    assert "forged" in entry["reason"]
    assert repr(sealed) not in str(entry)


# ---- limits


async def test_above_the_limit_too_many_requests_in_the_requests_own_form(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery
) -> None:
    broker.script = lambda _request: None
    served = serve(limits={"max_concurrent_lookups": 1})
    served.send(lookup())
    await trio.testing.wait_all_tasks_blocked()
    assert served.service.status()["lookups_under_way"] == 1
    answer = await served.answer()
    assert answer.lookup_topic_response.error == ServerError.TooManyRequests
    metadata = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 8})
    body = (await served.answer(metadata)).partition_metadata_response
    assert (body.request_id, body.error) == (8, ServerError.TooManyRequests)
    topics = BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "t/n", "request_id": 9}
    )
    error = (await served.answer(topics)).error
    assert (error.request_id, error.error) == (9, ServerError.TooManyRequests)
    schema = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 10})
    found = (await served.answer(schema)).get_schema_response
    assert (found.request_id, found.error_code) == (10, ServerError.TooManyRequests)
    assert len(broker.requests) == 1
    assert served.value("pulsar_proxy_rejected_lookup_requests_total") == 1
    assert served.value("pulsar_proxy_rejected_partitions_metadata_requests_total") == 1
    assert served.value("pulsar_proxy_rejected_get_topics_of_namespace_requests_total") == 1
    assert served.value("pulsar_proxy_rejected_get_schema_requests_total") == 1
    assert served.value("pulsar_proxy_lookup_requests_total") == 2


async def test_the_limit_counts_until_the_answer(serve: Serve, broker: FakeBroker) -> None:
    served = serve(limits={"max_concurrent_lookups": 1})
    for _ in range(3):
        assert (await served.answer()).lookup_topic_response.response == CONNECT
    assert served.service.status()["lookups_under_way"] == 0


async def test_above_the_limit_the_connection_to_the_broker_and_others_requests_go_on(
    serve: Serve, broker: FakeBroker
) -> None:
    served = serve(limits={"max_concurrent_lookups": 4})
    await served.answer()
    broker.script = lambda _request: None
    reply = served.send(*(lookup(f"t{number}", number) for number in range(6)))
    await trio.testing.wait_all_tasks_blocked()
    refused = [
        embedded.index
        for part, _ in reply.parts
        for embedded in embedded_in(part)
        if BaseCommand.FromString(embedded.response).lookup_topic_response.error == ServerError.TooManyRequests
    ]
    assert len(refused) >= 2
    assert not reply.over
    bob = served.send(lookup("of bob"), sealed_principal=seal(BOB, KEY), principal_name="bob")
    await trio.testing.wait_all_tasks_blocked()
    assert "of bob" in [request.lookup_topic.topic for _, request in broker.requests], "a second one gets in"
    for principal, request in broker.requests[1:]:
        await broker.end_of[principal].send(lookup_response(request, CONNECT, "pulsar://b0:6650"))
    assert len(await reply.all()) == 6
    assert len(await bob.all()) == 1
    assert len(broker.connects) == 2
    assert served.service.status()["lookups_under_way"] == 0


# ---- brokers that redirect, go, freeze, or break something


async def test_a_redirect_over_an_open_connection_is_followed_inside(
    serve: Serve, network: Network, broker: FakeBroker
) -> None:
    other = network.add("b1", "10.0.0.2", FakeBroker(connect_to("pulsar://b1:6650")))
    served = serve()
    await served.answer()
    broker.script = redirect_to("pulsar://b1:6650", authoritative=True)
    response = (await served.answer(lookup("moved", request_id=9))).lookup_topic_response
    assert (response.response, response.request_id, response.broker_service_url) == (CONNECT, 9, "pulsar://b1:6650")
    assert response.proxy_through_service_url
    assert [principal for principal, _ in other.requests] == ["alice"]
    assert len(broker.requests) == 2, "the redirecting broker was asked once"


async def test_a_connection_lost_over_the_short_way_is_made_good_by_another(
    serve: Serve, network: Network, broker: FakeBroker
) -> None:
    network.add("b1", "10.0.0.2", FakeBroker(connect_to("pulsar://b1:6650")))
    served = serve(brokers={"service_url": "pulsar://b0,b1"})
    for _ in range(4):
        await served.answer()
    broker.hang_up_after_requests = 1
    answers = await served.send(*(lookup(f"t{number}", number) for number in range(8))).all()
    responses = [BaseCommand.FromString(embedded.response).lookup_topic_response for embedded in answers]
    assert {response.response for response in responses} == {CONNECT}
    assert [response.request_id for response in responses] == list(range(8))
    assert served.service.status()["lookups_under_way"] == 0


async def test_a_broker_that_freezes_leaves_time_for_another(
    serve: Serve, network: Network, broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    network.add("b1", "10.0.0.2", FakeBroker(connect_to("pulsar://b1:6650")))
    served = serve(brokers={"service_url": "pulsar://b0,b1"}, limits={"lookup_timeout_ms": 10_000})
    await served.start()
    for _ in range(4):
        await served.answer()
    broker.freeze()
    started = trio.current_time()
    answers = await served.send(*(lookup(f"t{number}", number) for number in range(8))).all()
    responses = [BaseCommand.FromString(embedded.response).lookup_topic_response for embedded in answers]
    assert {response.response for response in responses} == {CONNECT}
    assert trio.current_time() - started < 10


@pytest.mark.conforms("kip-590.27")
async def test_no_answer_at_all_is_told_in_time(
    serve: Serve, broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    served = serve(limits={"lookup_timeout_ms": 4000})
    await served.start()
    await served.answer()
    broker.script = lambda _request: None  # but PINGs are answered
    started = trio.current_time()
    response = (await served.answer()).lookup_topic_response
    assert response.error == ServerError.ServiceNotReady
    assert 4.0 <= trio.current_time() - started <= 4.3
    assert served.service.status()["lookups_under_way"] == 0
    request = broker.requests[-1][1]
    broker.script = connect_to("pulsar://right:6650")
    reply = served.send(lookup(request_id=8))
    await broker.end_of["alice"].send(lookup_response(request, CONNECT, "pulsar://late:6650"))  # no caller waits for it
    [embedded] = await reply.all()
    answer = BaseCommand.FromString(embedded.response).lookup_topic_response
    assert (answer.request_id, answer.broker_service_url) == (8, "pulsar://right:6650")


async def test_a_defect_that_an_answer_meets_ends_neither_the_worker_nor_other_connections(
    serve: Serve, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    for principal, name in ((ALICE, "alice"), (BOB, "bob")):
        await served.answer(sealed_principal=seal(principal, KEY), principal_name=name)
    finished = LookupExecutor.finish_answer

    def breaks(self: LookupExecutor, answer: BaseCommand, kind: Any, asker: Any, client: str) -> BaseCommand:
        if client == "192.0.2.9:1":
            raise ZeroDivisionError
        return finished(self, answer, kind, asker, client)

    monkeypatch.setattr(LookupExecutor, "finish_answer", breaks)
    with structlog.testing.capture_logs() as logs:
        served.send(lookup("bad"), client_address="192.0.2.9:1")
        await trio.testing.wait_all_tasks_blocked()
    assert "error" in [entry["log_level"] for entry in logs]
    assert broker.open >= 1
    await served.answer(sealed_principal=seal(BOB, KEY), principal_name="bob")
    assert len([one for one in broker.connects if one.original_principal == "bob"]) == 1
    await served.answer()


async def test_answers_for_a_forwarder_that_has_gone_are_dropped(serve: Serve, broker: FakeBroker) -> None:
    broker.script = lambda _request: None
    served = serve()
    server = RpcServer(served.service.handlers(), max_frame_bytes=65536)
    ours, theirs = trio.testing.memory_stream_pair()
    gone = trio.Event()

    async def serve_one() -> None:
        await server.serve_connection(theirs, FORWARDER)
        gone.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_one)
        request = EnvelopeRequest(
            requests=[lookup().SerializeToString()],
            principal_type="User",
            principal_name="alice",
            sealed_principal=seal(ALICE, KEY),
            client_address="192.0.2.7:4000",
        )
        call = Call(correlation_id=1, method=Method.ENVELOPE, timeout_ms=1000, request=request.SerializeToString())
        await ours.send_all(encode_call(call))
        await trio.testing.wait_all_tasks_blocked()
        assert served.service.status()["lookups_under_way"] == 1
        await ours.aclose()
        await gone.wait()
    other = served.send(lookup(request_id=8))  # asks the same, meanwhile
    await broker.ends[0].send(lookup_response(broker.requests[0][1], CONNECT, "pulsar://b0:6650"))
    [embedded] = await other.all()
    assert BaseCommand.FromString(embedded.response).lookup_topic_response.request_id == 8
    assert served.service.status()["lookups_under_way"] == 0


# ---- targets and profile


async def test_resolve_target(serve: Serve, network: Network) -> None:
    network.names["b1"] = [["10.0.0.2", "10.0.0.3"]]
    response = await serve().resolve("b1:6650")
    assert (response.host, response.port, list(response.addresses), response.denial) == (
        "b1",
        6650,
        ["10.0.0.2", "10.0.0.3"],
        "",
    )


async def test_a_target_that_is_known_is_checked_without_a_task(serve: Serve, network: Network) -> None:
    network.names["b1"] = [["10.0.0.2"]]
    served = serve()
    assert served.resolve_at_once("b1:6650") is None, "its name is not resolved yet"
    await served.resolve("b1:6650")
    response = served.resolve_at_once("b1:6650")
    assert response is not None
    assert (response.host, list(response.addresses)) == ("b1", ["10.0.0.2"])
    denied = served.resolve_at_once("b1:22")
    assert denied is not None
    assert (denied.denial, list(denied.addresses)) == ("port", [])
    with pytest.raises(RpcRefused) as refused:
        served.resolve_at_once("b1:6650", sealed_principal=seal(BOB, KEY))
    assert refused.value.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE


async def test_ports_in_a_lookup_answer_are_used_for_targets(
    serve: Serve, network: Network, broker: FakeBroker
) -> None:
    network.names["b1"] = [["10.0.0.2"]]
    broker.script = connect_to("pulsar://b1:6650", broker_service_url_tls="pulsar+ssl://b1:7651")
    served = serve()
    assert (await served.resolve("b1:7651")).denial == "port"
    await served.answer()
    for _ in range(2):
        response = await served.resolve("b1:7651")
        assert (response.host, response.port, response.denial) == ("b1", 6650, "")
        await served.configure()  # forgets nothing


async def test_resolve_target_denied(serve: Serve) -> None:
    served = serve()
    response = await served.resolve("b1:22")
    assert response.denial == "port"
    assert "b1:22" in response.detail
    assert not response.addresses
    assert not response.host
    assert served.value("pulsar_proxy_denied_targets_total", reason="port") == 1


@pytest.mark.conforms("kip-590.23")
@pytest.mark.parametrize("any_broker", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"sealed_principal": b""},
        {"sealed_principal": b"\xff\xff\xff"},
        {"sealed_principal": ALICE.SerializeToString()},
        {"sealed_principal": seal(ALICE, b"x" * 32)},
        {"sealed_principal": seal(BOB, KEY)},
        {"sealed_principal": seal(Principal(name="alice", expires_at_unix_ms=int(NOW_S * 1000)), KEY)},
        {"principal_name": ""},
        {"principal_name": "admin"},
    ],
    ids=["unsealed", "malformed", "no seal", "forged", "bob's", "expired", "nobody", "admin"],
)
async def test_a_target_is_resolved_for_a_sealed_principal_alone(
    serve: Serve, network: Network, changes: dict[str, Any], any_broker: bool
) -> None:
    """Security: a forwarder cannot mint a principal, for relays no more than for lookups."""
    network.names["b1"] = [["10.0.0.2"]]
    served = serve()
    with pytest.raises(RpcRefused) as refused, structlog.testing.capture_logs() as logs:
        await served.resolve("" if any_broker else "b1:6650", any_broker=any_broker, **changes)
    assert refused.value.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE
    assert "b1" not in network.resolved
    assert served.value("pulsar_proxy_denied_targets_total", reason="bad_principal") == 1
    assert [entry["client"] for entry in logs if "refused" in entry["event"]] == ["192.0.2.7:4000"]


NOBODY: dict[str, Any] = {"principal_name": "", "sealed_principal": b"", "server_name": True}
SNI = [{"routing": "sni"}]


async def test_a_target_without_a_principal_is_for_sni_routing_alone(serve: Serve, network: Network) -> None:
    """Security: where clients are authenticated, none is without a principal but behind such a listener."""
    network.names["b0"] = [["10.0.0.1"]]
    brokers = {"service_url": "pulsar+ssl://b0:6651"}
    served = serve(brokers=brokers, listener=SNI)
    assert (await served.resolve("b0", **NOBODY)).port == 6651
    for changes in ({"principal_name": "admin"}, {"sealed_principal": b"x"}, {"any_broker": True}):
        with pytest.raises(RpcRefused):
            await served.resolve("b0", **{**NOBODY, **changes})
    with pytest.raises(RpcRefused):
        await served.resolve("b0:6651", **{**NOBODY, "server_name": False})
    with pytest.raises(RpcRefused):
        await serve(brokers=brokers).resolve("b0", **NOBODY)


async def test_without_authentication_a_target_needs_no_principal(serve: Serve, network: Network) -> None:
    network.names["b1"] = [["10.0.0.2"]]
    served = serve(authentication={"enabled": False})
    assert (await served.resolve("b1:6650", sealed_principal=b"", principal_name="")).host == "b1"


async def test_resolve_any_broker(serve: Serve, network: Network) -> None:
    network.names["b0"], network.names["b1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    served = serve(brokers={"service_url": "pulsar://b0:6650,b1:7000"})
    await trio.testing.wait_all_tasks_blocked()
    response = await served.resolve("", any_broker=True)
    [other] = response.others
    found = {(one.host, one.port, *one.addresses) for one in (response, other)}
    assert found == {("b0", 6650, "10.0.0.1"), ("b1", 7000, "10.0.0.2")}
    assert not response.denial


async def test_an_empty_target_means_any_broker_only_where_it_is_said_so(serve: Serve) -> None:
    response = await serve().resolve("")
    assert (response.denial, response.host) == ("malformed", "")


async def test_resolve_any_broker_denied(serve: Serve, network: Network) -> None:
    network.names["b0"] = [["169.254.169.254"]]
    served = serve()
    response = await served.resolve("", any_broker=True)
    assert (response.denial, response.host, list(response.others)) == ("metadata", "", [])
    assert served.value("pulsar_proxy_denied_targets_total", reason="metadata") == 1


async def test_the_profile_is_empty_before_a_broker_has_spoken_and_whole_after(
    serve: Serve, broker: FakeBroker
) -> None:
    greeting = CommandConnected(server_version="4.0.8", protocol_version=21, max_message_size=5242880)
    greeting.feature_flags.supports_topic_watchers = True
    broker.greeting = BaseCommand(type=BaseCommand.CONNECTED, connected=greeting)
    served = serve()
    assert (await served.profile()).connected == b""
    await served.answer()
    assert CommandConnected.FromString((await served.profile()).connected) == greeting


async def test_every_method_served_is_in_the_role_table(serve: Serve) -> None:
    for method in serve().service.handlers():
        assert MAY_CALL[method] == {Role.FORWARDER} | ({Role.HTTP} if method == Method.RESOLVE_TARGET else set())


# ---- life


async def test_start_looks_after_brokers_and_status_tells(
    serve: Serve, broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    served = serve()
    assert served.service.status()["ready"] is False
    await served.start()
    await trio.sleep(0.1)
    status = served.service.status()
    assert status["ready"] is True
    [about] = status["brokers"]  # type: ignore[misc, attr-defined]
    assert (about["broker"], about["reachable"], about["detail"]) == ("b0:6650", True, "answers at 10.0.0.1")
    await served.answer()
    assert served.service.status()["broker_connections"] == 1


async def test_a_broker_that_is_down_does_not_keep_it_from_starting(serve: Serve) -> None:
    served = serve()
    await served.start()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service.status()["ready"] is False


async def test_drain_waits_for_what_is_under_way(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker.script = lambda _request: None
    served = serve(limits={"lookup_timeout_ms": 4000})
    served.send(lookup())
    await trio.sleep(1)
    await served.service.drain(30, hand_over=False)
    assert trio.current_time() == pytest.approx(4)


async def test_drain_does_not_wait_for_ever(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker.script = lambda _request: None
    served = serve()
    served.send(lookup())
    await trio.sleep(1)
    await served.service.drain(2, hand_over=False)
    assert trio.current_time() == pytest.approx(3)


async def test_configure_changes_what_begins_from_now_on(serve: Serve, network: Network, broker: FakeBroker) -> None:
    other = network.add("b1", "10.0.0.2", FakeBroker(connect_to("pulsar://b1:6650")))
    served = serve()
    await served.start()
    await served.answer()
    rules = {"allowed_addresses": ["10.0.0.1"], "allowed_ports": [7000]}
    await served.configure(brokers={"service_url": "pulsar://b1:6650", **rules})
    await served.answer()
    assert len(other.requests) == 1
    assert (await served.resolve("b0:6650")).denial == "port"
    assert (await served.resolve("b0:7000")).denial == ""
    await trio.testing.wait_all_tasks_blocked()
    assert [entry["broker"] for entry in served.service.status()["brokers"]] == ["b1:6650"]  # type: ignore[attr-defined]
    assert served.value("pulsar_proxy_broker_up", broker="b0:6650") is None
    assert served.value("pulsar_proxy_broker_up", broker="b1:6650") == 1


async def test_configure_can_switch_authentication_on(serve: Serve, broker: FakeBroker) -> None:
    served = serve(authentication={"enabled": False})
    await served.start()
    await served.answer(sealed_principal=b"")
    await served.configure(authentication={"enabled": True})
    assert served.refusal(sealed_principal=b"") == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


async def test_configure_lets_lookups_under_way_finish_under_the_old_settings(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker.script = lambda _request: None
    served = serve(limits={"lookup_timeout_ms": 10_000})
    answers: list[BaseCommand] = []

    async def ask() -> None:
        answers.append(await served.answer())

    nursery.start_soon(ask)
    await trio.sleep(1)
    await served.configure(limits={"lookup_timeout_ms": 1000})
    await trio.sleep(3)
    assert len(broker.requests) == 1, "asked again, because its connection was closed under it"
    await broker.ends[0].send(lookup_response(broker.requests[0][1], CONNECT, "pulsar://b0:6650"))
    await trio.sleep(0.1)
    assert [answer.lookup_topic_response.response for answer in answers] == [CONNECT]


async def test_configure_closes_the_old_connections_once_their_lookups_had_their_time(
    serve: Serve, broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    served = serve()
    await served.answer()
    assert broker.open == 1
    await served.configure()
    await trio.sleep(11)
    assert broker.open == 0


async def test_a_reload_that_fails_leaves_everything_as_it_was(serve: Serve, broker: FakeBroker) -> None:
    """A file may have gone between the check of the configuration and its use."""
    served = serve()
    await served.answer()
    with pytest.raises(ConfigError, match=r"^brokers\.tls"):
        await served.configure(brokers={"service_url": "pulsar+ssl://b1:6650", "tls": {"trust": "/nowhere"}})
    await served.answer()
    assert len(broker.connects) == 1, "the connection is still the same one"


# ---- outliers


@pytest.mark.parametrize("asked_for", [True, False])
async def test_a_forwarders_report_ejects_an_outlier_if_the_setting_asks_for_it(
    serve: Serve, *, asked_for: bool
) -> None:
    served = serve(brokers={"service_url": "pulsar://10.0.0.1,10.0.0.2", "ejection_by_relays": asked_for})
    report = ReportOutlierRequest(addresses=["10.0.0.1"], port=6650, owners=3, owners_failing=3)
    handler: Any = served.service.handlers()[Method.REPORT_OUTLIER]
    assert await carry_out(handler, report.SerializeToString(), FORWARDER) == b""
    assert (served.value("pulsar_proxy_broker_ejections_total", reason="relays") or 0) == int(asked_for)
