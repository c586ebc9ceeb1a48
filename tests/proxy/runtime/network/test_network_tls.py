"""proxy.runtime.network.tls: against Python's own TLS, byte for byte, and what operators read when there is none."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from cryptography.hazmat.primitives import serialization
from e2e.lab.certificates import Authority, Pair, replace
from runtime_fakes import tcp_streams

from proxy.common import reloading_file as watched
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import file_stamps, take_over_held_files
from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.network import tls
from proxy.runtime.network.certificate_ends import read_ends
from proxy.runtime.network.tls import RECEIVE_BYTES, TlsFailed, TlsStream, broker_context, listener_contexts
from proxy.runtime.network.tls_certificates import NamedContexts
from proxy.runtime.network.tls_session import TlsSession, _violation

PATIENCE_S = 60
TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
VERSIONS = pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3], ids=["1.2", "1.3"])
ROLES = pytest.mark.parametrize("serves", [True, False], ids=["as server", "as client"])

Stream = trio.abc.HalfCloseableStream


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "strange")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.server("server")


def server_context(pair: Pair, **more: Any) -> ssl.SSLContext:
    """As a listener's configuration makes it."""
    return server_contexts(pair, **more).default


def server_contexts(pair: Pair, **more: Any) -> NamedContexts:
    """As a listener's configuration makes them."""
    return listener_contexts("listener[0].tls", ListenerTls(certificate=pair.certificate, key=pair.key, **more)).value


def client_context(authority: Authority, **more: Any) -> ssl.SSLContext:
    """As the configuration of brokers makes it."""
    return broker_context(BrokerTls(trust=authority.file, **more)).value


async def shake(*streams: TlsStream | trio.SSLStream[Any]) -> list[BaseException | None]:
    """All handshakes at the same time; what each raised."""
    outcomes: list[BaseException | None] = [None] * len(streams)

    async def one(index: int, stream: TlsStream | trio.SSLStream[Any]) -> None:
        try:
            await (stream.handshake() if isinstance(stream, TlsStream) else stream.do_handshake())
        except (TlsFailed, trio.BrokenResourceError) as error:
            outcomes[index] = error
            await (stream.transport if isinstance(stream, TlsStream) else stream.transport_stream).aclose()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for index, stream in enumerate(streams):
                nursery.start_soon(one, index, stream)
    return outcomes


