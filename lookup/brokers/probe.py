"""Probe of a broker: a PING before any CONNECT.

A broker answers it in every state: it shows that a broker (not just an open port) is there, needs no credentials, and
leaves no authentication failure in the broker's log.
"""

from collections.abc import Sequence

import trio

from proto import commands
from proto.addresses import HostPort
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.dialing import Dialer, DialFailed


async def probe(dialer: Dialer, broker: HostPort, addresses: Sequence[str]) -> tuple[bool, str]:
    """Probe a broker once; return whether it answered, and a text for an operator."""
    timeout_s = seconds(dialer.config.handshake_timeout_ms)
    with trio.move_on_after(timeout_s):
        try:
            async with await dialer.dial_any(broker, addresses) as stream:
                await _expect_pong(stream)
        except DialFailed as error:
            return False, str(error)
        except (trio.BrokenResourceError, RemoteProtocolError) as error:
            return False, f"it does not speak Pulsar: {error}{dialer.header_hint}"
        return True, f"answers at {' or '.join(addresses)}"
    return False, f"no answer within {timeout_s} s"


async def _expect_pong(stream: trio.abc.HalfCloseableStream) -> None:
    decoder = FrameDecoder(max_frame_bytes=1024)
    await stream.send_all(commands.ping())
    while (frame := decoder.next_frame()) is None:
        data = await stream.receive_some(4096)
        if not data:
            raise RemoteProtocolError("the connection was closed")
        decoder.receive_data(data)
    command = commands.parse_command(frame.command)
    if command.type != BaseCommand.PONG:
        raise RemoteProtocolError(f"{commands.command_name(command.type)} in answer to PING")
