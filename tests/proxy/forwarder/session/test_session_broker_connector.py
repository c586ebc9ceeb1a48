"""proxy.forwarder.session.broker_connector: opening it, what its failures mean to a client, and the relay that it
becomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import ALICE, CLIENT, Play, connect

from proto.addresses import HostPort
from proto.broker_handshake import Connected
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.frames import Frame
from proto.pulsar_pb2 import CommandConnected, ServerError
from proto.rpc_pb2 import Status, StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.relay.start import RelayStart
from proxy.forwarder.session.broker_connector import CANNOT_CHECK, TARGET_REFUSED, BrokerConnectFailed, BrokerConnector
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost

CONNECT = connect("pulsar://b0:6650").connect
WHO = ClientIdentity(ALICE, b"sealed")


class Setup:
    """A broker's side, and what it opens with."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.play = Play(nursery)
        self.workers = self.play.workers
        self.tasks = TaskInTest()
        self.connector = BrokerConnector(self.workers, CLIENT, Deadlines(), self.tasks)  # type: ignore[arg-type]

    async def open(self, failure: Exception | None = None) -> BrokerConnectFailed | None:
        self.workers.broker_failure = failure
        outcomes: list[BrokerConnectFailed | None] = []
        self.connector.connect(CONNECT, WHO, outcomes.append)
        await self.tasks.run()
        (outcome,) = outcomes
        return outcome


class TaskInTest:
    """Runs the one task that is started within the test's own: what it raises is the test's to see."""

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self.run = partial(async_fn, *args)


@pytest.fixture
def broker(nursery: trio.Nursery) -> Setup:
    return Setup(nursery)


async def test_a_broker_link_is_opened_with_the_clients_identity(broker: Setup) -> None:
    await broker.open()
    assert broker.workers.opened == [(CONNECT, WHO, CLIENT)]
    assert broker.connector.link.stream is broker.workers.broker_stream
    assert broker.connector.link.connected.message.server_version == "the broker"


async def test_before_it_is_open_there_is_no_link(broker: Setup) -> None:
    with pytest.raises(RuntimeError, match="without a broker"):
        _ = broker.connector.link


@pytest.mark.parametrize(
    ("failure", "cause", "reason", "code", "message", "detail"),
    [
        (
            TargetRefused("allowed_ports", "port 22 is not in brokers.allowed_ports"),
            DisconnectCause.TARGET_DENIED,
            "allowed_ports",
            ServerError.ServiceNotReady,
            TARGET_REFUSED,
            "port 22 is not in brokers.allowed_ports",
        ),
        (
            RpcConnectionLost("the lookup worker has gone"),
            DisconnectCause.LOOKUP_UNAVAILABLE,
            "lookup_worker",
            ServerError.ServiceNotReady,
            CANNOT_CHECK,
            "no answer from the lookup worker: the lookup worker has gone",
        ),
        (
            RpcCallRefused(Status.PRINCIPAL_DESERIALIZATION_FAILURE, "the sealed principal is expired"),
            DisconnectCause.AUTHENTICATION_FAILED,
            "bad_principal",
            ServerError.AuthenticationError,
            AUTHENTICATION_FAILED,
            "PRINCIPAL_DESERIALIZATION_FAILURE: the sealed principal is expired",
        ),
        (
            RpcCallRefused(Status.TOO_MANY_REQUESTS, "busy"),
            DisconnectCause.LOOKUP_UNAVAILABLE,
            "lookup_worker",
            ServerError.ServiceNotReady,
            CANNOT_CHECK,
            "no answer from the lookup worker: TOO_MANY_REQUESTS: busy",
        ),
    ],
    ids=["denied", "no worker can say", "bad principal", "busy"],
)
async def test_a_failed_connect_tells_the_client_the_cause_and_the_log_the_detail(  # noqa: PLR0917 -- the table
    broker: Setup, failure: Exception, cause: DisconnectCause, reason: str, code: int, message: str, detail: str
) -> None:
    failed = await broker.open(failure)
    assert failed is not None
    assert (failed.cause, failed.reason, failed.code) == (cause, reason, code)
    assert failed.message == message
    assert str(failed) == detail


async def test_a_brokers_refusal_reaches_the_client_with_its_code_and_message(broker: Setup) -> None:
    refusal = BrokerLinkFailed("refused", "for the log", code=ServerError.AuthorizationError, message="for the client")
    failed = await broker.open(refusal)
    assert failed is not None
    assert failed.cause is DisconnectCause.BROKER_FAILED
    assert (failed.reason, failed.code) == ("refused", ServerError.AuthorizationError)
    assert (failed.message, str(failed)) == ("for the client", "for the log")


async def test_a_defect_is_not_hidden(broker: Setup) -> None:
    with pytest.raises(ZeroDivisionError):
        await broker.open(ZeroDivisionError())


async def test_close(broker: Setup) -> None:
    await broker.connector.close_link()
    await broker.open()
    await broker.connector.close_link()
    assert await broker.workers.broker.receive() is None


async def test_the_relay_begins_with_what_both_sides_have_said(broker: Setup) -> None:
    """Connected is the relay's first word: nothing can come before it."""
    await broker.open()
    frame = Frame(b"the CONNECTED frame")
    broker.connector._link = BrokerLink(
        HostPort("b0", 6650), broker.workers.broker_stream, Connected(frame, CommandConnected(), b"more")
    )
    client, about = trio.testing.memory_stream_pair()[0], StoredRelay(client_address=CLIENT)
    start = broker.connector.relay_start(client, about, first_to_broker=b"a client in a hurry", session=None)
    assert (start.client, start.broker, start.stored) == (client, broker.workers.broker_stream, about)
    assert start == RelayStart(
        client,
        broker.workers.broker_stream,
        about,
        broker.workers.config.relay,
        first_to_broker=b"a client in a hurry",
        first_to_client=frame.encode() + b"more",
        session=None,
    )
