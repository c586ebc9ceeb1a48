"""lookup.service: Envelopes (KIP-590), row by row; targets; profile; reload."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import CONNECT, FakeBroker, Network, connect_to, lookup, lookup_response, make_config
from prometheus_client import CollectorRegistry

from lookup.service import LookupService
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.roles import MAY_CALL, Role
from proto.rpc_pb2 import (
    BrokerProfileRequest,
    BrokerProfileResponse,
    EnvelopeError,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    Principal,
    ResolveTargetRequest,
    ResolveTargetResponse,
)
from proto.sealed_principal import seal
from proxy.config.errors import ConfigError
from proxy.runtime.descriptors import Descriptors
from proxy.runtime.peers import Caller
from proxy.runtime.worker import WorkerContext

KEY = b"k" * 32
FORWARDER = Caller(Role.FORWARDER, 1)
NOW_S = 1_700_000_000.0
ALICE = Principal(type="User", name="alice", method="token")


class Served:
    """A lookup worker's service over a fake network, spoken to as a forwarder does."""

    def __init__(self, nursery: trio.Nursery, **tables: dict[str, Any]) -> None:
        tables.setdefault("brokers", {}).setdefault("service_url", "pulsar://b0:6650")
        tables.setdefault("authentication", {"enabled": True})
        self.tables = tables
        self.registry = CollectorRegistry()
        context = WorkerContext(
            Role.LOOKUP, 0, make_config(**tables), KEY, Descriptors(channel=-1, liveness=-1), self.registry, nursery
        )
        self.service = LookupService(context)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    async def envelope(self, request: BaseCommand | bytes | None = None, **changes: Any) -> EnvelopeResponse:
        request = lookup() if request is None else request
        fields: dict[str, Any] = {
            "request": request if isinstance(request, bytes) else request.SerializeToString(),
            "principal_type": "User",
            "principal_name": "alice",
            "sealed_principal": seal(ALICE, KEY),
            "client_address": "192.0.2.7:4000",
        }
        fields.update(changes)
        data = EnvelopeRequest(**fields).SerializeToString()
        return EnvelopeResponse.FromString(await self.service.handlers()[Method.ENVELOPE](data, FORWARDER))

    async def answer(self, request: BaseCommand | None = None, **changes: Any) -> BaseCommand:
        response = await self.envelope(request, **changes)
        assert response.error == EnvelopeError.ENVELOPE_OK, response.error_message
        return BaseCommand.FromString(response.response)

    async def refusal(self, request: BaseCommand | bytes | None = None, **changes: Any) -> int:
        response = await self.envelope(request, **changes)
        assert not response.response
        assert response.error_message
        assert self.value("pulsar_proxy_envelope_errors_total", error=EnvelopeError.Name(response.error)) == 1
        return response.error

    async def resolve(self, target: str) -> ResolveTargetResponse:
        data = ResolveTargetRequest(target=target, client_address="192.0.2.7:4000").SerializeToString()
        handler = self.service.handlers()[Method.RESOLVE_TARGET]
        return ResolveTargetResponse.FromString(await handler(data, FORWARDER))

    async def profile(self) -> BrokerProfileResponse:
        handler = self.service.handlers()[Method.BROKER_PROFILE]
        return BrokerProfileResponse.FromString(await handler(BrokerProfileRequest().SerializeToString(), FORWARDER))

    async def configure(self, **tables: dict[str, Any]) -> None:
        await self.service.configure(make_config(**{**self.tables, **tables}))


Serve = Callable[..., Served]


@pytest.fixture
def broker(network: Network) -> FakeBroker:
    return network.add("b0", "10.0.0.1", FakeBroker(connect_to("pulsar://b0:6650")))


