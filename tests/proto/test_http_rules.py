"""proto.http_rules: which requests, headers, redirects and routes pass, and that what passes is one request to h11."""

import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote_to_bytes

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proto import http_rules
from proto.connect_rules import PROXIES_MAX
from proto.http_rules import (
    Headers,
    Origin,
    Redirect,
    RequestHead,
    RequestRefused,
    Routes,
    downstream_headers,
    header,
    is_repeatable,
    read_repeated,
    read_request,
    redirect_of,
    upstream_headers,
)

HOST = (b"host", b"proxy.example:8080")
TENANTS = b"/admin/v2/tenants"
ORIGIN = Origin("203.0.113.7", "https", "alice")


def read(
    *headers: tuple[bytes, bytes], method: bytes = b"GET", target: bytes = TENANTS, version: bytes = b"1.1"
) -> RequestHead:
    return read_request(method, target, [HOST, *headers], version)


def upstream(*headers: tuple[bytes, bytes], origin: Origin = ORIGIN, upgrade: bool = False) -> dict[bytes, bytes]:
    names_and_values = upstream_headers(read(*headers), origin, b"broker:8080", upgrade=upgrade)
    assert len({name for name, _ in names_and_values}) == len(names_and_values)
    return dict(names_and_values)


def refusal(
    *headers: tuple[bytes, bytes], method: bytes = b"GET", target: bytes = TENANTS, version: bytes = b"1.1"
) -> int:
    with pytest.raises(RequestRefused) as refused:
        read(*headers, method=method, target=target, version=version)
    assert refused.value.reason
    assert str(refused.value) == refused.value.text != ""
    return refused.value.status


# -- headers that were read before


def outcome(read: Callable[[], RequestHead]) -> object:
    try:
        return read()
    except RequestRefused as refused:
        return refused.status, refused.reason


@given(
    st.sampled_from([b"GET", b"HEAD", b"PUT", b"CONNECT", b"trace", b"G T", b""]),
    st.one_of(
        st.sampled_from([TENANTS, b"/a?token=x", b"http://x/y", b"*", b"/..", b"//x", b""]), st.binary(max_size=9)
    ),
    st.lists(st.sampled_from([(b"Accept", b"*/*"), (b"connection", b"close"), (b"expect", b"100-continue")])),
)
def test_a_request_with_headers_that_were_read_before_is_read_as_any_other(
    method: bytes, target: bytes, headers: Headers
) -> None:
    known = read(*headers)
    assert is_repeatable(known)
    assert outcome(lambda: read_repeated(known, method, target)) == outcome(
        lambda: read(*headers, method=method, target=target)
    )


@pytest.mark.parametrize(
    ("more", "version"),
    [
        ((b"content-length", b"0"), b"1.1"),
        ((b"content-length", b"2"), b"1.1"),
        ((b"transfer-encoding", b"chunked"), b"1.1"),
        ((b"upgrade", b"h2c"), b"1.1"),
        ((b"accept", b"*/*"), b"1.0"),
    ],
)
def test_headers_that_say_more_are_read_each_time(more: tuple[bytes, bytes], version: bytes) -> None:
    assert not is_repeatable(read(more, version=version))


# -- the request line


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"M-SEARCH"])
def test_methods_pass(method: bytes) -> None:
    assert read(method=method).method == method


@pytest.mark.parametrize(
    ("method", "status"),
    [
        (b"CONNECT", 405),
        (b"TRACE", 405),
        (b"trace", 405),
        (b"TRACK", 405),
        (b"", 400),
        (b"GET ", 400),
        (b"GET\r\n", 400),
        (b"G\x00T", 400),
        (b"G" * 33, 400),
    ],
)
def test_methods_are_refused(method: bytes, status: int) -> None:
    assert refusal(method=method) == status


@pytest.mark.parametrize("version", [b"0.9", b"1.2", b"2.0", b""])
def test_other_versions_are_refused(version: bytes) -> None:
    assert refusal(version=version) == 505


