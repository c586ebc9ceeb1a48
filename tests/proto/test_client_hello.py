"""proto.client_hello: the name in a ClientHello, of hostile bytes too, however they are split."""

from __future__ import annotations

import ssl
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.client_hello import (
    DECODE_ERROR,
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION,
    UNRECOGNIZED_NAME,
    ClientHelloParser,
    HelloRefused,
    alert_record,
    limits_record_size,
)

NAME = "broker-1.pulsar.example"


def recorded(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, name: str | None = NAME, alpn: str = "") -> bytes:
    """The hello that OpenSSL sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = context.maximum_version = version
    if alpn:
        context.set_alpn_protocols([alpn])
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def resumed() -> bytes:
    """The hello of a client that has a ticket of TLS 1.2: made by a first handshake in memory."""
    import trustme

    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(NAME).configure_cert(server_context)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=NAME)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for one in (client, server):
            try:
                one.do_handshake()
                done.add(one)
            except ssl.SSLWantReadError:
                pass
    outgoing = ssl.MemoryBIO()
    again = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=NAME, session=client.session)
    with pytest.raises(ssl.SSLWantReadError):
        again.do_handshake()
    return outgoing.read()


HELLOS = {
    "1.2": recorded(ssl.TLSVersion.TLSv1_2),
    "1.3": recorded(),
    "ALPN": recorded(alpn="h2"),
    "ticket": resumed(),
}
HELLO = HELLOS["1.3"]


def outcome(*pieces: bytes) -> str | HelloRefused | None:
    parser = ClientHelloParser()
    results = [parser.receive_data(piece) for piece in pieces]
    assert parser.received == b"".join(pieces)
    first = next((result for result in results if result is not None), None)
    assert results[-1] == first  # it does not change
    return first


def refusal(data: bytes) -> tuple[str, int]:
    refused = outcome(data)
    assert isinstance(refused, HelloRefused), refused
    return refused.reason, refused.alert


def in_records(message: bytes, size: int) -> bytes:
    """A handshake message in records of a size."""
    pieces = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(record(piece) for piece in pieces)


def record(piece: bytes, kind: int = 22, major: int = 3) -> bytes:
    return bytes((kind, major, 1)) + len(piece).to_bytes(2) + piece


def extension(value: bytes, kind: int = 0) -> bytes:
    return kind.to_bytes(2) + len(value).to_bytes(2) + value


def server_name(name: bytes, kind: int = 0) -> bytes:
    entry = bytes((kind,)) + len(name).to_bytes(2) + name
    return extension(len(entry).to_bytes(2) + entry)


def message(
    *extensions: bytes, version: int = 0x0303, session_id: bytes = b"", suites: bytes = b"\x13\x01", behind: bytes = b""
) -> bytes:
    joined = b"".join(extensions)
    body = version.to_bytes(2) + bytes(32) + bytes((len(session_id),)) + session_id
    body += len(suites).to_bytes(2) + suites + b"\x01\x00" + len(joined).to_bytes(2) + joined + behind
    return b"\x01" + len(body).to_bytes(3) + body


def hello(*extensions: bytes, **fields: int | bytes) -> bytes:
    return record(message(*extensions, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", HELLOS)
def test_a_recorded_hello(kind: str) -> None:
    assert outcome(HELLOS[kind]) == NAME


@pytest.mark.parametrize("kind", HELLOS)
def test_every_truncation_waits(kind: str) -> None:
    data = HELLOS[kind]
    assert [end for end in range(len(data)) if outcome(data[:end]) is not None] == []


@pytest.mark.parametrize("kind", HELLOS)
def test_byte_by_byte(kind: str) -> None:
    assert outcome(*(bytes((byte,)) for byte in HELLOS[kind])) == NAME


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_over_several_records(size: int) -> None:
    assert outcome(in_records(HELLO[5:], size)) == NAME


def test_what_follows_the_hello_is_not_looked_at() -> None:
    early = record(bytes(100), kind=23)
    assert outcome(HELLO + early) == outcome(HELLO, early) == NAME


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_the_message_is_the_same_over_any_records(size: int) -> None:
    parser = ClientHelloParser()
    parser.receive_data(in_records(HELLO[5:], size) + b"early data")
    assert parser.hello == HELLO[5:]


def test_the_name_is_in_lower_case() -> None:
    assert outcome(hello(server_name(b"Broker.Example"))) == "broker.example"


@given(st.data())
def test_any_split_has_the_same_outcome(data: st.DataObject) -> None:
    source = bytearray(data.draw(st.sampled_from([*HELLOS.values(), in_records(HELLO[5:], 50), b"\0\0\0\x20 no TLS"])))
    for _ in range(data.draw(st.integers(0, 3))):
        source[data.draw(st.integers(0, len(source) - 1))] = data.draw(st.integers(0, 255))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(source) - 1), max_size=10)))
    pieces = [bytes(source[start:end]) for start, end in pairwise([0, *cuts, len(source)])]
    assert outcome(*pieces) == outcome(bytes(source))


@settings(max_examples=500)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_have_an_outcome(data: bytes, in_hello: bool) -> None:
    outcome(record(b"\x01" + len(data).to_bytes(3) + data) if in_hello else data + b"\0")


def test_every_changed_byte_has_an_outcome() -> None:
    for position in range(len(HELLO)):
        for byte in {0, 1, 3, 0x7F, 0x80, 0xFF, HELLO[position] ^ 1, (HELLO[position] + 1) % 256}:
            outcome(HELLO[:position] + bytes((byte,)) + HELLO[position + 1 :])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\0\0\0\x20\0", ("malformed", DECODE_ERROR)),
        (record(b"x", kind=21), ("malformed", DECODE_ERROR)),
        (record(message(server_name(b"a")), major=2), ("version", PROTOCOL_VERSION)),
        (hello(server_name(b"a"), version=0x0200), ("version", PROTOCOL_VERSION)),
        (record(b""), ("malformed", DECODE_ERROR)),
        (record(b"\x02\0\0\x01\0"), ("malformed", DECODE_ERROR)),
        (record(message(server_name(b"a")) + b"x"), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a"), behind=b"x"), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a"), session_id=bytes(33)), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a"), suites=b"\0\1\2"), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a"), suites=b""), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a"), server_name(b"a")), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"a", kind=1)), ("malformed", DECODE_ERROR)),
        (hello(extension(b"\0\x08\0\0\1a\0\0\1b")), ("malformed", DECODE_ERROR)),
        (hello(extension(b"\0\x05\0\0\1a")), ("malformed", DECODE_ERROR)),
        (hello(extension(b"\0\x04\0\0\1ax")), ("malformed", DECODE_ERROR)),
        (hello(server_name(b"")), ("malformed", DECODE_ERROR)),
        (hello(), ("no_name", UNRECOGNIZED_NAME)),
        (hello(extension(b"", kind=0xFE0D)), ("no_name", UNRECOGNIZED_NAME)),
    ],
)
def test_what_is_refused(data: bytes, expected: tuple[str, int]) -> None:
    assert refusal(data) == expected


@pytest.mark.parametrize(
    "name",
    [
        b"127.0.0.1",
        b"127.1",
        b"2130706433",
        b"0x7f000001",
        b"a.0x7f",
        b"::1",
        b"[::1]",
        b"a:6650",
        b"a..b",
        b"a.",
        b".a",
        b"-a",
        b"a-",
        b"a b",
        b"a\0b",
        b"a\n",
        b"\xc3\xa4.example",
        b"x" * 64,
        b".".join([b"x" * 50] * 5),
    ],
)
def test_names_that_are_refused(name: bytes) -> None:
    assert refusal(hello(server_name(name))) == ("bad_name", UNRECOGNIZED_NAME)


def test_a_long_name_is_shown_in_part() -> None:
    refused = outcome(hello(server_name(b"x" * 10_000)))
    assert isinstance(refused, HelloRefused)
    assert len(refused.name) == 253


def test_the_bound_of_a_hello() -> None:
    padded = message(server_name(b"a"), extension(bytes(HELLO_BYTES_MAX - 200), kind=21))
    assert outcome(record(padded)) == "a"
    assert refusal(record(b"\x01" + (HELLO_BYTES_MAX - 3).to_bytes(3))) == ("too_large", DECODE_ERROR)
    assert refusal(b"\x16\x03\x01" + HELLO_BYTES_MAX.to_bytes(2)) == ("too_large", DECODE_ERROR)
    assert refusal(in_records(padded, 8)) == ("too_large", DECODE_ERROR)  # of which most are headers


def test_an_alert() -> None:
    assert alert_record(UNRECOGNIZED_NAME) == bytes.fromhex("15030300020270")


# ---- the size of records


def with_extension(hello: bytes, kind: int) -> bytes:
    """A hello's message with one more extension behind its others."""
    at = 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at]
    extensions = hello[at + 2 :] + kind.to_bytes(2) + b"\x00\x02\x02\x00"
    body = hello[4:at] + len(extensions).to_bytes(2) + extensions
    return hello[:1] + len(body).to_bytes(3) + body


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_a_client_that_wants_smaller_records(version: str) -> None:
    """max_fragment_length and record_size_limit, wherever they stand; others do not count."""
    hello = HELLOS[version][5:]
    assert not limits_record_size(hello)
    for kind in range(64):
        assert limits_record_size(with_extension(hello, kind)) is (kind in {1, 28})
    assert limits_record_size(with_extension(with_extension(hello, 1), 255))


def test_the_beginning_of_a_hello_limits_nothing() -> None:
    hello = with_extension(HELLOS["1.3"][5:], 28)
    assert [end for end in range(len(hello)) if limits_record_size(hello[:end])] == []


@given(st.binary(max_size=200))
def test_no_bytes_make_the_look_fail(data: bytes) -> None:
    """Security: they are a stranger's."""
    assert limits_record_size(data) in {True, False}