@pytest.fixture
def serve(network: Network, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def never(_path: str) -> Any:
        return trio.sleep_forever

    monkeypatch.setattr("lookup.service.connect_unix", never)
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    return lambda **tables: Served(nursery, **tables)


# ---- Envelope, row by row


async def test_a_sealed_principal_is_answered_for(serve: Serve, broker: FakeBroker) -> None:
    served = serve()
    answer = await served.answer()
    assert answer.lookup_topic_response.response == CONNECT
    assert answer.lookup_topic_response.request_id == 7
    assert broker.requests[0][0] == "alice"


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


async def test_credentials_do_not_replace_a_principal(serve: Serve, broker: FakeBroker) -> None:
    """Security: whoever forwards credentials has to show the seal, as everybody."""
    served = serve()
    refused = await served.refusal(
        original_auth_method="token", original_auth_data="s3cret", sealed_principal=b"", principal_name="admin"
    )
    assert refused == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE
    assert broker.connects == []


async def test_a_principal_behind_a_proxy_is_answered_for(serve: Serve, broker: FakeBroker) -> None:
    behind = Principal(type="User", name="alice", method="token", proxy="proxy-a")
    await serve().answer(sealed_principal=seal(behind, KEY))
    assert broker.requests[0][0] == "alice"


@pytest.mark.parametrize("address", ["", "rubbish", "192.0.2.7", "192.0.2.7:x", "a b:1"])
async def test_a_bad_client_address(serve: Serve, broker: FakeBroker, address: str) -> None:
    assert await serve().refusal(client_address=address) == EnvelopeError.ENVELOPE_INVALID_REQUEST
    assert broker.requests == []


async def test_an_ipv6_client_address(serve: Serve, broker: FakeBroker) -> None:
    await serve().answer(client_address="[2001:db8::1]:4000")


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
    refused = await serve().refusal(sealed_principal=sealed)
    assert refused == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE
    assert broker.connects == []


@pytest.mark.parametrize(("expires_at_ms", "accepted"), [(-1, False), (0, False), (1, True)])
async def test_expiry(serve: Serve, broker: FakeBroker, expires_at_ms: int, accepted: bool) -> None:
    principal = Principal(
        type="User", name="alice", method="token", expires_at_unix_ms=int(NOW_S * 1000) + expires_at_ms
    )
    served = serve()
    if accepted:
        await served.answer(sealed_principal=seal(principal, KEY))
    else:
        refused = await served.refusal(sealed_principal=seal(principal, KEY))
        assert refused == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE
        assert broker.connects == []


@pytest.mark.parametrize("claimed", [{"principal_name": "admin"}, {"principal_type": "Group"}, {"principal_name": ""}])
async def test_the_name_must_be_the_one_under_the_seal(
    serve: Serve, broker: FakeBroker, claimed: dict[str, str]
) -> None:
    refused = await serve().refusal(**claimed)
    assert refused == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE
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


@pytest.mark.parametrize(
    "command",
    [
        BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 1}),
        BaseCommand(type=BaseCommand.CONNECT, connect={"client_version": "x"}),
        BaseCommand(type=BaseCommand.PING),
        BaseCommand(type=BaseCommand.LOOKUP_RESPONSE),
        BaseCommand(),
    ],
)
async def test_a_command_that_may_not_be_forwarded(serve: Serve, broker: FakeBroker, command: BaseCommand) -> None:
    assert await serve().refusal(command) == EnvelopeError.ENVELOPE_INVALID_REQUEST
    assert broker.connects == []


@pytest.mark.parametrize("inner", [b"\xff\xff\xff\xff", BaseCommand(type=BaseCommand.LOOKUP).SerializeToString()])
async def test_inner_bytes_that_cannot_be_parsed(serve: Serve, inner: bytes) -> None:
    assert await serve().refusal(inner) == EnvelopeError.ENVELOPE_UNSUPPORTED_VERSION


async def test_an_inner_error_is_inside_the_embedded_response(serve: Serve, broker: FakeBroker) -> None:
    broker.script = lambda request: lookup_response(request, 2, error=ServerError.TopicNotFound, message="no topic")
    served = serve()
    response = (await served.answer()).lookup_topic_response
    assert (response.error, response.message) == (ServerError.TopicNotFound, "no topic")
    assert served.value("pulsar_proxy_lookup_answers_total", request="lookup", error="TopicNotFound") == 1