TOPIC = b"/admin/v2/persistent/public/default/"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/", "/"),
        (b"/admin/v2/tenants/", "/admin/v2/tenants/"),
        (b"/admin/v2//tenants", "/admin/v2//tenants"),
        (b"/%61dmin/v2", "/admin/v2"),
        (TOPIC + b"a%2Fb", TOPIC.decode() + "a%2Fb"),
        (TOPIC + b"a%2fb/stats", TOPIC.decode() + "a%2Fb/stats"),
        (TOPIC + b"100%25", TOPIC.decode() + "100%"),
        (TOPIC + b"a%252Fb", TOPIC.decode() + "a%2Fb"),
        (TOPIC + b"a%25252Fb", TOPIC.decode() + "a%252Fb"),
        (TOPIC + b"%C3%A9", TOPIC.decode() + "é"),
        (TOPIC + b"a..b/.c/d../...", TOPIC.decode() + "a..b/.c/d../..."),
        (TOPIC + b"a%5Cb", TOPIC.decode() + "a\\b"),
        (TOPIC + b"a;b", TOPIC.decode() + "a;b"),
        (TOPIC + b"https://x", TOPIC.decode() + "https://x"),
    ],
)
def test_paths_pass_unchanged(target: bytes, path: str) -> None:
    head = read(target=target)
    assert (head.target, head.path) == (target, path)
    assert read(target=target + b"?a=../%2e%2e/%zz\\&b=//?").target == target + b"?a=../%2e%2e/%zz\\&b=//?"


@pytest.mark.parametrize(
    ("target", "origin_form"),
    [
        (b"http://elsewhere/admin?x=1", b"/admin?x=1"),
        (b"HTTPS://elsewhere:8443/admin", b"/admin"),
        (b"http://[2001:db8::1]:80", b"/"),
        (b"http://elsewhere?x", b"/?x"),
    ],
)
def test_of_an_absolute_target_the_path_counts(target: bytes, origin_form: bytes) -> None:
    assert read(target=target).target == origin_form


@pytest.mark.parametrize(
    "target",
    [
        b"",
        b"*",
        b"admin",
        b"broker:8080",
        b"?x",
        b"//elsewhere/admin",
        b"ftp://elsewhere/admin",
        b"http:///admin",
        b"http://user@elsewhere/admin",
        b"http://else where/",
        b"http://elsewhere//admin",
        b"http://elsewhere/a/../b",
        b"/a b",
        b"/a\tb",
        b"/a\r\nX: y",
        b"/a\x00",
        b"/a\x7f",
        b"/\xc3\xa9",
        b"/a#b",
        b"/a?b#c",
        b"/a?b c",
        b"/a\\b",
        b"/a%",
        b"/a%2",
        b"/a%zz",
        b"/a%0ab",
        b"/a%0D%0AX:%20y",
        b"/a%00",
        b"/a%7F",
        b"/a%C2%85",
        b"/a%E2%80%A8",
        b"/a%ff",
        b"/%c0%ae%c0%ae/b",
    ],
)
def test_malformed_targets_are_refused(target: bytes) -> None:
    assert refusal(target=target) == 400


@pytest.mark.parametrize(
    "dots", [b".", b"..", b".%2e", b"%2E", b"%2e%2e", b"%252e", b"%25252e.", b"%25%32%65", b"..;x", b"%2e.%3bx"]
)
@pytest.mark.parametrize("slash", [b"/", b"%2F", b"%2f", b"%5C", b"%252f", b"%255c"])
def test_dot_segments_are_refused_however_encoded(dots: bytes, slash: bytes) -> None:
    assert refusal(target=b"/admin/a" + slash + dots) == 400
    assert refusal(target=b"/admin/a" + slash + dots + slash + b"b") == 400


def test_a_path_encoded_too_often_is_refused() -> None:
    assert read(target=b"/a%252525") is not None
    assert refusal(target=b"/a%25252525") == 400
    assert refusal(target=b"/a%" + b"25" * 10_000 + b"2e") == 400


def test_neither_query_nor_credentials_are_shown() -> None:
    head = read((b"authorization", b"Bearer s3cret"), target=b"/admin?token=s3cret")
    assert "s3cret" not in repr(head)
    assert "s3cret" not in repr(Origin("", "", "", b"s3cret"))


# -- the headers as they come


