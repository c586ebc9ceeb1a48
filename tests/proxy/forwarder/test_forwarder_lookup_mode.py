"""proxy.forwarder.lookup_mode: what a client hears of its request, whatever became of the Envelope."""

import pytest
import structlog.testing
import trio
from forwarder_fakes import ALICE, CLIENT, FakeBackends, lookup, lookup_answer, make_config

from proto import commands
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeError, EnvelopeResponse, Status
from proxy.forwarder.authentication import ClientIdentity
from proxy.forwarder.lookup_mode import answer_frame
from proxy.runtime.rpc_client import RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcError

METADATA = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 7})
TOPICS = BaseCommand(
    type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "n", "request_id": 7}
)
SCHEMA = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 7})


async def heard(outcome: EnvelopeResponse | RpcError, command: BaseCommand | None = None) -> BaseCommand:
    command = command or lookup()
    backends = FakeBackends(make_config())

    async def forward(_request: bytes) -> EnvelopeResponse:
        await trio.lowlevel.checkpoint()
        if isinstance(outcome, RpcError):
            raise outcome
        return outcome

    backends.forward_by = forward
    identity = ClientIdentity(ALICE, b"sealed")
    frame = Frame(command.SerializeToString())
    data = await answer_frame(backends, command, frame, identity, CLIENT)  # type: ignore[arg-type]
    return commands.parse_command(data[8:])


async def test_the_embedded_response_goes_out_as_it_is() -> None:
    embedded = lookup_answer(7)
    embedded.MergeFromString(b"\xfa\x3f\x03new")
    answer = await heard(EnvelopeResponse(response=embedded.SerializeToString()))
    assert answer.SerializeToString() == embedded.SerializeToString()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE, ServerError.AuthenticationError),
        (EnvelopeError.ENVELOPE_CLUSTER_AUTHORIZATION_FAILED, ServerError.UnknownError),
        (EnvelopeError.ENVELOPE_INVALID_REQUEST, ServerError.UnknownError),
        (EnvelopeError.ENVELOPE_UNSUPPORTED_VERSION, ServerError.UnknownError),
        (77, ServerError.UnknownError),
    ],
)
async def test_an_envelopes_error_is_told_without_its_text(error: int, code: int) -> None:
    with structlog.testing.capture_logs() as logs:
        answer = await heard(EnvelopeResponse(error=error, error_message="internal words"))  # type: ignore[arg-type]
    body = answer.lookup_topic_response
    assert (body.request_id, body.error) == (7, code)
    assert "internal words" not in str(answer)
    [entry] = logs
    assert (entry["client"], entry["principal"], entry["reason"]) == (CLIENT, "alice", "internal words")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RpcCallRefused(Status.TOO_MANY_REQUESTS, "internal words"), ServerError.TooManyRequests),
        (RpcCallRefused(Status.REQUEST_TIMED_OUT, "internal words"), ServerError.ServiceNotReady),
        (RpcDeadlineExceeded("internal words"), ServerError.ServiceNotReady),
        (RpcConnectionLost("internal words"), ServerError.ServiceNotReady),
        # conformance.md: an unknown error is UNKNOWN_SERVER_ERROR to the client.
        (RpcCallRefused(Status.UNKNOWN_SERVER_ERROR, "internal words"), ServerError.UnknownError),
    ],
)
async def test_no_answer_from_the_lookup_worker(error: RpcError, code: int) -> None:
    answer = await heard(error)
    body = answer.lookup_topic_response
    assert (body.request_id, body.error) == (7, code)
    assert "internal words" not in str(answer)


async def test_failures_have_the_requests_own_form() -> None:
    lost = RpcConnectionLost("gone")
    metadata = (await heard(lost, METADATA)).partition_metadata_response
    assert (metadata.request_id, metadata.error) == (7, ServerError.ServiceNotReady)
    topics = (await heard(lost, TOPICS)).error
    assert (topics.request_id, topics.error) == (7, ServerError.ServiceNotReady)
    schema = (await heard(lost, SCHEMA)).get_schema_response
    assert (schema.request_id, schema.error_code) == (7, ServerError.ServiceNotReady)