@asynccontextmanager
async def pythons_own(
    authority: Authority, server: Pair, version: ssl.TLSVersion, *, serves: bool
) -> AsyncIterator[tuple[TlsStream, trio.SSLStream[Any]]]:
    """Ours, and at the other end Python's ssl (by way of Trio's stream), through TCP."""
    here, there = tcp_streams()
    contexts = {True: server_context(server), False: client_context(authority)}
    contexts[not serves].minimum_version = contexts[not serves].maximum_version = version
    ours = TlsStream(here, contexts[serves], server_side=serves, host=None if serves else "localhost")
    host = "localhost" if serves else None
    theirs = trio.SSLStream(
        there, contexts[not serves], server_side=not serves, server_hostname=host, https_compatible=True
    )
    try:
        assert await shake(ours, theirs) == [None, None]
        yield ours, theirs
    finally:
        for stream in (here, there):
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def both_ours(
    authority: Authority, server: Pair, version: ssl.TLSVersion = TLS_1_3
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Server and client, both ours: Trio's stream cannot end one direction alone."""
    here, there = tcp_streams()
    context = client_context(authority)
    context.maximum_version = version
    one = TlsStream(here, server_context(server), server_side=True)
    other = TlsStream(there, context, server_side=False, host="localhost")
    try:
        assert await shake(one, other) == [None, None]
        yield one, other
    finally:
        for stream in (here, there):
            await trio.aclose_forcefully(stream)


async def read(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    found = bytearray()
    with trio.fail_after(PATIENCE_S):
        while len(found) < size:
            data = await stream.receive_some(size - len(found))
            assert data, f"an early end after {len(found)} bytes"
            found += data
    return bytes(found)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    found = bytearray()
    with trio.fail_after(PATIENCE_S):
        while data := await stream.receive_some(100_000):
            found += data
    return bytes(found)


# ---- bytes


@VERSIONS
@ROLES
async def test_much_both_ways_at_once(
    authority: Authority, server: Pair, version: ssl.TLSVersion, *, serves: bool
) -> None:
    data, back = (random.Random(seed).randbytes(3_000_017) for seed in (1, 2))
    async with pythons_own(authority, server, version, serves=serves) as (ours, theirs):
        assert ours.session._tls.version() == {TLS_1_2: "TLSv1.2", TLS_1_3: "TLSv1.3"}[version]
        found: dict[str, bytes] = {}

        async def receive(name: str, stream: Stream | trio.SSLStream[Any]) -> None:
            found[name] = await read(stream, 3_000_017)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send_all, data)
            nursery.start_soon(theirs.send_all, back)
            nursery.start_soon(receive, "ours", ours)
            nursery.start_soon(receive, "theirs", theirs)
    assert found == {"ours": back, "theirs": data}


@VERSIONS
async def test_byte_by_byte(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    data = bytes(range(256))
    async with pythons_own(authority, server, version, serves=True) as (ours, theirs):
        for byte in data:
            await ours.send_all(bytes([byte]))
            await theirs.send_all(bytes([byte]))
        assert await read(theirs, 256) == await read(ours, 256) == data
        await theirs.send_all(data)
        assert [await ours.receive_some(1) for _ in data] == [bytes([byte]) for byte in data]


async def test_nothing_at_all_can_be_sent(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        await one.send_all(b"")
        await one.send_all(memoryview(b"x"))
        await one.send_all(bytearray(b"y"))
        assert await read(other, 2) == b"xy"


async def test_several_tasks_may_send(authority: Authority, server: Pair) -> None:
    """What each sends stays in one piece."""
    pieces = [bytes([number]) * 100_000 for number in range(4)]
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        for piece in pieces:
            nursery.start_soon(one.send_all, piece)
        found = await read(other, 400_000)
    assert sorted(found[at : at + 100_000] for at in range(0, 400_000, 100_000)) == pieces


async def test_sending_goes_on_while_receiving_waits(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        nursery.start_soon(one.receive_some)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await one.send_all(b"on")
        assert await read(other, 2) == b"on"
        await other.send_all(b".")


async def test_receiving_goes_on_while_sending_waits(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, bytes(50_000_000))
        await trio.testing.wait_all_tasks_blocked(0.01)
        await other.send_all(b"through")
        assert await read(one, 7) == b"through"
        nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_nothing(authority: Authority, server: Pair) -> None:
    """Where a client becomes a relay, its reader is cancelled."""
    data = random.Random(3).randbytes(200_000)
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:

        async def send_in_pieces() -> None:
            for at in range(0, len(data), 7001):
                await other.send_all(data[at : at + 7001])
                await trio.lowlevel.checkpoint()

        nursery.start_soon(send_in_pieces)
        found = bytearray()
        with trio.fail_after(PATIENCE_S):
            while len(found) < len(data):
                with trio.CancelScope() as scope:
                    nursery.start_soon(cancel_soon, scope)
                    found += await one.receive_some(5000)
    assert found == data


async def cancel_soon(scope: trio.CancelScope) -> None:
    await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_no_more_than_asked_for(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        await other.send_all(bytes(100_000))
        sizes = [len(await one.receive_some(70)) for _ in range(10)]
        assert set(sizes) == {70}
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert 0 < len(await one.receive_some()) <= RECEIVE_BYTES


async def test_several_records_at_once(authority: Authority, server: Pair) -> None:
    """A record holds 16 KiB at most: to take them one by one would cost a turn each."""
    async with both_ours(authority, server) as (one, other):
        for _ in range(20):
            other.session._tls.write(b"small")
        await other.transport.send_all(other.session._outgoing.read())
        assert await one.receive_some() == b"small" * 20


async def test_memory_is_bounded_where_the_peer_does_not_read(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, bytes(50_000_000))
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert one.session._outgoing.pending < 2 * RECEIVE_BYTES
        with trio.move_on_after(0.05):
            await other.send_all(bytes(50_000_000))
        assert one.session._incoming.pending == 0, "nothing is read ahead of who asks for it"
        nursery.cancel_scope.cancel()


async def test_answers_of_tls_itself_do_not_pile_up(authority: Authority, server: Pair) -> None:
    """A peer that reads nothing while it asks for new keys again and again (RFC 8446, section 4.6.3) is not read."""
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        await nursery.start(somebody_is_sending, one)
        ask_for_new_keys(one.session)

        async def provoke() -> None:
            while True:
                await other.transport.send_all(RECORD)

        nursery.start_soon(provoke)
        nursery.start_soon(one.receive_some)
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert one.session.waiting_record_bytes < 2 * RECEIVE_BYTES
        nursery.cancel_scope.cancel()


class InTwoHalves:
    """A transport that takes time for what it sends."""

    def __init__(self) -> None:
        self.sent = bytearray()

    async def send_all(self, data: bytes) -> None:
        self.sent += data[: len(data) // 2]
        await trio.sleep(1)
        self.sent += data[len(data) // 2 :]

    async def receive_some(self, _size: int) -> bytes:
        if self.sent:
            await trio.sleep_forever()
        return RECORD


async def test_an_answer_of_tls_itself_is_not_cut_off_by_a_cancellation(
    server: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    """The rest would be missing before all that comes behind it: where a client becomes a relay, its reader goes."""
    transport = InTwoHalves()
    one = TlsStream(transport, server_context(server), server_side=True)  # type: ignore[arg-type]
    ask_for_new_keys(one.session)
    with trio.move_on_after(0.5):
        await one.receive_some()
    assert transport.sent == bytes(1000)


async def test_an_answer_that_is_not_taken(
    server: Pair, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    here, there = trio.testing.lockstep_stream_pair()
    one = TlsStream(here, server_context(server), server_side=True)  # type: ignore[arg-type]
    nursery.start_soon(there.send_all, RECORD)
    ask_for_new_keys(one.session)
    with pytest.raises(trio.BrokenResourceError, match="does not read"):
        await one.receive_some()
    assert trio.current_time() == pytest.approx(tls.FLUSH_TIMEOUT_S)


async def test_an_answer_of_tls_itself_goes_with_what_is_being_sent(authority: Authority, server: Pair) -> None:
    """It does not keep who receives from the bytes behind it."""
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        await nursery.start(somebody_is_sending, one)
        one.session._outgoing.write(b"an answer")
        nursery.start_soon(other.send_all, b"through")
        assert await read(one, 7) == b"through"
        assert one.session._outgoing.pending
        nursery.cancel_scope.cancel()


async def somebody_is_sending(stream: TlsStream, task_status: trio.TaskStatus[None]) -> None:
    """To a peer that does not read."""
    async with stream._sending:
        task_status.started()
        await trio.sleep_forever()


RECORD = b"\x17\x03\x03" + (4000).to_bytes(2, "big") + bytes(4000)


def ask_for_new_keys(session: TlsSession) -> None:
    """What OpenSSL does with a record that asks for new keys: an answer, and nothing for who reads."""

    def read(_size: int, _into: memoryview) -> int:
        session._incoming.read()
        session._outgoing.write(bytes(1000))
        raise ssl.SSLWantReadError

    session._read = read  # type: ignore[assignment]


# ---- ends


@VERSIONS
async def test_the_end_of_one_direction_leaves_the_other(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    data = random.Random(4).randbytes(300_000)
    for ours in (True, False):
        async with both_ours(authority, server, version) as pair:
            one, other = pair if ours else reversed(pair)
            await one.send_all(b"last words")
            await one.send_eof()
            assert await read_all(other) == b"last words"
            assert await other.receive_some() == b"", "and still the end"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.send_all, data)
                assert await read(one, len(data)) == data
            await other.send_eof()
            assert await read_all(one) == b""


@VERSIONS
async def test_our_end_loses_nothing_that_the_peer_had_sent(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    """Bytes that are in our hands, but that are unread yet, when we end our direction."""
    data = random.Random(5).randbytes(60_000)
    async with both_ours(authority, server, version) as (one, other):
        await other.send_all(data)
        await trio.testing.wait_all_tasks_blocked(0.02)
        found = await one.receive_some(10)
        await one.send_eof()
        await other.send_all(b"later")
        await other.send_eof()
        assert found + await read_all(one) == data + b"later"


@VERSIONS
async def test_our_end_between_two_halves_of_a_record(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    async with both_ours(authority, server, version) as (one, other):
        other.session._tls.write(b"the first half and the other")
        record = other.session._outgoing.read()
        await other.transport.send_all(record[:30])
        with trio.move_on_after(0.02):
            await one.receive_some()
        await one.send_eof()
        await other.transport.send_all(record[30:])
        await other.send_eof()
        assert await read_all(one) == b"the first half and the other"


@VERSIONS
async def test_to_end_twice_is_to_end_once(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    async with both_ours(authority, server, version) as (one, other):
        await one.send_eof()
        await other.send_all(b"still here")
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert await one.receive_some(1) == b"s"
        await one.send_eof()
        assert await read(one, 9) == b"till here"
        assert await read_all(other) == b""


async def test_our_end_waits_for_what_is_being_sent(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other), trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, bytes(10_000_000))
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.start_soon(one.send_eof)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(await read_all(other)) == 10_000_000


@VERSIONS
@pytest.mark.parametrize("proper", [True, False])
async def test_pythons_own_end(authority: Authority, server: Pair, version: ssl.TLSVersion, *, proper: bool) -> None:
    """With close_notify or without: Pulsar's frames say themselves whether they are whole."""
    async with pythons_own(authority, server, version, serves=True) as (ours, theirs):
        await ours.send_all(b"hello")
        assert await read(theirs, 5) == b"hello"
        await theirs.send_all(b"last words")
        if proper:
            await theirs.aclose()
        else:
            await theirs.transport_stream.aclose()
        assert await read_all(ours) == b"last words"


@VERSIONS
async def test_our_end_is_a_proper_one(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    async with pythons_own(authority, server, version, serves=True) as (ours, theirs):
        theirs._https_compatible = False  # who then insists on close_notify
        await ours.send_all(b"last words")
        await ours.send_eof()
        assert await read_all(theirs) == b"last words"


@VERSIONS
async def test_an_end_without_close_notify_of_one_who_listens_no_more(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    """OpenSSL has an alert to send, which cannot be sent: still no more than the end."""
    async with in_memory(authority, server, version) as (one, other):
        await other.send_all(b"last words")
        await other.aclose()
        assert await read_all(one) == b"last words"


@asynccontextmanager
async def in_memory(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Both ours; where a peer has gone, to send is an error at once."""
    here, there = trio.testing.memory_stream_pair()
    context = client_context(authority)
    context.maximum_version = version
    streams = (
        TlsStream(here, server_context(server), server_side=True),  # type: ignore[arg-type]
        TlsStream(there, context, server_side=False, host="localhost"),  # type: ignore[arg-type]
    )
    assert await shake(*streams) == [None, None]
    yield streams


async def test_a_close_without_an_end_is_none(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        await one.aclose()
        assert await other.receive_some() == b""
        with pytest.raises(trio.ClosedResourceError):
            await one.send_all(b"x")


async def test_an_end_in_the_middle_of_a_record(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        one.session._tls.write(b"only half of this")
        record = one.session._outgoing.read()
        await one.transport.send_all(record[: len(record) // 2])
        await one.transport.send_eof()
        assert await other.receive_some() == b""


async def test_a_reset(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        other.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await other.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await one.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await one.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await one.send_eof()


@VERSIONS
async def test_a_corrupt_record(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    async with both_ours(authority, server, version) as (one, other):
        one.session._tls.write(b"good as gold")
        record = bytearray(one.session._outgoing.read())
        record[-1] ^= 1
        await one.transport.send_all(record)
        with pytest.raises(trio.BrokenResourceError, match=r"bad record mac|decryption failed"):
            await other.receive_some()


@VERSIONS
async def test_a_corrupt_record_behind_a_good_one_is_no_end(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    async with both_ours(authority, server, version) as (one, other):
        one.session._tls.write(b"good")
        good = one.session._outgoing.read()
        one.session._tls.write(b"as gold")
        record = bytearray(one.session._outgoing.read())
        record[-1] ^= 1
        await one.transport.send_all(good + record)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert await other.receive_some() == b"good"
        with pytest.raises(trio.BrokenResourceError):
            await other.receive_some()


async def test_plain_bytes_after_the_handshake_break_the_stream(authority: Authority, server: Pair) -> None:
    async with both_ours(authority, server) as (one, other):
        await one.transport.send_all(b"\x00\x00\x00\x05plain")
        with pytest.raises(trio.BrokenResourceError):
            await other.receive_some()


# ---- handshakes that fail


async def failures(ours: TlsStream, theirs: TlsStream | trio.SSLStream[Any]) -> tuple[str, str]:
    """What both ends say of a handshake that must not work; with TLS 1.3 a client may learn of it a little later."""
    one, other = await shake(ours, theirs)
    if isinstance(one, TlsFailed) and other is None:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await theirs.receive_some(1)
        other = caught.value
    assert one is None or isinstance(one, TlsFailed)
    for stream in (ours, theirs):
        await trio.aclose_forcefully(stream)
    return str(one or ""), str(other or "")


def between(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost", version: ssl.TLSVersion = TLS_1_3
) -> tuple[TlsStream, TlsStream]:
    here, there = tcp_streams()
    client.maximum_version = version
    return (
        TlsStream(here, server, server_side=True),
        TlsStream(there, client, server_side=False, host=host),
    )


NOT_ACCEPTED = "the peer's certificate is not accepted: "


async def test_a_server_of_an_unknown_authority(stranger: Authority, server: Pair) -> None:
    accepting, dialling = between(server_context(server), client_context(stranger))
    ours, theirs = await failures(dialling, accepting)
    assert ours == f"{NOT_ACCEPTED}unable to get local issuer certificate"
    assert "unknown ca" in theirs


async def test_an_expired_server(authority: Authority) -> None:
    old = authority.server("old", expired=True)
    ours, theirs = await failures(*reversed(between(server_context(old), client_context(authority))))
    assert ours == f"{NOT_ACCEPTED}certificate has expired"
    assert "certificate expired" in theirs


async def test_a_server_of_another_name(authority: Authority, server: Pair) -> None:
    ours, theirs = await failures(
        *reversed(between(server_context(server), client_context(authority), "broker.example"))
    )
    assert "Hostname mismatch, certificate is not valid for 'broker.example'" in ours
    assert theirs


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
async def test_a_server_of_the_right_name(authority: Authority, server: Pair, host: str) -> None:
    assert await failures_or_none(*between(server_context(server), client_context(authority), host)) == ("", "")


async def failures_or_none(*streams: TlsStream) -> tuple[str, str]:
    one, other = await shake(*streams)
    for stream in streams:
        await trio.aclose_forcefully(stream)
    return str(one or ""), str(other or "")


async def test_names_are_not_looked_at_where_the_operator_says_so(authority: Authority, server: Pair) -> None:
    lax = client_context(authority, verify_hostname=False)
    assert await failures_or_none(*between(server_context(server), lax, "broker.example")) == ("", "")


async def test_a_lax_name_is_no_lax_issuer(stranger: Authority, server: Pair) -> None:
    lax = client_context(stranger, verify_hostname=False)
    ours, _ = await failures(*reversed(between(server_context(server), lax, "broker.example")))
    assert ours.startswith(NOT_ACCEPTED)


@VERSIONS
async def test_a_client_without_a_certificate(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    strict = server_context(server, client_ca=authority.file, require_client_certificate=True)
    ours, theirs = await failures(*between(strict, client_context(authority), version=version))
    assert ours == "peer did not return a certificate"
    assert "certificate required" in theirs or "handshake failure" in theirs


@VERSIONS
@pytest.mark.parametrize("required", [True, False])
async def test_a_client_of_an_unknown_authority(
    authority: Authority, stranger: Authority, server: Pair, version: ssl.TLSVersion, *, required: bool
) -> None:
    """Optional means that there may be none: one that is there must be good."""
    asking = server_context(server, client_ca=authority.file, require_client_certificate=required)
    wrong = stranger.client("alice")
    theirs = client_context(authority, certificate=wrong.certificate, key=wrong.key)
    ours, told = await failures(*between(asking, theirs, version=version))
    assert ours.startswith(NOT_ACCEPTED)
    assert "unknown ca" in told


async def test_an_expired_client(authority: Authority, server: Pair) -> None:
    asking = server_context(server, client_ca=authority.file)
    old = authority.client("old-alice", expired=True)
    ours, told = await failures(*between(asking, client_context(authority, certificate=old.certificate, key=old.key)))
    assert ours == f"{NOT_ACCEPTED}certificate has expired"
    assert "certificate expired" in told


async def outcome_of(server: ssl.SSLContext, authority: Authority, client: Pair, version: ssl.TLSVersion) -> str:
    """The reason for which a client is refused; empty: it is not."""
    theirs = client_context(authority, certificate=client.certificate, key=client.key)
    ours, _ = await failures_or_none(*between(server, theirs, version=version))
    return ours


@VERSIONS
async def test_a_revoked_client(authority: Authority, server: Pair, tmp_path: Path, version: ssl.TLSVersion) -> None:
    alice, bob = authority.client("alice"), authority.client("bob")
    crl = tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(alice))
    context = tls._front(server_contexts(server, client_ca=authority.file, client_crl=str(crl)))
    assert await outcome_of(context, authority, alice, version) == f"{NOT_ACCEPTED}certificate revoked"
    assert await outcome_of(context, authority, bob, version) == ""


@pytest.mark.parametrize(
    ("who", "kind"),
    [
        ("revoked", "certificate_revoked"),
        ("expired", "certificate_expired"),
        ("strange", "unknown_ca"),
        ("nobody", "no_certificate"),
        ("no CRL", "no_valid_crl"),
    ],
)
async def test_the_kind_of_a_failure(
    authority: Authority, stranger: Authority, tmp_path: Path, who: str, kind: str
) -> None:
    issuer = stranger if who == "strange" else authority
    server, client = authority.server("asking"), issuer.client("refused", expired=who == "expired")
    crl = tmp_path / "crl.pem"
    crl.write_bytes(stranger.crl() if who == "no CRL" else authority.crl(*([client] if who == "revoked" else [])))
    context = server_context(server, client_ca=authority.file, client_crl=str(crl), require_client_certificate=True)
    files = {} if who == "nobody" else {"certificate": client.certificate, "key": client.key}
    streams = between(context, client_context(authority, **files))
    failure, _ = await shake(*streams)
    for stream in streams:
        await trio.aclose_forcefully(stream)
    assert isinstance(failure, TlsFailed)
    assert failure.kind == kind


async def test_several_crls_in_a_file(authority: Authority, stranger: Authority, server: Pair, tmp_path: Path) -> None:
    both, crl = tmp_path / "both.pem", tmp_path / "crl.pem"
    both.write_bytes(Path(authority.file).read_bytes() + Path(stranger.file).read_bytes())
    alice, bob = authority.client("alice"), stranger.client("bob")
    crl.write_bytes(authority.crl(alice) + stranger.crl(bob))
    context = server_context(server, client_ca=str(both), client_crl=str(crl))
    for client in (alice, bob):
        assert await outcome_of(context, authority, client, TLS_1_3) == f"{NOT_ACCEPTED}certificate revoked"
    crl.write_bytes(stranger.crl(bob))
    context = server_context(server, client_ca=str(both), client_crl=str(crl))
    reason = await outcome_of(context, authority, authority.client("carol"), TLS_1_3)
    assert reason == f"{NOT_ACCEPTED}unable to get certificate CRL", "an issuer without one"


@pytest.mark.parametrize(("days", "event"), [(-1, "a CRL has expired"), (6, "a CRL expires soon"), (8, "")])
async def test_the_end_of_a_crl(authority: Authority, server: Pair, tmp_path: Path, days: int, event: str) -> None:
    crl = tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(days=days))
    with structlog.testing.capture_logs() as logs:
        context = server_context(server, client_ca=authority.file, client_crl=str(crl))
    assert [(entry["event"].partition(":")[0], entry["key"]) for entry in logs] == (
        [(event, "listener[0].tls.client_crl")] if event else []
    )
    reason = await outcome_of(context, authority, authority.client("alice"), TLS_1_3)
    assert reason == (f"{NOT_ACCEPTED}CRL has expired" if days < 0 else "")


async def test_a_replaced_crl_is_for_who_comes_from_now_on(
    authority: Authority, server: Pair, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    alice, crl = authority.client("alice"), tmp_path / "crl.pem"
    crl.write_bytes(authority.crl())
    config = ListenerTls(certificate=server.certificate, key=server.key, client_ca=authority.file, client_crl=str(crl))
    watched_context = listener_contexts("listener[0].tls", config)
    before = await watched_context.current_value()
    replace(crl, authority.crl(alice))
    await trio.sleep(watched.CHECK_INTERVAL_S)
    after = await watched_context.current_value()
    assert after is not before
    client = client_context(authority, certificate=alice.certificate, key=alice.key)
    assert await certificate_of(before.default, client)
    with pytest.raises(ExceptionGroup) as caught:
        await certificate_of(after.default, client)
    assert "certificate revoked" in str(caught.value.exceptions)


@pytest.mark.parametrize("how", ["nothing", "no CRL", "an authority with it", "broken"])
def test_a_file_of_crls_that_is_no_good(authority: Authority, server: Pair, tmp_path: Path, how: str) -> None:
    """Security: a certificate in it would be trusted."""
    good, crl = authority.crl(), tmp_path / "crl.pem"
    crl.write_bytes(
        {
            "nothing": b"",
            "no CRL": Path(authority.file).read_bytes(),
            "an authority with it": good + Path(authority.file).read_bytes(),
            "broken": b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
        }[how]
    )
    with pytest.raises(ConfigError) as caught:
        server_context(server, client_ca=authority.file, client_crl=str(crl))
    assert str(caught.value).startswith(f"listener[0].tls.client_crl: {crl}")


async def test_the_clients_certificate_is_handed_out(authority: Authority, server: Pair) -> None:
    asking = server_context(server, client_ca=authority.file)
    alice = authority.client("alice")
    pem = Path(alice.certificate).read_text()
    with_one, without = (
        client_context(authority, certificate=alice.certificate, key=alice.key),
        client_context(authority),
    )
    for context, expected in ((with_one, ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + 26])), (without, b"")):
        streams = between(asking, context)
        assert await shake(*streams) == [None, None]
        assert streams[0].peer_certificate() == expected
        for stream in streams:
            await trio.aclose_forcefully(stream)


async def test_clients_are_not_asked_for_certificates_without_an_authority(authority: Authority, server: Pair) -> None:
    alice = authority.client("alice-unasked")
    streams = between(server_context(server), client_context(authority, certificate=alice.certificate, key=alice.key))
    assert await shake(*streams) == [None, None]
    assert streams[0].peer_certificate() == b""
    for stream in streams:
        await trio.aclose_forcefully(stream)


@ROLES
async def test_too_old_a_version(authority: Authority, server: Pair, *, serves: bool) -> None:
    here, there = tcp_streams()
    contexts = {True: server_context(server), False: client_context(authority)}
    contexts[serves].minimum_version = TLS_1_3
    contexts[not serves].maximum_version = TLS_1_2
    ours = TlsStream(here, contexts[serves], server_side=serves, host="localhost" if not serves else None)
    theirs = TlsStream(there, contexts[not serves], server_side=not serves, host="localhost" if serves else None)
    text, _ = await failures(ours, theirs)
    assert "version" in text or "protocol" in text


PLAIN = [b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x02\x12\x06hello", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(100)]


@ROLES
@pytest.mark.parametrize("data", PLAIN)
async def test_a_peer_that_does_not_speak_tls(authority: Authority, server: Pair, data: bytes, *, serves: bool) -> None:
    here, there = tcp_streams()
    context = server_context(server) if serves else client_context(authority)
    ours = TlsStream(here, context, server_side=serves, host=None if serves else "localhost")
    await there.send_all(data)
    with trio.fail_after(PATIENCE_S), pytest.raises(TlsFailed, match="does not speak TLS"):
        await ours.handshake()
    await here.aclose()
    await there.aclose()


@ROLES
@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
async def test_a_peer_that_leaves_in_the_handshake(
    authority: Authority, server: Pair, data: bytes, *, serves: bool
) -> None:
    here, there = tcp_streams()
    context = server_context(server) if serves else client_context(authority)
    ours = TlsStream(here, context, server_side=serves, host=None if serves else "localhost")
    if data:
        await there.send_all(data)
    await there.send_eof()
    with trio.fail_after(PATIENCE_S), pytest.raises(TlsFailed):
        await ours.handshake()
    await here.aclose()
    await there.aclose()


@ROLES
async def test_a_peer_that_breaks_off_in_the_handshake(authority: Authority, server: Pair, *, serves: bool) -> None:
    here, there = tcp_streams()
    context = server_context(server) if serves else client_context(authority)
    ours = TlsStream(here, context, server_side=serves, host=None if serves else "localhost")
    there.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await there.aclose()
    with trio.fail_after(PATIENCE_S), pytest.raises(TlsFailed, match=r"broke off.*reset|broke off.*pipe"):
        await ours.handshake()
    await here.aclose()


async def test_nothing_is_renegotiated(authority: Authority, server: Pair) -> None:
    """A handshake within TLS 1.2 costs the one who answers more than the one who asks."""
    both = server_context(server), client_context(authority)
    for context in both:
        assert context.options & ssl.OP_NO_RENEGOTIATION
    assert both[0].options & ssl.OP_NO_COMPRESSION
    assert both[1].options & ssl.OP_NO_COMPRESSION


async def test_the_default_is_strict(authority: Authority, server: Pair) -> None:
    context = client_context(authority)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == TLS_1_2
    assert server_context(server).minimum_version == TLS_1_2
    assert server_context(server).verify_mode == ssl.CERT_NONE
    # A session that is taken up again is not verified again.
    assert server_context(server).num_tickets == 0
    assert server_context(server).options & ssl.OP_NO_TICKET
    assert server_context(server, minimum_version="1.3").minimum_version == TLS_1_3
    assert client_context(authority, minimum_version="1.3").minimum_version == TLS_1_3


async def test_only_the_authorities_named_are_trusted(authority: Authority) -> None:
    """Not the system's as well."""
    assert len(client_context(authority).get_ca_certs()) == 1
    assert isinstance(broker_context(BrokerTls()).value, ssl.SSLContext), "the system's where none is named"


# ---- files


def spoil(pair: Pair, how: str, directory: Path, other: Pair) -> tuple[ListenerTls, str]:
    """A listener's files with one that is no good, and which."""
    files = {"certificate": pair.certificate, "key": pair.key, "client_ca": ""}
    which, _, what = how.partition(" ")
    file = directory / "spoilt.pem"
    if what == "missing":
        pass
    elif what == "encrypted":
        key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
        secret = serialization.BestAvailableEncryption(b"s3cret-passphrase")
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)  # type: ignore[arg-type]
        )
    elif what == "of another":
        file.write_bytes(Path(other.key).read_bytes())
    elif what == "a folder":
        file.mkdir()
    else:
        file.write_bytes({"empty": b"", "garbled": b"-----BEGIN PRIVATE KEY-----\ns3cret-bytes\n"}[what])
    return ListenerTls(**files | {which: str(file)}), str(file)


SPOILT = [
    *(f"{file} {how}" for file in ("certificate", "key", "client_ca") for how in ("missing", "empty", "garbled")),
    "key encrypted",
    "key of another",
    "certificate a folder",
]


@pytest.mark.parametrize("how", SPOILT)
def test_files_that_are_no_good_are_named(authority: Authority, server: Pair, how: str, tmp_path: Path) -> None:
    config, file = spoil(server, how, tmp_path, authority.server("another"))
    with pytest.raises(ConfigError) as caught:
        listener_contexts("listener[1].tls", config)
    text = str(caught.value)
    assert text.startswith("listener[1].tls"), text
    assert file in text
    assert "s3cret" not in text
    assert ("passphrase" in text) is (how == "key encrypted")


@pytest.mark.parametrize("key", ["trust", "certificate", "key"])
def test_the_files_for_brokers_are_named(authority: Authority, server: Pair, key: str, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.pem"
    spoilt.write_bytes(b"garbage")
    files = {"trust": authority.file, "certificate": server.certificate, "key": server.key, key: str(spoilt)}
    with pytest.raises(ConfigError) as caught:
        broker_context(BrokerTls(**files))
    assert str(caught.value).startswith("brokers.tls")
    assert str(spoilt) in str(caught.value)


async def test_a_new_certificate_is_for_who_comes_from_now_on(
    authority: Authority, server: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    mine = authority.server("renewed")
    watched_context = listener_contexts("listener[0].tls", ListenerTls(certificate=mine.certificate, key=mine.key))
    before = await watched_context.current_value()
    authority.server("renewed")  # the same name, another key
    await trio.sleep(watched.CHECK_INTERVAL_S)
    after = await watched_context.current_value()
    assert after is not before
    client = client_context(authority)
    assert await certificate_of(after.default, client) != await certificate_of(before.default, client)


async def certificate_of(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """What a server shows; in memory."""
    here, there = trio.testing.memory_stream_pair()
    streams = (
        TlsStream(here, server, server_side=True),  # type: ignore[arg-type]
        TlsStream(there, client, server_side=False, host="localhost"),  # type: ignore[arg-type]
    )
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.handshake)
    return streams[1].peer_certificate()


async def test_a_broken_change_keeps_what_was(authority: Authority, autojump_clock: trio.testing.MockClock) -> None:
    mine = authority.server("to-be-broken")
    watched_context = listener_contexts("listener[0].tls", ListenerTls(certificate=mine.certificate, key=mine.key))
    before = watched_context.value
    key = Path(mine.key).read_bytes()
    Path(mine.key).write_bytes(b"s3cret but no key")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await trio.sleep(watched.CHECK_INTERVAL_S)
            assert await watched_context.current_value() is before
    [entry] = logs
    assert entry["log_level"] == "error"
    assert mine.key in entry["files"]
    assert "s3cret" not in str(entry)
    Path(mine.key).write_bytes(key)
    await trio.sleep(watched.CHECK_INTERVAL_S)
    assert await watched_context.current_value() is not before


async def test_authorities_are_watched_too(
    authority: Authority, stranger: Authority, server: Pair, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    trust = tmp_path / "trust.pem"
    trust.write_bytes(Path(authority.file).read_bytes())
    config = ListenerTls(certificate=server.certificate, key=server.key, client_ca=str(trust))
    watched_context = listener_contexts("listener[0].tls", config)
    held_context = broker_context(BrokerTls(trust=str(trust)))
    await watched_context.current_value()
    replace(trust, Path(stranger.file).read_bytes())
    await trio.sleep(watched.CHECK_INTERVAL_S)
    assert "strange" in only_authority((await watched_context.current_value()).default)
    assert "ours" in only_authority(held_context.value), "no broker has accepted it yet"
    await take_over_held_files(file_stamps([str(trust)]))
    assert "strange" in only_authority(held_context.value)


async def test_the_ends_that_operators_are_shown_are_those_of_what_is_in_use(
    authority: Authority, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    mine, crl = authority.server("shown"), tmp_path / "crl.pem"
    crl.write_bytes(authority.crl())
    files = {"certificate": mine.certificate, "client_ca": authority.file, "client_crl": str(crl)}
    config = ListenerTls(key=mine.key, certificate=mine.certificate, client_ca=authority.file, client_crl=str(crl))
    watched_context = listener_contexts("listener[3].tls", config)
    before = read_ends([(f"listener[3].tls.{name}", file) for name, file in files.items()])
    assert (len(before), watched_context.ends) == (3, before)
    authority.server("shown", expired=True)
    after = read_ends([("listener[3].tls.certificate", mine.certificate)])
    key = Path(mine.key).read_bytes()
    Path(mine.key).write_bytes(b"broken")
    await trio.sleep(watched.CHECK_INTERVAL_S)
    await watched_context.current_value()
    assert watched_context.ends == before
    Path(mine.key).write_bytes(key)
    await trio.sleep(watched.CHECK_INTERVAL_S)
    await watched_context.current_value()
    assert watched_context.ends == before | after != before


def test_the_ends_of_what_brokers_are_reached_by(authority: Authority) -> None:
    mine = authority.client("proxy")
    held = broker_context(BrokerTls(trust=authority.file, certificate=mine.certificate, key=mine.key))
    assert held.ends == read_ends(
        [("brokers.tls.trust", authority.file), ("brokers.tls.certificate", mine.certificate)]
    )
    assert broker_context(BrokerTls()).ends == {}, "the system's authorities are not the operator's to renew"


def only_authority(context: ssl.SSLContext) -> str:
    [known] = context.get_ca_certs()
    return str(known["subject"])


def test_a_bound_of_our_own_has_its_text_as_openssls_errors_have() -> None:
    """Of a hello that announces 128 KiB: an error without a reason would be logged as a defect."""
    session = TlsSession(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    with pytest.raises(TlsFailed, match=r"^a hello of more than 16384 bytes$") as caught:
        tls.continue_handshake(session, b"\x16\x03\x01\x00\x04\x01\x02\x00\x00")
    assert caught.value.kind == "other"


async def test_too_many_records_without_data_end_a_stream_with_that_reason() -> None:
    ours, theirs = tcp_streams()
    stream = TlsStream(ours, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    stream.session.error = _violation("too many records without data")
    assert str(stream.end_error) == "too many records without data"
    ours.close_now()
    theirs.close_now()
