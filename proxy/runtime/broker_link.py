"""A connection to a broker, dialled and through its handshake: what relays and lookups both begin with."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, Refused, SendData
from proto.connect_rules import BrokerIdentity
from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import CommandConnect, ServerError
from proxy.config.types import Brokers
from proxy.runtime.credentials import Credentials
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.tasks import seconds

NOT_CONNECTED = "The proxy cannot connect to the broker"
NOT_TAKEN_IN = "The broker does not accept the proxy's own credentials"


class BrokerLinkFailed(Exception):
    """No link. ``reason`` is a short stable name for metrics; ``code`` and ``message`` are for the client, the text of
    the exception is for the log.
    """

    def __init__(self, reason: str, detail: str, *, code: int = ServerError.ServiceNotReady, message: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class BrokerLink:
    """A broker that has said Connected; ``connected.rest`` holds what it said after that."""

    stream: trio.abc.HalfCloseableStream
    connected: Connected


@dataclass(frozen=True, slots=True)
class BrokerDialer:
    """How to get a link: time limits, frame limit, and how a CONNECT is made from an identity."""

    limits: Brokers
    max_frame_bytes: int
    client_version: str

    async def open(
        self,
        broker: HostPort,
        addresses: Sequence[str],
        credentials: Credentials,
        make_connect: Callable[[BrokerIdentity], CommandConnect],
        original_principal: str = "",
    ) -> BrokerLink:
        """Dial the first of the addresses that answers, and lead the handshake. Raises BrokerLinkFailed.

        The addresses are dialled as they are given: whoever checked them must know that nothing else is.
        """
        timeout_s = seconds(self.limits.handshake_timeout_ms)
        stream: trio.abc.HalfCloseableStream | None = None
        linked = False
        try:
            with trio.fail_after(timeout_s):
                method, data = await credentials.answer(None)
                stream = await self._dial(broker, addresses)
                identity = BrokerIdentity(method, data, original_principal)
                await stream.send_all(commands.connect(make_connect(identity)))
                connected = await self._shake_hands(broker, stream, credentials)
                linked = True
                return BrokerLink(stream, connected)
        except trio.TooSlowError:
            detail = f"{broker} did not finish the handshake within {timeout_s} s"
            raise BrokerLinkFailed("timeout", detail, message=NOT_CONNECTED) from None
        except RpcError as error:
            raise BrokerLinkFailed(
                "credentials", f"no credentials for {broker}: {error}", message=NOT_CONNECTED
            ) from None
        except (trio.BrokenResourceError, RemoteProtocolError) as error:
            detail = f"{broker} broke off the handshake: {error.__cause__ or error}"
            raise BrokerLinkFailed("handshake", detail, message=NOT_CONNECTED) from None
        finally:
            if stream is not None and not linked:
                await trio.aclose_forcefully(stream)

    async def _dial(self, broker: HostPort, addresses: Sequence[str]) -> trio.abc.HalfCloseableStream:
        failures = []
        for address in addresses:
            try:
                with trio.fail_after(seconds(self.limits.connect_timeout_ms)):
                    return await dial(address, broker.port)
            except trio.TooSlowError:
                failures.append(f"{address}: no answer within {self.limits.connect_timeout_ms} ms")
            except OSError as error:
                failures.append(f"{address}: {error.strerror}")
        detail = f"cannot connect to {broker}: {'; '.join(failures) or 'no address'}"
        raise BrokerLinkFailed("unreachable", detail, message=NOT_CONNECTED)

    async def _shake_hands(
        self, broker: HostPort, stream: trio.abc.HalfCloseableStream, credentials: Credentials
    ) -> Connected:
        handshake = BrokerHandshake(max_frame_bytes=self.max_frame_bytes)
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
                        method, data = await credentials.answer(event.data)
                        await stream.send_all(
                            commands.auth_response(self.client_version, commands.PROTOCOL_VERSION, method, data)
                        )
                        handshake.challenge_answered()


def _refused(broker: HostPort, refused: Refused) -> BrokerLinkFailed:
    detail = f"{broker} refused the connection: {commands.error_name(refused.error)}: {refused.message}"
    if refused.error == ServerError.AuthenticationError:
        # The credentials were the proxy's: to tell the client that *it* failed to authenticate would send its owner
        # searching in the wrong place, and Java clients give up for good on this code.
        return BrokerLinkFailed("refused", detail, message=NOT_TAKEN_IN)
    return BrokerLinkFailed("refused", detail, code=refused.error, message=refused.message)


async def dial(address: str, port: int) -> trio.abc.HalfCloseableStream:
    """Connect to an IP address; raises OSError. No name is resolved on the way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        tune_socket(sock)
        await sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def tune_socket(sock: trio.socket.SocketType) -> None:
    """No delay for small frames; and let the kernel notice a peer that vanished without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
