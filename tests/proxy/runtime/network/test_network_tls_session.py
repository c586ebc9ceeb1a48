"""proxy.runtime.network.tls_session: records in, bytes out, however they are cut, and whatever a peer makes of them."""

from __future__ import annotations

import random
import ssl

import pytest
from e2e.lab.certificates import Authority

from proxy.config.types import BrokerTls, ListenerTls
from proxy.runtime.network.tls import broker_context, listener_contexts
from proxy.runtime.network.tls_session import (
    HANDSHAKE_RECORDS_MAX,
    HELLO_BYTES_MAX,
    RECORD_BYTES,
    RECORD_BYTES_MAX,
    RECORDS_WITHOUT_DATA_MAX,
    TlsSession,
)

Ends = tuple[TlsSession, TlsSession]
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    authority = Authority(tmp_path_factory.mktemp("certificates"), "ours")
    pair = authority.server("server")
    listener = ListenerTls(certificate=pair.certificate, key=pair.key)
    return listener_contexts("listener[0].tls", listener).value.default, broker_context(
        BrokerTls(trust=authority.file)
    ).value


@pytest.fixture(params=["1.2", "1.3"])
def ends(contexts: Contexts, request: pytest.FixtureRequest) -> Ends:
    """A server and a client whose handshake was sent byte by byte."""
    server, client = contexts
    client.maximum_version = ssl.TLSVersion.TLSv1_2 if request.param == "1.2" else ssl.TLSVersion.TLSv1_3
    ours, peer = TlsSession(server, server_side=True), TlsSession(client, server_side=False, host="localhost")
    done = {ours: False, peer: peer.continue_handshake()}
    while not all(done.values()):
        for one, other in ((peer, ours), (ours, peer)):
            for byte in one.take_outgoing():
                done[other] = other.continue_handshake(bytes([byte]))
    assert ours.version == peer.version == f"TLSv{request.param}"
    assert not ours.unread
    assert not peer.unread
    return ours, peer


def record(session: TlsSession, data: bytes) -> bytes:
    return session.encrypt(memoryview(data))


def decrypt(session: TlsSession, ciphertext: bytes) -> bytes:
    """As the pump does it: what was left, and what came, into a buffer of that size."""
    whole = session.unread + ciphertext
    plaintext = bytearray(len(whole))
    return bytes(plaintext[: session.decrypt(memoryview(whole), memoryview(plaintext))])


def handshake_records(data: bytes, size: int) -> bytes:
    """Unencrypted records of ``size`` bytes."""
    parts = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_a_hello_that_announces_more_than_it_may_have(contexts: Contexts, size: int) -> None:
    """Security: OpenSSL would have 128 KiB for it at once, for some bytes."""
    for size_bytes in (HELLO_BYTES_MAX, HELLO_BYTES_MAX + 1):
        session = TlsSession(contexts[0], server_side=True)
        data = handshake_records(b"\x01" + size_bytes.to_bytes(3) + b"\x03\x03", size)
        if size_bytes > HELLO_BYTES_MAX:
            with pytest.raises(ssl.SSLError, match="a hello of more than 16384 bytes"):
                session.continue_handshake(data)
        else:
            assert not session.continue_handshake(data)


def test_a_handshake_in_very_short_records(contexts: Contexts) -> None:
    """Security: each costs as much as a long one. A hello that is split otherwise is none of a client's fault."""
    client = TlsSession(contexts[1], server_side=False, host="localhost")
    client.continue_handshake()
    hello = client.take_outgoing()[5:]
    few, many = (TlsSession(contexts[0], server_side=True) for _ in range(2))
    few.continue_handshake(handshake_records(hello, 10))
    assert few.take_outgoing()[5] == 2, "the server's hello"
    assert len(hello) > HANDSHAKE_RECORDS_MAX
    with pytest.raises(ssl.SSLError, match="too many records in the handshake"):
        many.continue_handshake(handshake_records(hello, 1))


def test_records_cut_at_every_offset(ends: Ends) -> None:
    ours, peer = ends
    both = record(peer, b"one") + record(peer, b"two")
    size = len(both)
    assert decrypt(ours, both) == b"onetwo"
    for cut in range(size + 1):
        data = record(peer, b"one") + record(peer, b"two")
        assert len(data) == size
        found = decrypt(ours, data[:cut])
        assert len(ours.unread) < size, "only the beginning of a record is kept"
        assert found + decrypt(ours, data[cut:]) == b"onetwo"
        assert ours.unread == b""
    assert not ours.has_ended


