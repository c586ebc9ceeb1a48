"""Addresses: what a client or an operator may write, and what neither may."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.addresses import (
    AddressInvalid,
    BrokerUrl,
    HostPort,
    PortMissing,
    client_network,
    parse_broker_url,
    parse_host_port,
    parse_service_url,
    speaks_tls,
    wide_network,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("broker:6650", "broker", 6650),
        ("broker-1.pulsar_ns.svc.cluster.local:6651", "broker-1.pulsar_ns.svc.cluster.local", 6651),
        ("broker.example.:1", "broker.example.", 1),
        ("a:65535", "a", 65535),
        ("_srv:6650", "_srv", 6650),
        ("BROKER:6650", "BROKER", 6650),
        ("10.0.0.1:6650", "10.0.0.1", 6650),
        ("[::1]:6650", "::1", 6650),
        ("[2001:DB8::1]:6650", "2001:DB8::1", 6650),
        ("[::ffff:10.0.0.1]:6650", "::ffff:10.0.0.1", 6650),
        ("h" * 253 + ":1", "h" * 253, 1),
    ],
)
def test_good_addresses(text: str, host: str, port: int) -> None:
    parsed = parse_host_port(text)
    assert parsed == HostPort(host, port)
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":6650",
        "broker",
        "broker:",
        "broker:x",
        "broker:-1",
        "broker:+1",
        "broker: 6650",
        "broker:6650 ",
        " broker:6650",
        "bro ker:6650",
        "broker:6650\n",
        "broker\n:6650",
        "broker\r\nHost: x:6650",
        "broker:6650\x00",
        "bro\x00ker:6650",
        "broker\t:6650",
        "broker:6_650",
        "broker:6650.0",
        "broker:0x1A",
        "broker:6650:6650",
        "broker:6650/path",
        "broker/path:6650",
        "broker?x:6650",
        "broker#x:6650",
        "user@broker:6650",
        "user:password@broker:6650",
        "pulsar://broker:6650",
        "-broker:6650",
        "broker-:6650",
        ".broker:6650",
        "*:6650",
        "br%6fker:6650",
        "bröker:6650",
        "брокер:6650",
        "broker\u2024example:6650",
        "broker:\uff16\uff16\uff15\uff10",  # fullwidth digits
        "broker:\u0661",  # an Arabic digit
        "broker:\u00b2",  # a superscript
        "h" * 254 + ":1",
        "::1:6650",
        "::1",
        "fe80::1%eth0:6650",
        "[::1",
        "[::1]6650",
        "[::1]:",
        "[::1]",
        "[]:6650",
        "[::1]]:6650",
        "[[::1]]:6650",
        "[fe80::1%eth0]:6650",
        "[broker]:6650",
        "[::1\n]:6650",
        "[::1 ]:6650",
        "[::1]:6650:1",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(AddressInvalid):
        parse_host_port(text)


@pytest.mark.parametrize(
    "port",
    [
        "0",
        "00",
        "000000",
        "65536",
        "99999",
        "100000",
        "4294973946",
        "18446744073709558266",
        "9" * 5000,
        "0000065536",
        "0000099999999",
        "000001" + "1" * 5000,  # beyond what int() takes
    ],
    ids=lambda port: port[:24],
)
def test_ports_out_of_range(port: str) -> None:
    with pytest.raises(AddressInvalid, match="no valid port"):
        parse_host_port(f"broker:{port}")


@pytest.mark.parametrize(
    "host", ["dead", "...", "1.2.3.4", ":", ":::", "1::2::3", "12345::1", "1:2:3:4:5:6:7:8:9", "::1.2.3.400"]
)
def test_only_an_ipv6_address_stands_in_brackets(host: str) -> None:
    with pytest.raises(AddressInvalid, match="not an IPv6 address"):
        parse_host_port(f"[{host}]:6650")


def test_a_default_port_counts_only_where_none_is_written() -> None:
    assert parse_host_port("broker", default_port=6650) == HostPort("broker", 6650)
    assert parse_host_port("[::1]", default_port=6650) == HostPort("::1", 6650)
    assert parse_host_port("broker:1", default_port=6650) == HostPort("broker", 1)
    with pytest.raises(AddressInvalid):
        parse_host_port("broker:", default_port=6650)
    with pytest.raises(AddressInvalid):
        parse_host_port("broker:0", default_port=6650)


def test_an_error_shows_what_was_written_and_no_more_than_a_line_of_it() -> None:
    with pytest.raises(AddressInvalid, match=r"^'bro\\nker:1' has no valid host name$"):
        parse_host_port("bro\nker:1")
    with pytest.raises(AddressInvalid) as caught:
        parse_host_port("x" * 100_000)
    assert len(str(caught.value)) < 300


# ---- service URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("pulsar://broker:6651", [("broker", 6651)]),
        ("pulsar://broker", [("broker", 6650)]),
        ("pulsar://broker/", [("broker", 6650)]),
        ("pulsar://a:1,b,[::1]:3", [("a", 1), ("b", 6650), ("::1", 3)]),
        ("pulsar://a:1, b:2", [("a", 1), ("b", 2)]),
        ("pulsar+ssl://broker:6651", [("broker", 6651)]),
        ("pulsar+ssl://broker", [("broker", 6651)]),
        ("pulsar+ssl://a:1,b,[::1]", [("a", 1), ("b", 6651), ("::1", 6651)]),
    ],
)
def test_good_service_urls(url: str, expected: list[tuple[str, int]]) -> None:
    assert [(address.host, address.port) for address in parse_service_url(url)] == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "pulsar",
        "broker:6650",
        "pulsar:/broker:6650",
        "://broker:6650",
        "http://broker:6650",
        "pulsar+ssl:/broker:6651",
        "pulsar+ssl://",
        "PULSAR+SSL://broker",
        "pulsar+tls://broker",
        "pulsar+ssl://a,pulsar+ssl://b",
        " pulsar://broker",
        "pulsar://",
        "pulsar:///",
        "pulsar://a,,b",
        "pulsar://a,",
        "pulsar://,a",
        "pulsar://broker:6650/path",
        "pulsar://user:secret@broker:6650",
        "pulsar://broker:0",
        "pulsar://pulsar://broker",
    ],
)
def test_bad_service_urls(url: str) -> None:
    with pytest.raises(AddressInvalid):
        parse_service_url(url)


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("pulsar://broker", False),
        ("pulsar+ssl://broker", True),
        ("pulsar://pulsar+ssl://b", False),
        ("pulsar+srv://broker", False),
        ("pulsar+ssl+srv://broker", True),
        ("pulsar+ssl+srv:/broker", False),
    ],
)
def test_whether_a_service_url_asks_for_tls(url: str, tls: bool) -> None:
    assert speaks_tls(url) is tls


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("pulsar+srv://b.example", ("_pulsar._tcp.b.example", "b.example")),
        ("pulsar+srv://b.example/", ("_pulsar._tcp.b.example", "b.example")),
        ("pulsar+ssl+srv://b", ("_pulsar-ssl._tcp.b", "b")),
        ("pulsar+srv://_mine._udp.b", ("_mine._udp.b",)),
        ("pulsar+ssl+srv://_mine._udp.b", ("_mine._udp.b",)),
    ],
)
def test_brokers_by_srv_records(url: str, names: tuple[str, ...]) -> None:
    assert parse_broker_url(url) == BrokerUrl(srv_names=names)


def test_brokers_by_a_service_url() -> None:
    assert parse_broker_url("pulsar+ssl://a:1,b") == BrokerUrl(hosts=(HostPort("a", 1), HostPort("b", 6651)))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "pulsar+srv://",
        "pulsar+srv:/b",
        "pulsar+ssl+srv://",
        "pulsar+srv+ssl://b",
        "pulsar+srv://b:6650",
        "pulsar+srv://a,b",
        "pulsar+srv://10.0.0.1",
        "pulsar+srv://[::1]",
        "pulsar+srv://b/path",
        "pulsar+srv:// b",
        "http://b",
        "pulsar://",
    ],
)
def test_bad_urls_of_brokers(url: str) -> None:
    with pytest.raises(AddressInvalid):
        parse_broker_url(url)


def test_a_service_url_that_a_broker_says_is_never_of_srv_records() -> None:
    """Security: what a broker redirects to is a host, which the rules are for."""
    with pytest.raises(AddressInvalid):
        parse_service_url("pulsar+srv://b")


def test_only_the_port_is_missing() -> None:
    for text in ("broker", "10.0.0.1", "[::1]"):
        with pytest.raises(PortMissing):
            parse_host_port(text)
    for text in ("", ":1", "broker:", "bro ker", "[::1"):
        with pytest.raises(AddressInvalid) as caught:
            parse_host_port(text)
        assert not isinstance(caught.value, PortMissing)


# ---- whatever is written

ADDRESS_TEXT = st.one_of(
    st.text(),
    st.text(alphabet="ab019.:-_[]@/%, \n\x00\u0661\uff16"),
    st.builds("{}:{}".format, st.sampled_from(["a", "[::1]", "[dead]", ""]), st.text(alphabet="0123456789")),
    st.builds(lambda zeros, port: "a:" + "0" * zeros + str(port), st.integers(0, 9), st.integers(0, 10**12)),
)


@given(ADDRESS_TEXT)
def test_an_address_is_parsed_or_invalid_and_nothing_else(text: str) -> None:
    try:
        parsed = parse_host_port(text)
    except AddressInvalid:
        return
    assert 0 < parsed.port <= 65535
    assert parsed.host.isascii()
    assert parsed.host.isprintable()
    assert not set(parsed.host) & set(" @/?#[]%")
    if ":" in parsed.host:
        ipaddress.IPv6Address(parsed.host)
    assert parse_host_port(str(parsed)) == parsed


@given(st.one_of(st.text(), ADDRESS_TEXT.map("pulsar://{}".format)))
def test_a_service_url_is_parsed_or_invalid_and_nothing_else(url: str) -> None:
    try:
        addresses = parse_service_url(url)
    except AddressInvalid:
        return
    assert addresses
    assert all(0 < address.port <= 65535 for address in addresses)


@pytest.mark.parametrize(
    ("client_address", "network"),
    [
        ("10.0.0.1:1234", "10.0.0.1"),
        ("[2001:db8:0:1:2:3:4:5]:1234", "2001:db8:0:1::/64"),
        ("[::1]:1234", "::/64"),
        ("[::ffff:10.0.0.1]:1234", "10.0.0.1"),
        ("[fe80::1%eth0]:1234", "fe80::/64"),
        ("10.0.0.1:0", "10.0.0.1"),
        ("carol", "carol"),
        ("", ""),
    ],
)
def test_a_client_counts_by_its_ipv4_address_or_its_64_bit_ipv6_network(client_address: str, network: str) -> None:
    assert client_network(client_address) == network


@pytest.mark.parametrize(
    ("network", "wide"),
    [
        ("10.0.0.1", "10.0.0.0/24"),
        ("2001:db8:0:1::/64", "2001:db8::/48"),
        ("::/64", "::/48"),
        ("carol", "carol"),
        ("", ""),
    ],
)
def test_a_wide_network_is_a_sites(network: str, wide: str) -> None:
    assert wide_network(network) == wide
