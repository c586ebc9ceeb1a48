"""Connections to brokers: TCP, and TLS where ``brokers.service_url`` asks for it."""

import socket
from collections.abc import Sequence

import trio

from proto.addresses import HostPort, speaks_tls
from proxy.config.types import Brokers
from proxy.runtime.congestion import use_congestion_control
from proxy.runtime.tasks import seconds
from proxy.runtime.tls import TlsFailed, TlsStream, broker_context


class NotDialled(Exception):
    """No connection; ``reason`` is a short stable name for metrics, the text is for the log."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Dialer:
    """See the module. Raises ConfigError where certificates cannot be used."""

    def __init__(self, config: Brokers) -> None:
        self.config = config
        self._tls = broker_context(config.tls) if speaks_tls(config.service_url) else None

    async def dial_any(self, broker: HostPort, addresses: Sequence[str]) -> trio.abc.HalfCloseableStream:
        """Connect to the first of a broker's IP addresses that answers. Raises NotDialled.

        The addresses are dialled as they are given: whoever checked them must know that nothing else is.
        """
        reason, failures = "unreachable", []
        for address in addresses:
            try:
                with trio.fail_after(seconds(self.config.connect_timeout_ms)):
                    return await self._dial(broker, address)
            except trio.TooSlowError:
                failures.append(f"{address}: no answer within {self.config.connect_timeout_ms} ms")
            except TlsFailed as error:
                reason = "tls"
                failures.append(f"{address}: {error}")
            except OSError as error:
                failures.append(f"{address}: {error.strerror}")
        raise NotDialled(reason, "; ".join(failures) or "no address")

    async def _dial(self, broker: HostPort, address: str) -> trio.abc.HalfCloseableStream:
        context = None if self._tls is None else await self._tls.current()
        transport = await _connect(address, broker.port, self.config.congestion_control)
        if context is None:
            return transport
        shaken = False
        try:
            stream = TlsStream(transport, context, server_side=False, host=broker.host)
            await stream.handshake()
            shaken = True
        except ValueError as error:
            raise TlsFailed(f"{broker.host!r} is no name for a certificate: {error}") from None
        finally:
            if not shaken:
                await trio.aclose_forcefully(transport)
        return stream


async def _connect(address: str, port: int, congestion_control: str) -> trio.SocketStream:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        tune_socket(sock)
        use_congestion_control(sock, congestion_control)
        await sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def tune_socket(sock: trio.socket.SocketType) -> None:
    """No delay for small frames; and let the kernel notice a peer that vanished without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
