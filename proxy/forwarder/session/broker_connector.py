"""The broker's side of a connection that is to become a relay."""

import trio

from proto.connect_rules import AUTHENTICATION_FAILED
from proto.pulsar_pb2 import CommandConnect, ServerError
from proto.rpc_pb2 import Status, StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.relay.expiring.relay_session import RelaySession
from proxy.forwarder.relay.start import RelayStart
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.clients import TargetRefused, WorkerClients
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


class BrokerConnector:
    """The connection of one client to its broker: ``open_link`` once, ``close_link`` where no relay has started."""

    def __init__(self, workers: WorkerClients, client_address: str) -> None:
        self._workers = workers
        self._client_address = client_address
        self._link: BrokerLink | None = None

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

    async def open_link(self, connect: CommandConnect, identity: ClientIdentity) -> None:
        """Have the target checked, connect to it, and send CONNECT for the client. Raises BrokerConnectFailed."""
        try:
            self._link = await self._workers.open_broker(connect, identity, self._client_address)
        except TargetRefused as refused:
            code = ServerError.ServiceNotReady
            raise BrokerConnectFailed(
                DisconnectCause.TARGET_DENIED, refused.reason, code, TARGET_REFUSED, str(refused)
            ) from None
        except BrokerLinkFailed as failed:
            raise BrokerConnectFailed(
                DisconnectCause.BROKER_FAILED, failed.reason, failed.code, failed.message, str(failed)
            ) from None
        except RpcError as error:
            if isinstance(error, RpcCallRefused) and error.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE:
                code = ServerError.AuthenticationError
                raise BrokerConnectFailed(
                    DisconnectCause.AUTHENTICATION_FAILED, "bad_principal", code, AUTHENTICATION_FAILED, str(error)
                ) from None
            detail = f"no answer from the lookup worker: {error}"
            raise BrokerConnectFailed(
                DisconnectCause.LOOKUP_UNAVAILABLE, "lookup_worker", ServerError.ServiceNotReady, CANNOT_CHECK, detail
            ) from None

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
