"""proxy.supervisor.handover.address_tables: each forwarder's table goes to all others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog.testing
import trio

from proto.rpc_pb2 import StoreMessage
from proxy.runtime.shared.address_tables import AddressTables
from proxy.runtime.shared.fd_store_channel import StoreChannel, StoreLost, close_descriptors, create_store_sockets
from proxy.supervisor.handover.address_tables import PUBLISHED_MAX, AddressTableChannel, AddressTableExchange
from proxy.supervisor.handover.fd_store import FdStoreSlot


def new_table() -> int:
    tables: list[int] = []
    maker = AddressTables()
    maker.start_publishing(tables.append)
    maker.track_connections({"192.0.2.1": 2})
    return tables[0]


@pytest.fixture
def exchange() -> Iterator[AddressTableExchange]:
    exchange = AddressTableExchange()
    yield exchange
    exchange.close()


class Forwarder:
    """One that has started."""

    def __init__(self, exchange: AddressTableExchange, place: int) -> None:
        ours, theirs = create_store_sockets()
        self.ours, self.theirs = StoreChannel(ours), StoreChannel(theirs)
        self.line = AddressTableChannel(exchange, place)
        self.line.on_forwarder_started(self.ours)

    def receive(self) -> list[int]:
        """Whose tables it was sent."""
        places = []
        while True:
            try:
                data, ancillary, *_ = self.theirs.sock.recvmsg(1000, 1000)
            except BlockingIOError:
                return places
            places += StoreMessage.FromString(data).address_tables
            for *_, content in ancillary:
                os.close(int.from_bytes(content[:4], "little"))

    def close(self) -> None:
        self.line.on_channel_closed()
        self.ours.sock.close()
        self.theirs.sock.close()


def test_tables_go_to_all_others(exchange: AddressTableExchange) -> None:
    one, other = Forwarder(exchange, 0), Forwarder(exchange, 1)
    one.line.accept_published([new_table()])
    assert (one.receive(), other.receive()) == ([], [0])
    other.line.accept_published([new_table()])
    late = Forwarder(exchange, 2)
    assert (one.receive(), other.receive(), late.receive()) == ([1], [], [0, 1])
    other.close()
    one.line.accept_published([new_table()])
    assert late.receive() == [0]
    successor = Forwarder(exchange, 1)
    assert successor.receive() == [0], "its predecessor's is its own"
    for forwarder in (one, late, successor):
        forwarder.close()


def test_a_forwarder_that_does_not_read_delays_no_other(exchange: AddressTableExchange) -> None:
    one, other = Forwarder(exchange, 0), Forwarder(exchange, 1)
    other.ours.sock.setsockopt(1, 7, 1)  # SO_SNDBUF: as little as may be
    with structlog.testing.capture_logs() as logs:
        for _ in range(PUBLISHED_MAX):
            one.line.accept_published([new_table()])
    assert {entry["log_level"] for entry in logs} == {"warning"}
    one.close()
    other.close()


@pytest.mark.parametrize("what", ["no table", "none", "two"])
def test_a_forwarder_that_publishes_an_invalid_address_table_is_ended(
    exchange: AddressTableExchange, what: str
) -> None:
    """Security: other forwarders map the table, and would crash if its memory was truncated."""
    one, other = Forwarder(exchange, 0), Forwarder(exchange, 1)
    given = {"no table": [os.memfd_create("x")], "none": [], "two": [new_table(), new_table()]}
    for name, descriptors in given.items():
        if name == what:
            with pytest.raises(StoreLost):
                one.line.accept_published(descriptors)
        else:
            close_descriptors(descriptors)
    assert other.receive() == []
    one.close()
    other.close()


def test_too_many_tables_end_the_forwarder(exchange: AddressTableExchange) -> None:
    one = Forwarder(exchange, 0)
    for _ in range(PUBLISHED_MAX):
        one.line.accept_published([new_table()])
    with pytest.raises(StoreLost):
        one.line.accept_published([new_table()])
    one.close()


@pytest.mark.parametrize("crash_safe", [True, False])
async def test_by_the_line_to_the_fd_store(
    exchange: AddressTableExchange, nursery: trio.Nursery, *, crash_safe: bool
) -> None:
    other = Forwarder(exchange, 1)
    ours, theirs = (StoreChannel(sock) for sock in create_store_sockets())
    store_slot = FdStoreSlot()
    ended = trio.Event()

    async def keep() -> None:
        await store_slot.serve_forwarder(
            ours, list, pid=7, is_new=True, tables=exchange.open_channel(0), stores_relays=crash_safe
        )
        ended.set()

    nursery.start_soon(keep)
    complete = False
    while not complete:
        received = await theirs.receive()
        assert received is not None
        close_descriptors(received[1])
        complete = received[0].complete
    table = new_table()
    await theirs.send(StoreMessage(address_tables=[0]), (table,))
    os.close(table)
    await trio.testing.wait_all_tasks_blocked()
    assert other.receive() == [0]
    theirs.close()
    await ended.wait()
    other.close()
    os.close(store_slot.table_fd)