@pytest.mark.parametrize(
    "one",
    [
        (b"", b"x"),
        (b"a b", b"x"),
        (b"a:", b"x"),
        (b"a\r\nb", b"x"),
        (b"\xc3\xa9", b"x"),
        (b"a", b"x\r\ny"),
        (b"a", b"x\r\n y"),
        (b"a", b"x\ny"),
        (b"a", b"x\ry"),
        (b"a", b"x\x00y"),
        (b"a", b"x\x0by"),
        (b"a", b"x\x7f"),
        (b"a", b"x\n"),
    ],
)
def test_malformed_headers_are_refused_both_ways(one: tuple[bytes, bytes]) -> None:
    assert refusal(one) == 400
    for response, extra in ([one], []), ([], [one]):
        with pytest.raises(RequestRefused) as refused:
            downstream_headers(response, extra)
        assert refused.value.status == 502


def test_names_are_in_lower_case_and_values_without_blanks() -> None:
    assert read((b"X-A", b"\t b \xe9 ")).headers == [HOST, (b"x-a", b"b \xe9")]


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b"a", b"a"],
        [b"a", b"b"],
        [b"a,b"],
        [b"a/b"],
        [b"user@a"],
        [b"a:0"],
        [b"a:99999"],
        [b"a b"],
        [b"[::1"],
        [b"\xe9"],
    ],
)
def test_a_host_is_needed_once_and_well_formed(hosts: list[bytes]) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_request(b"GET", b"/", [(b"host", host) for host in hosts], b"1.1")
    assert (refused.value.status, refused.value.reason) == (400, "bad_host")


@pytest.mark.parametrize("hosts", [[], [b""], [b"a"], [b"a:1"], [b"[::1]"], [b"[::1]:443"], [b"192.0.2.1"]])
def test_hosts_that_pass(hosts: list[bytes]) -> None:
    read_request(b"GET", b"/", [(b"host", host) for host in hosts], b"1.1" if hosts else b"1.0")


@pytest.mark.parametrize(
    "name", [b"authorization", b"content-type", b"x-original-principal", b"x-pulsar-auth-method-name"]
)
def test_what_two_servers_could_read_differently_has_one_value(name: bytes) -> None:
    assert refusal((name, b"a"), (name, b"b")) == 400
    assert header(read((name, b"a"), (name, b"a")).headers, name) == b"a"


def test_header() -> None:
    assert header([(b"a", b"1"), (b"b", b"2")], b"b") == b"2"
    assert header([(b"a", b"1")], b"b") is None
    with pytest.raises(RequestRefused):
        header([(b"a", b"1"), (b"a", b"2")], b"a")


CHUNKED = (b"transfer-encoding", b"chunked")


def length(value: bytes) -> tuple[bytes, bytes]:
    return b"content-length", value


@pytest.mark.parametrize(
    ("headers", "content_length", "has_body"),
    [
        ([], None, False),
        ([length(b"0")], 0, False),
        ([length(b"12")], 12, True),
        ([length(b"012")], 12, True),
        ([length(b"12"), length(b"12")], 12, True),
        ([CHUNKED], None, True),
        ([(b"Transfer-Encoding", b"Chunked ")], None, True),
    ],
)
def test_framing(headers: Headers, content_length: int | None, has_body: bool) -> None:
    head = read(*headers, method=b"POST")
    assert (head.content_length, head.has_body) == (content_length, has_body)
    sent = upstream(*headers)
    assert sent.get(b"content-length") == (None if content_length is None else b"%d" % content_length)
    assert sent.get(b"transfer-encoding") == (b"chunked" if CHUNKED[0] in [n.lower() for n, _ in headers] else None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([length(b"1"), CHUNKED], 400),
        ([CHUNKED, length(b"0")], 400),
        ([length(b"1"), length(b"2")], 400),
        ([length(b"1"), length(b"01")], 400),
        ([length(b"1, 1")], 400),
        ([length(b"+1")], 400),
        ([length(b"-1")], 400),
        ([length(b"0x1")], 400),
        ([length(b"1_0")], 400),
        ([length(b"")], 400),
        ([length(b"1 0")], 400),
        ([length(b"\xb2")], 400),
        ([length(b"9" * 19)], 400),
        ([CHUNKED, CHUNKED], 501),
        ([(b"transfer-encoding", b"gzip, chunked")], 501),
        ([(b"transfer-encoding", b"chunked, identity")], 501),
        ([(b"transfer-encoding", b"identity")], 501),
        ([(b"transfer-encoding", b"xchunked")], 501),
        ([(b"transfer-encoding", b"")], 501),
        ([(b"transfer-encoding", b"\x0bchunked")], 400),
    ],
)
def test_ambiguous_framing_is_refused(headers: Headers, status: int) -> None:
    assert refusal(*headers, method=b"POST") == status


