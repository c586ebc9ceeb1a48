"""The broker's side of a connection that is to become a relay."""

from collections.abc import Callable

import trio

from proto.connect_rules import AUTHENTICATION_FAILED
from proto.pulsar_pb2 import CommandConnect, ServerError
from proto.rpc_pb2 import Status, StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.terms import RelaySession
from proxy.forwarder.relay.start import RelayStart
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.broker_links import BrokerRequest, TargetRefused
from proxy.forwarder.workers.broker_opening import BrokerOpening, Outcome
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import close_forcefully
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError

TARGET_REFUSED = "Target broker cannot be validated."
"""What a client is sent for a denied target: the same words as the Java proxy's, and no more."""

CANNOT_CHECK = "The proxy cannot check the target broker at the moment"


class BrokerConnectFailed(Exception):
    """No broker could be connected.

    Pulsar's ``code`` and ``message`` are for the client, ``reason`` is a metric's label, the text is for the log.
    """

    def __init__(self, cause: DisconnectCause, reason: str, code: int, message: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.reason = reason
        self.code = code
        self.message = message


OnConnected = Callable[[BrokerConnectFailed | None], None]


class BrokerConnector:
    """The connection of one client to its broker: ``connect`` once, ``close_link`` where no relay has started.

    ``tasks`` spawns the task for a connection that needs one.
    """

    def __init__(self, workers: WorkerClients, client_address: str, deadlines: Deadlines, tasks: TaskSpawner) -> None:
        self._workers = workers
        self._client_address = client_address
        self._deadlines = deadlines
        self._tasks = tasks
        self._link: BrokerLink | None = None
        self._opening: BrokerOpening | None = None
        self._asked: BrokerRequest
        self._on_done: OnConnected

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection."""
        return self._link is not None

    @property
    def link(self) -> BrokerLink:
        """Return the connection, with the broker's CONNECTED. Raises RuntimeError where it is not open."""
        if self._link is None:
            raise RuntimeError("a relay without a broker")
        return self._link

    def connect(self, connect: CommandConnect, identity: ClientIdentity, on_done: OnConnected) -> None:
        """Have the target checked, connect to it, and send CONNECT for the client.

        ``on_done`` is called once, with None or why there is no connection, unless it is abandoned before.
        """
        self._asked, self._on_done = BrokerRequest(connect, identity, self._client_address), on_done
        self._opening = self._workers.start_opening(self._asked, self._deadlines, self._on_opened)
        if self._opening is None:
            self._tasks.start_soon(self._open_in_task)

    def _on_opened(self, outcome: Outcome) -> None:
        self._opening = None
        if isinstance(outcome, BrokerLink):
            self._link = outcome
            self._on_done(None)
        else:
            self._on_done(_failure(outcome))

    async def _open_in_task(self) -> None:
        try:
            self._link = await self._workers.open_broker(self._asked)
        except (TargetRefused, BrokerLinkFailed, RpcError) as error:
            self._on_done(_failure(error))
        else:
            self._on_done(None)

    def abandon(self) -> None:
        """Connect no more: the client has gone."""
        if self._opening is not None:
            self._opening.abandon()

    def relay_start(
        self,
        client: trio.abc.HalfCloseableStream,
        stored: StoredRelay,
        *,
        first_to_broker: bytes,
        session: RelaySession | None,
    ) -> RelayStart:
        """Return what the relay between a client's stream and the broker's needs to start.

        CONNECTED goes out as the relay's first bytes, so that no other byte can precede it.
        """
        link = self.link
        return RelayStart(
            client,
            link.stream,
            stored,
            self._workers.config.relay,
            first_to_broker=first_to_broker,
            first_to_client=link.connected.frame.encode() + link.connected.trailing_data,
            session=session,
        )

    async def close_link(self) -> None:
        """Close it, if it is open."""
        if self._link is not None:
            await close_forcefully(self._link.stream)


def _failure(error: TargetRefused | BrokerLinkFailed | RpcError) -> BrokerConnectFailed:
    match error:
        case TargetRefused():
            code = ServerError.ServiceNotReady
            return BrokerConnectFailed(DisconnectCause.TARGET_DENIED, error.reason, code, TARGET_REFUSED, str(error))
        case BrokerLinkFailed():
            return BrokerConnectFailed(
                DisconnectCause.BROKER_FAILED, error.reason, error.code, error.message, str(error)
            )
    if isinstance(error, RpcCallRefused) and error.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE:
        code = ServerError.AuthenticationError
        return BrokerConnectFailed(
            DisconnectCause.AUTHENTICATION_FAILED, "bad_principal", code, AUTHENTICATION_FAILED, str(error)
        )
    detail = f"no answer from the lookup worker: {error}"
    return BrokerConnectFailed(
        DisconnectCause.LOOKUP_UNAVAILABLE, "lookup_worker", ServerError.ServiceNotReady, CANNOT_CHECK, detail
    )