async def test_a_refusal_is_logged_with_who_and_why_but_no_secret(serve: Serve) -> None:
    sealed = seal(ALICE, b"x" * 32)
    with structlog.testing.capture_logs() as logs:
        await serve().refusal(sealed_principal=sealed)
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
    nursery.start_soon(served.envelope)
    await trio.testing.wait_all_tasks_blocked()
    assert served.service.status()["lookups_under_way"] == 1
    answer = await served.answer()
    assert answer.lookup_topic_response.error == ServerError.TooManyRequests
    metadata = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 8})
    body = (await served.answer(metadata)).partition_metadata_response
    assert (body.request_id, body.error) == (8, ServerError.TooManyRequests)
    topics = BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "n", "request_id": 9}
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


# ---- targets and profile


async def test_resolve_target(serve: Serve, network: Network) -> None:
    network.names["b1"] = [["10.0.0.2", "10.0.0.3"]]
    response = await serve().resolve("b1:6651")
    assert (response.host, response.port, list(response.addresses), response.denial) == (
        "b1",
        6651,
        ["10.0.0.2", "10.0.0.3"],
        "",
    )


async def test_resolve_target_denied(serve: Serve) -> None:
    served = serve()
    response = await served.resolve("b1:22")
    assert response.denial == "port"
    assert "b1:22" in response.detail
    assert not response.addresses
    assert not response.host
    assert served.value("pulsar_proxy_denied_targets_total", reason="port") == 1


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
        assert MAY_CALL[method] == {Role.FORWARDER}


# ---- life


async def test_start_looks_after_brokers_and_status_tells(
    serve: Serve, broker: FakeBroker, autojump_clock: trio.testing.MockClock
) -> None:
    served = serve()
    assert served.service.status()["ready"] is False
    await served.service.start()
    await trio.sleep(0.1)
    status = served.service.status()
    assert status["ready"] is True
    assert status["brokers"] == [{"broker": "b0:6650", "reachable": True, "detail": "answers at 10.0.0.1"}]
    await served.answer()
    assert served.service.status()["broker_connections"] == 1


async def test_a_broker_that_is_down_does_not_keep_it_from_starting(serve: Serve) -> None:
    served = serve()
    await served.service.start()
    await trio.testing.wait_all_tasks_blocked()
    assert served.service.status()["ready"] is False


async def test_drain_waits_for_what_is_under_way(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker.script = lambda _request: None
    served = serve(limits={"lookup_timeout_ms": 4000})
    nursery.start_soon(served.envelope)
    await trio.sleep(1)
    await served.service.drain(30, hand_over=False)
    assert trio.current_time() == pytest.approx(4)


async def test_drain_does_not_wait_for_ever(
    serve: Serve, broker: FakeBroker, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker.script = lambda _request: None
    served = serve()
    nursery.start_soon(served.envelope)
    await trio.sleep(1)
    await served.service.drain(2, hand_over=False)
    assert trio.current_time() == pytest.approx(3)


async def test_configure_changes_what_begins_from_now_on(serve: Serve, network: Network, broker: FakeBroker) -> None:
    other = network.add("b1", "10.0.0.2", FakeBroker(connect_to("pulsar://b1:6650")))
    served = serve()
    await served.service.start()
    await served.answer()
    await served.configure(brokers={"service_url": "pulsar://b1:6650", "allowed_ports": [7000]})
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
    await served.service.start()
    await served.answer(sealed_principal=b"")
    await served.configure(authentication={"enabled": True})
    assert await served.refusal(sealed_principal=b"") == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE


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
    await broker.ends[0].say(lookup_response(broker.requests[0][1], CONNECT, "pulsar://b0:6650"))
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