def test_http_1_0_has_no_transfer_encoding() -> None:
    assert refusal(CHUNKED, method=b"POST", version=b"1.0") == 400


EXPECT = (b"expect", b"100-Continue")


def test_expectations() -> None:
    assert read(EXPECT, length(b"1")).expects_continue
    assert not read(EXPECT, length(b"1"), version=b"1.0").expects_continue
    assert not read(EXPECT).expects_continue
    assert not read(length(b"1")).expects_continue
    assert b"expect" not in upstream(EXPECT, length(b"1"))
    assert refusal((b"expect", b"200-ok")) == 417


WEBSOCKET: Headers = [
    (b"connection", b"keep-alive, Upgrade"),
    (b"upgrade", b"WebSocket"),
    (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="),
    (b"sec-websocket-version", b"13"),
]


def test_an_upgrade_to_websocket_passes_where_the_caller_can_serve_it() -> None:
    assert read(*WEBSOCKET).upgrade == b"websocket"
    assert b"upgrade" not in upstream(*WEBSOCKET)
    sent = upstream(*WEBSOCKET, upgrade=True)
    assert (sent[b"connection"], sent[b"upgrade"]) == (b"upgrade", b"websocket")
    assert b"upgrade" not in upstream(upgrade=True)


def test_no_other_upgrade_passes() -> None:
    for index in range(len(WEBSOCKET)):
        assert read(*WEBSOCKET[:index], *WEBSOCKET[index + 1 :]).upgrade == b""
    assert read(*WEBSOCKET, version=b"1.0").upgrade == b""
    assert read(*WEBSOCKET, method=b"POST").upgrade == b""
    assert read(*WEBSOCKET, length(b"1")).upgrade == b""
    for other in b"h2c", b"websocket, h2c":
        assert read((b"connection", b"upgrade, http2-settings"), (b"upgrade", other), *WEBSOCKET[2:]).upgrade == b""


# -- to the broker


def test_what_the_broker_is_told_of_the_client() -> None:
    assert upstream((b"accept", b"*/*")) == {
        b"host": b"broker:8080",
        b"accept": b"*/*",
        b"x-forwarded-for": b"203.0.113.7",
        b"x-forwarded-proto": b"https",
        b"x-forwarded-host": b"proxy.example:8080",
        b"x-original-principal": b"alice",
        b"via": b"1.1 pulsar-trio-proxy",
    }


CLAIMS = [
    b"X-Original-Principal",
    b"x-original-url",
    b"X-Forwarded-For",
    b"x-forwarded-prefix",
    b"Forwarded",
    b"X-Real-IP",
    b"Proxy",
    b"Proxy-Authorization",
    b"proxy-connection",
    b"X-Pulsar-Auth-Role",
    b"x-rewrite-url",
    b"true-client-ip",
    b"cf-connecting-ip",
    b"x-client-ip",
    b"x-cluster-client-ip",
]
HOP_BY_HOP = [b"Keep-Alive", b"TE", b"Trailer", b"Upgrade", b"HTTP2-Settings", b"Connection"]


@pytest.mark.parametrize("name", CLAIMS + HOP_BY_HOP)
def test_claims_and_hop_by_hop_headers_of_clients_are_dropped(name: bytes) -> None:
    expected = upstream(origin=Origin("203.0.113.7", "http"))
    assert upstream((name, b"admin"), origin=Origin("203.0.113.7", "http")) == expected
    assert upstream((name.replace(b"-", b"_"), b"admin"), origin=Origin("203.0.113.7", "http")) == expected
    assert b"admin" not in upstream((name, b"admin")).values()


@pytest.mark.parametrize("name", [b"content_length", b"transfer_encoding", b"expect"])
def test_framing_under_another_name_is_dropped(name: bytes) -> None:
    assert upstream((name, b"100-continue")) == upstream()


def test_headers_that_connection_names_are_dropped() -> None:
    sent = upstream((b"connection", b"close, X-A ,,x-b"), (b"x-a", b"1"), (b"x-b", b"2"), (b"x-c", b"3"))
    assert {b"x-a", b"x-b", b"x-c"} & sent.keys() == {b"x-c"}


def test_connection_takes_away_nothing_that_the_proxy_sets_or_decides_by() -> None:
    plain: Headers = [
        (b"authorization", b"Bearer x"),
        (b"x-pulsar-auth-method-name", b"token"),
        (b"via", b"1.1 other"),
        length(b"2"),
    ]
    names = b",".join(name for name, _ in upstream_headers(read(*plain), ORIGIN, b"broker:8080"))
    named = upstream_headers(read((b"connection", names), *plain), ORIGIN, b"broker:8080")
    assert named == upstream_headers(read(*plain), ORIGIN, b"broker:8080")


def test_the_proxy_s_credentials_go_with_a_client_s_role_alone() -> None:
    """Without one a broker would let the client act as the proxy."""
    assert b"authorization" not in upstream(origin=Origin("203.0.113.7", "http", "", b"Bearer proxy"))


def test_the_client_s_credentials_pass_and_the_proxy_s_own_stand_in_for_none() -> None:
    own = Origin("203.0.113.7", "http", "alice", b"Bearer proxy")
    theirs = (b"authorization", b"Bearer client")
    method = (b"x-pulsar-auth-method-name", b"token")
    assert upstream(theirs, method)[b"authorization"] == b"Bearer client"
    sent = upstream(theirs, method, origin=own)
    assert (sent[b"authorization"], sent[b"x-pulsar-auth-method-name"]) == (b"Bearer client", b"token")
    for none in [], [(b"authorization", b"")], [(b"authorization", b""), (b"authorization", b"")]:
        sent = upstream(*none, method, origin=own)
        assert sent[b"authorization"] == b"Bearer proxy"
        assert b"x-pulsar-auth-method-name" not in sent


@pytest.mark.parametrize(
    "role", ["a\r\nx-original-principal: admin", "a\n", "a\x00", " admin", "admin ", "a\tb", "é", "admin\u2028"]
)
def test_a_role_that_a_header_cannot_carry_is_refused(role: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        upstream(origin=Origin("203.0.113.7", "http", role))
    assert (refused.value.status, refused.value.reason) == (403, "bad_role")


@pytest.mark.parametrize("role", ["a", "my role", "CN=x,O=y", "spiffe://a/b"])
def test_other_roles_pass_unchanged(role: str) -> None:
    assert upstream(origin=Origin("203.0.113.7", "http", role))[b"x-original-principal"] == role.encode()


def test_via_is_kept_and_a_circle_is_refused() -> None:
    passed = (b"via", b"1.1 other (a, 1.1 comment), HTTP/1.1  pulsar-trio-proxy")
    head = read(passed, version=b"1.0")
    sent = [value for name, value in upstream_headers(head, ORIGIN, b"b") if name == b"via"]
    assert sent == [passed[1], b"1.0 pulsar-trio-proxy"]
    assert read(*[passed] * PROXIES_MAX)
    assert refusal(*[passed] * (PROXIES_MAX + 1)) == 508
    assert refusal((b"via", b",".join([b"1.1 pulsar-trio-proxy (x)"] * (PROXIES_MAX + 1)))) == 508


# -- to the client


def test_a_response_s_headers() -> None:
    response: Headers = [
        (b"Content-Type", b"application/json"),
        (b"connection", b"close, x-hop"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authenticate", b"Basic"),
        (b"upgrade", b"h2c"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"x-frame-options", b"ALLOWALL"),
        (b"content-length", b"07"),
    ]
    assert downstream_headers(response, [(b"X-Frame-Options", b"DENY"), (b"x-more", b"1")]) == [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"content-length", b"7"),
        (b"x-frame-options", b"DENY"),
        (b"x-more", b"1"),
    ]


def test_a_response_in_chunks_has_no_length() -> None:
    assert downstream_headers([CHUNKED, length(b"3")], []) == []


@pytest.mark.parametrize("headers", [[length(b"1"), length(b"2")], [length(b"x")]])
def test_a_response_s_ambiguous_length_is_refused(headers: Headers) -> None:
    with pytest.raises(RequestRefused) as refused:
        downstream_headers(headers, [])
    assert refused.value.status == 502


# -- redirects

BASE = ("http", "broker-0", 8080)


@pytest.mark.parametrize(
    ("location", "redirect"),
    [
        (b"http://Broker-1:8081/admin?x=%2F", ("http", "broker-1", 8081, b"/admin?x=%2F")),
        (b"http://broker-1/a", ("http", "broker-1", 80, b"/a")),
        (b"HTTPS://broker-1", ("https", "broker-1", 443, b"/")),
        (b"http://[2001:db8::1]:1/a#b", ("http", "2001:db8::1", 1, b"/a")),
        (b"http://broker-1?authoritative=true", ("http", "broker-1", 80, b"/?authoritative=true")),
        (b"//broker-1:1/a", ("http", "broker-1", 1, b"/a")),
        (b"/a?b", ("http", "broker-0", 8080, b"/a?b")),
    ],
)
def test_redirects(location: bytes, redirect: tuple[str, str, int, bytes]) -> None:
    for status, keeps_method in (301, False), (302, False), (303, False), (307, True), (308, True):
        assert redirect_of(status, [(b"location", location)], BASE) == Redirect(*redirect, keeps_method)


@pytest.mark.parametrize("status", [200, 201, 300, 304, 305, 306, 404])
def test_no_redirect(status: int) -> None:
    assert redirect_of(status, [(b"location", b"/a"), (b"location", b"\n")], BASE) is None
    assert redirect_of(307, [], BASE) is None


@pytest.mark.parametrize(
    "location",
    [
        b"",
        b"a",
        b"?a",
        b"ftp://broker-1/a",
        b"file:///etc/passwd",
        b"http:/a",
        b"http:///a",
        b"http://user@broker-1/a",
        b"http://broker-1\\@elsewhere/a",
        b"http://broker-1:x/a",
        b"http://broker-1:0/a",
        b"http://broker-1//a",
        b"http://broker-1/a/../b",
        b"http://broker-1/a b",
        b"http://broker-1/a\r\nx: y",
        b"///a",
        b"//",
        b"/\xe9",
        b"/a%2e%2e/%2e%2e",
    ],
)
def test_malformed_redirects_are_refused(location: bytes) -> None:
    with pytest.raises(RequestRefused) as refused:
        redirect_of(307, [(b"location", location)], BASE)
    assert refused.value.status == 502
    assert refused.value.reason in {"bad_redirect", "bad_host"}


def test_two_locations_are_refused() -> None:
    with pytest.raises(RequestRefused) as refused:
        redirect_of(307, [(b"location", b"/a"), (b"location", b"/b")], BASE)
    assert refused.value.status == 502


def test_no_redirect_leads_from_tls_to_plain_text() -> None:
    secure = ("https", "broker-0", 8443)
    with pytest.raises(RequestRefused) as refused:
        redirect_of(307, [(b"location", b"http://broker-1:8080/a")], secure)
    assert (refused.value.status, refused.value.reason) == (502, "redirect_downgrade")
    assert redirect_of(307, [(b"location", b"//broker-1/a")], secure) == Redirect("https", "broker-1", 443, b"/a", True)


# -- routes

ROUTES = Routes(
    [("/admin", "brokers"), ("/lookup", "brokers"), ("/admin/v3/functions/", "functions"), ("/ws", "websocket")]
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/admin", "brokers"),
        ("/admin/", "brokers"),
        ("/admin/v3", "brokers"),
        ("/admin/v3/functions", "functions"),
        ("/admin/v3/functions/a/b", "functions"),
        ("/admin/v3/functions2", "brokers"),
        ("/administrator", None),
        ("/Admin", None),
        ("/", None),
        ("/ws/v2", "websocket"),
        (TOPIC.decode() + "a%2Fb", "brokers"),
        (TOPIC.decode() + "a;b//c", "brokers"),
    ],
)
def test_the_longest_prefix_counts(path: str, name: str | None) -> None:
    assert ROUTES.find(path) == name


def test_a_route_for_all() -> None:
    assert Routes([("/", "all"), ("/a", "a")]).find("/b") == "all"
    assert Routes([("/", "all"), ("/a", "a")]).find("/a/b") == "a"
    assert Routes([]).find("/a") is None


@pytest.mark.parametrize(
    "target",
    [
        b"/admin%2Fv3/functions",
        b"/admin/v3%2ffunctions/a",
        b"/admin/v3%252ffunctions/a",
        b"/admin/v3%5Cfunctions",
        b"/admin/v3//functions",
        b"/admin//v3/functions",
        b"/admin/v3;x/functions",
        b"/admin/v3/functions;x",
        b"/admin/v3/functions%3Bx=1/a",
        b"/admin/v3/functions%2Fa",
        b"/admin;x/v2",
    ],
)
def test_a_path_that_leads_elsewhere_when_read_otherwise_is_refused(target: bytes) -> None:
    with pytest.raises(RequestRefused) as refused:
        ROUTES.find(read(target=target).path)
    assert (refused.value.status, refused.value.reason) == (400, "ambiguous_path")


# -- whatever comes

FRAMING = (
    b"content-length Content-Length transfer-encoding Transfer-Encoding content_length connection expect te trailer"
)
OTHERS = b"host upgrade via authorization x-a x-b x-original-principal x-forwarded-for"
NAMES = st.sampled_from([*FRAMING.split(), *OTHERS.split()]) | st.from_regex(rb"\A[a-z-]{1,4}\Z")
VALUES = st.sampled_from(b"0 3 5 chunked Chunked close,host content-length x-forwarded-for,via 100-continue a".split())
HOSTILE = (
    st.sampled_from([b"3\r\nx: y", b"a\r\n b", b"a\nb", b"\r", b"a\0", b" a ", b"3, 3", b"", b"gzip, chunked"])
    | st.binary()
)
HEADERS = st.lists(
    st.tuples(NAMES, VALUES) | st.tuples(NAMES, VALUES) | st.tuples(NAMES | HOSTILE, VALUES | HOSTILE), max_size=3
)
TARGETS = st.sampled_from(
    [b"/", b"/a%2Fb?c", b"http://h/a", b'/~"{', b"/ HTTP/1.1\r\n\r\nGET /x", b"/\xff", b"/a\n", b"*"]
)
METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"a\r\n", b"A B"])
ROLES = st.sampled_from(["", "alice", "my role", "CN=a, O=b", "a\r\nx: y", "a\n", "\0"])
BODY = b"three"