def test_many_sizes_in_random_portions(ends: Ends) -> None:
    ours, peer = ends
    dice = random.Random(1)
    sizes = [1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES, 100_003]
    said = [dice.randbytes(size) for size in sizes]
    ciphertext, found = b"".join(record(peer, data) for data in said), b""
    while ciphertext:
        size = dice.choice([1, 5, 1000, 16_405, 50_000])
        found += decrypt(ours, ciphertext[:size])
        ciphertext = ciphertext[size:]
        assert len(ours.unread) < RECORD_BYTES_MAX
        assert ours._incoming.pending == 0, "nothing is left inside"
    assert found == b"".join(said)


JUNK = {
    "bytes": b"\x00\x00\x00\x00\x05plain and more of it",
    "another type": b"\x63\x03\x03\x00\x05plain",
    "another version": b"\x17\x09\x09\x00\x05plain",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a-proxy.example\r\n\r\n",
    "no data": b"\x17\x03\x03\x00\x00",
    "more than a record may hold": b"\x17\x03\x03" + (RECORD_BYTES_MAX - 4).to_bytes(2, "big"),
    "the most that can be declared": b"\x17\x03\x03\xff\xff",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_junk_is_an_error_behind_what_came_before(ends: Ends, junk: bytes, pieces: int) -> None:
    ours, peer = ends
    data, found = record(peer, b"before") + junk + bytes(20_000), b""
    for start in range(0, len(data), pieces if pieces > 1 else len(data)):
        found += decrypt(ours, data[start : start + (pieces if pieces > 1 else len(data))])
        assert len(ours.unread) < RECORD_BYTES_MAX
        assert ours._incoming.pending <= 5 + 0xFFFF
        if ours.has_ended:
            break
    assert found == b"before"
    assert ours.has_ended
    assert ours.error is not None
    assert ours.unread == b""


@pytest.mark.parametrize("junk", ["the most that can be declared", "HTTP"])
def test_what_is_no_record_is_refused_by_its_header(ends: Ends, junk: str) -> None:
    """Not waited for: who sends it would have memory kept for it."""
    ours, _ = ends
    assert decrypt(ours, JUNK[junk]) == b""
    assert ours.error is not None


def test_records_without_data(ends: Ends) -> None:
    """As many as a well-behaved peer may send at once are read, and more are an error."""
    ours, peer = ends

    def no_data(_size: int, _into: memoryview) -> int:
        ours._incoming.read()
        raise ssl.SSLWantReadError

    read, empty = ours._read, b"\x17\x03\x03\x00\x01x"
    for count, ends_there in ((RECORDS_WITHOUT_DATA_MAX, False), (RECORDS_WITHOUT_DATA_MAX + 1, True)):
        ours._read = no_data
        assert decrypt(ours, empty * count) == b""
        assert ours.has_ended is ends_there
        assert (ours.error is not None) is ends_there
        ours._read = read
        if not ends_there:
            assert decrypt(ours, record(peer, b"data")) == b"data"


def test_an_end_and_what_follows_it(ends: Ends) -> None:
    ours, peer = ends
    last = record(peer, b"last words")
    assert decrypt(ours, last + peer.close() + b"never looked at") == b"last words"
    assert ours.has_ended
    assert ours.error is None
    assert ours.unread == b""
    assert decrypt(peer, record(ours, b"the other direction goes on")) == b"the other direction goes on"
    assert decrypt(peer, ours.close()) == b""
    assert peer.has_ended
    assert peer.error is None


def test_a_second_end_sends_nothing(ends: Ends) -> None:
    ours, _ = ends
    assert ours.close()
    assert ours.close() == b""


def test_an_alert_is_waiting_after_a_damaged_record(ends: Ends) -> None:
    ours, peer = ends
    damaged = bytearray(record(peer, b"damaged"))
    damaged[-1] ^= 1
    assert decrypt(ours, bytes(damaged)) == b""
    assert ours.waiting_record_bytes == len(ours.take_outgoing()) > 0
    assert ours.waiting_record_bytes == 0
    assert ours.close() == b"", "nothing more can be said"


def test_whole_records_behind_a_handshake_stay_unread_until_they_are_decrypted(contexts: Contexts) -> None:
    server, client = contexts
    client.maximum_version = ssl.TLSVersion.TLSv1_3
    ours, peer = TlsSession(server, server_side=True), TlsSession(client, server_side=False, host="localhost")
    peer.continue_handshake()
    ours.continue_handshake(peer.take_outgoing())
    assert peer.continue_handshake(ours.take_outgoing())
    last_flight = peer.take_outgoing()
    data = record(peer, b"first") + record(peer, b"second")
    assert ours.continue_handshake(last_flight + data)
    assert ours.unread == data
    assert decrypt(ours, b"") == b"firstsecond"


def test_a_handshake_that_is_cut_off(contexts: Contexts) -> None:
    ours = TlsSession(contexts[0], server_side=True)
    assert not ours.continue_handshake(b"\x16\x03\x01")
    ours.end_input()
    with pytest.raises(ssl.SSLError):
        ours.continue_handshake()
