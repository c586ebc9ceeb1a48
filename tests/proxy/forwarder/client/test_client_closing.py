"""ConnectionCloser: a client that does not read is not waited for, and one that reads gets its time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from proxy.forwarder.client.transport import ClientTransport, ConnectionCloser


async def last_word(stream: trio.abc.HalfCloseableStream, nursery: trio.Nursery) -> ConnectionCloser:
    """Said, as far as the client takes it; nothing more is read from it."""
    transport = ClientTransport(stream, nursery, max_frame_bytes=1 << 20, write_timeout_ms=1000)
    transport.start_reading(lambda: None, lambda _error: None)
    closer = ConnectionCloser(transport)
    closer.set_final_frame(b"the last word")
    await closer.send_final_frame()
    await transport.stop_reading()
    return closer


async def test_a_client_that_did_not_read_its_final_frame_is_closed_without_a_further_wait(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    takes_nothing = trio.testing.MemorySendStream(send_all_hook=trio.sleep_forever)
    stream = trio.StapledStream(takes_nothing, trio.testing.MemoryReceiveStream())
    closer = await last_word(stream, nursery)
    began = trio.current_time()
    assert began == pytest.approx(1.0)
    await closer.close_connection()
    assert trio.current_time() == began


async def test_a_client_may_read_its_last_word_though_the_process_ends(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A close with unread bytes would be a reset, and take the word away from it."""
    ours, theirs = trio.testing.memory_stream_pair()
    closer = await last_word(ours, nursery)
    with trio.CancelScope() as ending:
        ending.cancel()
        await closer.close_connection()
    assert trio.current_time() == pytest.approx(1.0), "it had its time"
    assert await theirs.receive_some() == b"the last word"