def parse(head: RequestHead, headers: Headers) -> Sequence[h11.Event]:
    """Return what h11 reads of a request that is sent as these bytes, and of nothing more."""
    server = h11.Connection(h11.SERVER)
    body = BODY[: head.content_length or 0] if head.content_length is not None else b""
    if head.has_body and head.content_length is None:
        body = b"5\r\nthree\r\n0\r\n\r\n"
    lines = [
        head.method + b" " + head.target + b" HTTP/1.1",
        *[name + b": " + value for name, value in headers],
        b"",
        b"",
    ]
    server.receive_data(b"\r\n".join(lines) + body)
    events: list[h11.Event] = []
    while not isinstance(event := server.next_event(), type(h11.NEED_DATA)):
        events.append(event)
        if isinstance(event, h11.EndOfMessage):
            break
    assert server.trailing_data == (b"", False)
    return events


@given(
    METHODS,
    TARGETS,
    HEADERS,
    ROLES,
    st.sampled_from([b"1.0", b"1.1"]),
)
@example(b"POST", b"/a", [(b"Content-Length", b"5"), (b"connection", b"content-length")], "alice", b"1.1")
@example(b"POST", b"/a", [(b"Transfer-Encoding", b"Chunked"), (b"content_length", b"3")], "", b"1.1")
def test_what_passes_is_one_request_with_the_same_meaning(
    method: bytes, target: bytes, headers: Headers, role: str, version: bytes
) -> None:
    try:
        head = read_request(method, target, [HOST, *headers], version)
        sent = upstream_headers(head, Origin("203.0.113.7", "http", role), b"broker:8080")
    except RequestRefused:
        return
    assert_harmless(sent)
    if (head.content_length or 0) > len(BODY):
        return
    request, *rest = parse(head, sent)
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (method, head.target)
    assert list(request.headers) == sent
    assert [value for name, value in sent if name == b"host"] == [b"broker:8080"]
    assert [value for name, value in sent if name == b"x-original-principal"] == ([role.encode()] if role else [])
    assert isinstance(rest[-1], h11.EndOfMessage)
    body = b"".join(bytes(event.data) for event in rest if isinstance(event, h11.Data))
    assert body == (BODY[: head.content_length] if head.has_body else b"")


