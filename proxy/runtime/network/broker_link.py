"""A connection to a broker, dialled and through its handshake: what relays and lookups both begin with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, Refused, SendData
from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import CommandConnect, ServerError
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.credentials import Credentials
from proxy.runtime.network.dialing import Dialer, DialFailed
from proxy.runtime.rpc.client import RpcError

NOT_CONNECTED = "The proxy cannot connect to the broker"
REASONS_TO_TRY_ANOTHER_BROKER = frozenset({"unreachable", "tls", "timeout", "handshake"})
"""Reasons of a BrokerLinkFailed that say nothing of other brokers. What one refuses, the others refuse, too."""
RETRYABLE_REFUSALS = frozenset({ServerError.ServiceNotReady, ServerError.TooManyRequests})
"""What a broker refuses with that is starting, leaving, or has too much to do just now."""
PROXY_CREDENTIALS_REFUSED = "The broker does not accept the proxy's own credentials"


class BrokerLinkFailed(Exception):
    """No link. ``reason`` is a short stable name for metrics; ``code`` and ``message`` are for the client, the text of
    the exception is for the log. ``refusal``: what the broker itself said, where it refused.
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
    """A broker that has said Connected; ``connected.rest`` holds what it said after that.

    ``answers_challenges``: the broker was told that the proxy answers when it asks for fresh credentials.
    """

    broker: HostPort
    stream: trio.abc.HalfCloseableStream
    connected: Connected
    answers_challenges: bool = False


@dataclass(frozen=True, slots=True)
class BrokerLinkFactory:
    """How to get a link: how to dial, frame limit, and how a CONNECT is made from an identity."""

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
    ) -> BrokerLink:
        """Dial the first of the addresses that answers, and lead the handshake. Raises BrokerLinkFailed.

        ``make_connect`` makes a CONNECT of the proxy's own method and data. ``timeout_s``: for all of it; by default
        ``brokers.handshake_timeout_ms``.

        The addresses are dialled as they are given: whoever checked them must know that nothing else is.
        """
        if timeout_s is None:
            timeout_s = seconds(self.dialer.config.handshake_timeout_ms)
        stream: trio.abc.HalfCloseableStream | None = None
        linked = False
        try:
            with trio.fail_after(timeout_s):
                method, data = await credentials.auth_data_for(None)
                stream = await self.dialer.dial_any(broker, addresses)
                await stream.send_all(commands.connect(make_connect(method, data)))
                connected = await self._shake_hands(broker, stream, credentials)
                linked = True
                return BrokerLink(broker, stream, connected)
        except trio.TooSlowError:
            detail = f"{broker} did not finish the handshake within {timeout_s} s"
            raise BrokerLinkFailed("timeout", detail, message=NOT_CONNECTED) from None
        except DialFailed as error:
            raise BrokerLinkFailed(
                error.reason, f"cannot connect to {broker}: {error}", message=NOT_CONNECTED
            ) from None
        except RpcError as error:
            raise BrokerLinkFailed(
                "credentials", f"no credentials for {broker}: {error.reason}", message=NOT_CONNECTED
            ) from None
        except (trio.BrokenResourceError, RemoteProtocolError) as error:
            detail = f"{broker} broke off the handshake: {error.__cause__ or error}"
            raise BrokerLinkFailed("handshake", detail, message=NOT_CONNECTED) from None
        finally:
            if stream is not None and not linked:
                await trio.aclose_forcefully(stream)

    async def _shake_hands(
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
                        raise _refused(broker, event)
                    case SendData():
                        await stream.send_all(event.data)
                    case Challenged():
                        method, data = await credentials.auth_data_for(event.data)
                        await stream.send_all(
                            commands.auth_response(self.client_version, commands.PROTOCOL_VERSION, method, data)
                        )
                        handshake.on_answer_sent(complete=credentials.complete)


def _refused(broker: HostPort, refused: Refused) -> BrokerLinkFailed:
    detail = f"{broker} refused the connection: {commands.error_name(refused.error)}: {refused.message}"
    if refused.error == ServerError.AuthenticationError:
        # The credentials were the proxy's: to tell the client that *it* failed to authenticate would send its owner
        # searching in the wrong place, and Java clients give up for good on this code.
        return BrokerLinkFailed("refused", detail, message=PROXY_CREDENTIALS_REFUSED, refusal=refused)
    return BrokerLinkFailed("refused", detail, code=refused.error, message=refused.message, refusal=refused)
