"""Connections to brokers that have completed the Pulsar handshake; relays and lookups both start with one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, Refused, SendData
from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import CommandConnect, ServerError
from proto.rpc_pb2 import OriginalData
from proxy.common.errors import ProxyError
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.credentials import Credentials
from proxy.runtime.network.dialing import Dialer, DialFailed
from proxy.runtime.rpc.errors import RpcError

NOT_CONNECTED = "The proxy cannot connect to the broker"
REASONS_TO_TRY_ANOTHER_BROKER = frozenset({"unreachable", "tls", "timeout", "handshake"})
"""Reasons of a BrokerLinkFailed that concern one broker alone. What one broker refuses, the others refuse, too."""
RETRYABLE_REFUSALS = frozenset({ServerError.ServiceNotReady, ServerError.TooManyRequests})
"""Error codes of a broker that is starting, shutting down or overloaded: the same request may succeed later."""
PROXY_CREDENTIALS_REFUSED = "The broker does not accept the proxy's own credentials"


class BrokerLinkFailed(ProxyError):
    """No link to a broker. ``reason``: a short stable name for metrics; ``code`` and ``message``: for the client; the
    exception's text: for the log. ``refusal``: the broker's own error, if it sent one.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        code: int = ServerError.ServiceNotReady,
        message: str,
        refusal: Refused | None = None,
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.code = code
        self.message = message
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class BrokerLink:
    """A connection on which the broker has sent Connected; ``connected.rest`` holds the bytes that followed it.

    ``answers_challenges``: the CONNECT announced that the proxy answers when the broker asks for fresh credentials.
    ``original_data``: whether the broker checks clients' own credentials, as far as it is known. ``on_broker_end``: to
    be called when the broker ends the relay that the link is for (proxy.forwarder.workers.relay_outcomes).
    """

    broker: HostPort
    stream: trio.abc.HalfCloseableStream
    connected: Connected
    answers_challenges: bool = False
    original_data: OriginalData = OriginalData.ORIGINAL_DATA_UNKNOWN
    on_broker_end: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class BrokerLinkFactory:
    """A factory of broker links: dials a broker and performs the handshake."""

    dialer: Dialer
    max_frame_bytes: int
    client_version: str

    async def open_link(
        self,
        broker: HostPort,
        addresses: Sequence[str],
        credentials: Credentials,
        make_connect: Callable[[str, bytes], CommandConnect],
        *,
        timeout_s: float | None = None,
        announcement: bytes = b"",
    ) -> BrokerLink:
        """Connect to the first of the addresses that answers and perform the handshake. Raises BrokerLinkFailed.

        ``make_connect`` makes a CONNECT from the proxy's own method and data. ``timeout_s``: for dialing and handshake;
        None: ``brokers.handshake_timeout_ms``. ``announcement``: see Dialer.dial_any.

        Exactly these addresses are dialled, without another resolution, since the caller has checked them.
        """
        if timeout_s is None:
            timeout_s = seconds(self.dialer.config.handshake_timeout_ms)
        stream: trio.abc.HalfCloseableStream | None = None
        linked = False
        try:
            with trio.fail_after(timeout_s):
                method, data = await credentials.auth_data_for(None)
                stream = await self.dialer.dial_any(broker, addresses, announcement)
                await stream.send_all(commands.connect(make_connect(method, data)))
                connected = await self._perform_handshake(broker, stream, credentials)
                linked = True
                return BrokerLink(broker, stream, connected)
        except trio.TooSlowError:
            raise too_slow(broker, timeout_s) from None
        except DialFailed as error:
            raise not_reached(broker, error.reason, str(error)) from None
        except RpcError as error:
            raise without_credentials(broker, error) from None
        except (trio.BrokenResourceError, RemoteProtocolError) as error:
            raise broken_off(broker, error.__cause__ or error, self.dialer.header_hint) from None
        finally:
            if stream is not None and not linked:
                await trio.aclose_forcefully(stream)

    async def _perform_handshake(
        self, broker: HostPort, stream: trio.abc.HalfCloseableStream, credentials: Credentials
    ) -> Connected:
        handshake = BrokerHandshake(max_frame_bytes=self.max_frame_bytes, complete=credentials.complete)
        while True:
            handshake.receive_data(await stream.receive_some(65536))
            while (event := handshake.next_event()) is not None:
                match event:
                    case Connected():
                        return event
                    case Refused():
                        raise refused_by(broker, event)
                    case SendData():
                        await stream.send_all(event.data)
                    case Challenged():
                        method, data = await credentials.auth_data_for(event.data)
                        await stream.send_all(
                            commands.auth_response(self.client_version, commands.PROTOCOL_VERSION, method, data)
                        )
                        handshake.on_answer_sent(complete=credentials.complete)


def not_reached(broker: HostPort, reason: str, detail: str) -> BrokerLinkFailed:
    """Return the failure of a connection that was not established."""
    return BrokerLinkFailed(reason, f"cannot connect to {broker}: {detail}", message=NOT_CONNECTED)


def without_credentials(broker: HostPort, error: RpcError) -> BrokerLinkFailed:
    """Return the failure of a handshake for which no auth worker gave credentials."""
    detail = f"no credentials for {broker}: {error.reason}"
    return BrokerLinkFailed("credentials", detail, message=NOT_CONNECTED)


def too_slow(broker: HostPort, timeout_s: float) -> BrokerLinkFailed:
    """Return the failure of a handshake that took too long."""
    detail = f"{broker} did not finish the handshake within {timeout_s} s"
    return BrokerLinkFailed("timeout", detail, message=NOT_CONNECTED)


def broken_off(broker: HostPort, error: BaseException, hint: str = "") -> BrokerLinkFailed:
    """Return the failure of a handshake that the broker has ended, or in which it broke the protocol."""
    return BrokerLinkFailed("handshake", f"{broker} broke off the handshake: {error}{hint}", message=NOT_CONNECTED)


def refused_by(broker: HostPort, refused: Refused) -> BrokerLinkFailed:
    """Return the failure of a handshake that the broker has refused."""
    detail = f"{broker} refused the connection: {commands.error_name(refused.error)}: {refused.message}"
    if refused.error == ServerError.AuthenticationError:
        # The credentials were the proxy's: with this code the client's owner would search in the wrong place, and Java
        # clients give up for good on it.
        return BrokerLinkFailed("refused", detail, message=PROXY_CREDENTIALS_REFUSED, refusal=refused)
    return BrokerLinkFailed("refused", detail, code=refused.error, message=refused.message, refusal=refused)