def assert_harmless(headers: Headers) -> None:
    for name, value in headers:
        assert name
        assert not set(name + value) & set(b"\r\n\0")
        assert value == value.strip()


@given(HEADERS, HEADERS)
def test_no_response_ends_a_header_s_line(headers: Headers, extra: Headers) -> None:
    try:
        sent = downstream_headers(headers, extra)
    except RequestRefused:
        return
    assert_harmless(sent)


PIECES = st.sampled_from(
    [b".", b"..", b"%2e", b"%25", b"2e", b"2F", b"%2f", b"%5C", b"/", b"//", b";", b"%3b", b"a", b"b", b"c"]
)
PATHS = st.lists(PIECES, max_size=9).map(lambda pieces: b"/" + b"".join(pieces))


@given(PATHS)
def test_no_reading_of_a_path_has_dot_segments(path: bytes) -> None:
    try:
        read(target=path)
    except RequestRefused:
        return
    for _ in range(6):
        for segment in path.replace(b"\\", b"/").split(b"/"):
            assert segment.split(b";")[0] not in {b".", b".."}
        path = unquote_to_bytes(path)


LOCATIONS = st.tuples(st.sampled_from([b"", b"//h", b"http://h:1", b"https://[::1]"]), PATHS | HOSTILE).map(b"".join)


@given(st.sampled_from([301, 307]), LOCATIONS)
def test_a_redirect_is_a_request_s_target(status: int, location: bytes) -> None:
    try:
        redirect = redirect_of(status, [(b"location", location)], BASE)
    except RequestRefused:
        return
    if redirect is not None:
        assert read(target=redirect.target).target == redirect.target


NESTED = Routes([("/a", "x"), ("/a/b", "y"), ("/a/b/c", "x"), ("/a/b/c/a", "z")])


@given(PATHS, st.permutations("sdp"), st.integers(0, 3))
@example(b"/a/b;%2Fc", "pds", 1)
@example(b"/a/b;%2Fc", "dps", 2)
@example(b"/a/b;/c%2Fb", "pds", 1)
@example(b"/a/b%2Fc;", "dps", 1)
def test_no_reading_of_a_path_has_another_route(path: bytes, order: Sequence[str], steps: int) -> None:
    """Servers join slashes (s), decode them (d) and drop parameters (p), in whatever order, or do none of it."""
    try:
        name = NESTED.find(read(target=path).path)
    except RequestRefused:
        return
    text = unquote_to_bytes(re.sub(b"(?i)%2F", b"%252F", path)).decode()
    for step in order[:steps]:
        pattern, replacement = {"s": ("//+", "/"), "d": (r"(?i)%2F|\\", "/"), "p": (";[^/]*", "")}[step]
        text = re.sub(pattern, replacement, text)
    prefixes = {"/a/": "x", "/a/b/": "y", "/a/b/c/": "x", "/a/b/c/a/": "z"}
    assert name == next((prefixes[one] for one in sorted(prefixes, reverse=True) if f"{text}/".startswith(one)), None)


def test_what_h11_makes_of_a_folded_header_leaves_in_one_line() -> None:
    client = h11.Connection(h11.SERVER)
    client.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b\r\n\tX-Forwarded-For: c\r\n\r\n")
    request = client.next_event()
    assert isinstance(request, h11.Request)
    head = read_request(request.method, request.target, list(request.headers), request.http_version)
    assert (b"x-a", b"b X-Forwarded-For: c") in upstream_headers(head, ORIGIN, b"broker:8080")


SEGMENTS = st.text(alphabet="ab09.~_-%2eE/;\\?: ", max_size=12).map(str.encode)


@given(SEGMENTS)
@example(b"admin/v2/.a")
@example(b"admin/..")
@example(b"admin/a..b/c.")
@example(b"admin//b")
@example(b"admin/\n")
@example(b"admin/")
def test_a_plain_path_is_read_as_all_others_are(rest: bytes) -> None:
    def read_path() -> object:
        try:
            return http_rules._read_path(b"/" + rest)
        except RequestRefused as refused:
            return refused.status, refused.reason

    found = read_path()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_rules, "_PLAIN_PATH", re.compile(rb"(?!)"))  # matches nothing
        assert read_path() == found
