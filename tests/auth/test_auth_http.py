"""HTTP to issuers: bounded in time and size, never led elsewhere, and no secret in what it says."""

from __future__ import annotations

import gzip
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import msgspec
import pytest
import trio
import trio.testing
import trustme

from auth.http import ANSWER_BYTES_MAX, HttpFailed, IssuerClient, PlainHttp, discovery_url
from proxy.common.errors import ConfigError

URL = "https://issuer.example/keys"
SECRET = "not-to-be-seen"


class Answer(msgspec.Struct):
    name: str


class Network:
    """Answers everything with one answer; keeps what was asked."""

    def __init__(self, answer: httpx.Response | Exception | None = None, delay_s: float = 0.0) -> None:
        self.answer = answer or httpx.Response(200, json={"name": "x"})
        self.delay_s = delay_s
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        await trio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def client(network: Network | None, plain_http: PlainHttp = "nowhere", **more: Any) -> IssuerClient:
    transport = None if network is None else httpx.MockTransport(network)
    options = {"trust": "", "timeout_ms": 2000, **more}
    return IssuerClient("some.key", plain_http=plain_http, transport=transport, **options)


async def failure(network: Network | None, url: str = URL, **more: Any) -> str:
    with pytest.raises(HttpFailed) as caught:
        await client(network, **more).get_json(url, Answer)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    return str(caught.value)


async def test_json() -> None:
    network = Network()
    assert await client(network).get_json(URL, Answer) == Answer("x")
    [request] = network.requests
    assert (request.method, str(request.url)) == ("GET", URL)


async def test_a_form() -> None:
    network = Network()
    assert await client(network).post_form(URL, Answer, {"secret": SECRET, "scope": "a b&c"}) == Answer("x")
    [request] = network.requests
    assert request.method == "POST"
    assert request.headers["content-type"] == "application/x-www-form-urlencoded"
    assert request.content == b"secret=not-to-be-seen&scope=a+b%26c"
    assert SECRET not in str(request.url)


@pytest.mark.parametrize("issuer", ["https://a.example/b", "https://a.example/b/"])
def test_where_an_issuer_describes_itself(issuer: str) -> None:
    assert discovery_url(issuer) == "https://a.example/b/.well-known/openid-configuration"


# ---- bounds


async def test_no_answer_in_time(autojump_clock: trio.testing.MockClock) -> None:
    assert await failure(Network(delay_s=60)) == f"{URL}: no answer within 2 s"
    assert trio.current_time() == pytest.approx(2)


async def test_the_time_is_over_all_however_lively_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    async def dripping() -> AsyncIterator[bytes]:
        while True:
            await trio.sleep(0.5)
            yield b" "

    assert "no answer within" in await failure(Network(httpx.Response(200, content=dripping())))
    assert trio.current_time() == pytest.approx(2)


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            await trio.lowlevel.checkpoint()
            read += 65536
            yield b" " * 65536

    assert await failure(Network(httpx.Response(200, content=endless()))) == (
        f"{URL}: an answer of more than 1048576 bytes"
    )
    assert read <= ANSWER_BYTES_MAX + 65536


@pytest.mark.parametrize(("size", "fits"), [(ANSWER_BYTES_MAX, True), (ANSWER_BYTES_MAX + 1, False)])
async def test_the_largest_answer(size: int, fits: bool) -> None:
    network = Network(httpx.Response(200, content=b'{"name":"x"}'.ljust(size)))
    if fits:
        await client(network).get_json(URL, Answer)
    else:
        assert "more than" in await failure(network)


@pytest.mark.parametrize("status", [200, 500])
async def test_the_bound_holds_for_errors_too(status: int) -> None:
    assert "more than" in await failure(Network(httpx.Response(status, content=b" " * (ANSWER_BYTES_MAX + 1))))


async def test_nothing_is_unpacked() -> None:
    packed = gzip.compress(b'{"name":"x"}')
    network = Network(httpx.Response(200, headers={"content-encoding": "gzip"}, content=packed))
    assert "packed" in await failure(network)
    assert network.requests[0].headers["accept-encoding"] == "identity"


# ---- nowhere else


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    for target in ("https://elsewhere.example/", "/elsewhere"):
        network = Network(httpx.Response(status, headers={"location": target}))
        assert await failure(network) == f"{URL}: answered with status {status}"
        assert len(network.requests) == 1


NOT_ALLOWED: list[tuple[PlainHttp, str]] = [
    ("nowhere", "http://issuer.example/"),
    ("nowhere", "http://127.0.0.1/"),
    ("at loopback", "http://issuer.example/"),
    ("at loopback", "http://localhost.example/"),
    ("at loopback", "http://10.0.0.1/"),
    ("at loopback", "http://127.0.0.1.example/"),
    ("at loopback", f"http://localhost:{SECRET}@issuer.example/"),
    *(
        ("anywhere", url)
        for url in (
            "file:///etc/passwd",
            "ftp://issuer.example/",
            "/keys",
            "issuer.example",
            "",
            "https://",
            "https:///keys",
            f"https://user:{SECRET}@issuer.example/",
            "https://issuer.example:port/",
            "https://issuer\x00.example/",
            "x" * 100_000,
        )
    ),
]


@pytest.mark.parametrize(("plain_http", "url"), NOT_ALLOWED, ids=lambda value: value[:40])
async def test_addresses_that_are_not_asked(plain_http: PlainHttp, url: str) -> None:
    network = Network()
    assert SECRET not in await failure(network, url, plain_http=plain_http)
    assert not network.requests


@pytest.mark.parametrize(
    ("plain_http", "url"),
    [
        ("nowhere", "https://10.0.0.1:8443/a?b=c"),
        ("at loopback", "https://issuer.example/"),
        ("at loopback", "http://localhost:8080/"),
        ("at loopback", "http://127.0.0.1:8080/"),
        ("at loopback", "http://[::1]:8080/"),
        ("anywhere", "http://issuer.example/"),
    ],
)
async def test_addresses_that_are_asked(plain_http: PlainHttp, url: str) -> None:
    network = Network()
    await client(network, plain_http).get_json(url, Answer)
    assert str(network.requests[0].url) == url


class Wire:
    """What httpx itself sends, and through which proxy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proxied: list[bool] = []
        self.headers: list[httpx.Headers] = []

        async def handle(transport: Any, request: httpx.Request) -> httpx.Response:
            self.proxied.append(isinstance(transport._pool, httpcore.AsyncHTTPProxy))
            self.headers.append(request.headers)
            return httpx.Response(200, json={"name": "x"})

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


async def test_the_environments_proxy(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators behind one need it; to loopback it leads nowhere."""
    await client(None).get_json(URL, Answer)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    await client(None).get_json(URL, Answer)
    await client(None, "at loopback").get_json("http://127.0.0.1:1/", Answer)
    monkeypatch.setenv("NO_PROXY", "issuer.example")
    await client(None).get_json(URL, Answer)
    assert wire.proxied == [False, True, False, False]


async def test_a_bearers_token_goes_to_the_server_directly(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    await client(None).get_json(URL, Answer, bearer=SECRET)
    await client(None).get_json(URL, Answer)
    assert wire.proxied == [False, True]
    assert [headers.get("authorization") for headers in wire.headers] == [f"Bearer {SECRET}", None]


@pytest.mark.parametrize("proxy", ["socks5://proxy.example:1080", "gopher://proxy.example", "http://[::"])
async def test_a_proxy_that_is_none(wire: Wire, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    assert await failure(None)
    assert not wire.headers


async def test_no_credentials_from_the_environment(wire: Wire, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (".netrc", "_netrc"):
        (tmp_path / name).write_text(f"machine issuer.example login user password {SECRET}\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    await client(None).get_json(URL, Answer)
    assert "authorization" not in wire.headers[0]


# ---- broken answers


@pytest.mark.parametrize("status", [201, 204, 400, 401, 403, 404, 429, 500, 503])
async def test_another_status(status: int) -> None:
    assert await failure(Network(httpx.Response(status, json={"name": "x"}))) == f"{URL}: answered with status {status}"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":"invalid_client","error_description":"not-to-be-seen"}', " (invalid_client)"),
        (b'{"error":"Secret not-to-be-seen"}', ""),
        (b'{"error":5}', ""),
        (b'{"error":"a\\nb"}', ""),
        (b"<html>not-to-be-seen</html>", ""),
        (b"[" * 100_000, ""),
        (b"", ""),
    ],
)
async def test_the_reason_of_a_refusal(body: bytes, text: str) -> None:
    assert await failure(Network(httpx.Response(401, content=body))) == f"{URL}: answered with status 401{text}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"name":5}',
        b'{"name":null}',
        b'{"name":"x"',
        b"\xff",
        b'{"name":' + b"[" * 99_999,
    ],
    ids=lambda body: repr(body[:15]),
)
async def test_an_answer_that_is_not_what_was_asked_for(body: bytes) -> None:
    assert (await failure(Network(httpx.Response(200, content=body)))).startswith(f"{URL}: ")


async def test_values_of_an_answer_are_not_quoted() -> None:
    assert SECRET not in await failure(Network(httpx.Response(200, json={"name": [SECRET]})))
    assert SECRET not in await failure(Network(httpx.Response(200, content=f'{{"name": {SECRET}}}')))


async def test_nothing_of_a_form_is_quoted(autojump_clock: trio.testing.MockClock) -> None:
    slow = Network(delay_s=9)
    broken = Network(httpx.ReadError("it broke"))
    refused = Network(httpx.Response(400, content=json.dumps({"error": SECRET.replace("-", " ")})))
    for network in (slow, broken, refused):
        with pytest.raises(HttpFailed) as caught:
            await client(network).post_form(URL, Answer, {"secret": SECRET})
        assert SECRET not in str(caught.value)


async def test_the_error_at_the_bottom_is_the_one_that_tells() -> None:
    """What httpx makes of a certificate that is not trusted has no text."""
    try:
        try:
            raise ssl.SSLCertVerificationError("certificate verify failed: self-signed\n")
        except ssl.SSLError as cause:
            raise httpx.ConnectError("") from cause
    except httpx.ConnectError as error:
        network = Network(error)
    assert "self-signed" in await failure(network)
    assert await failure(Network(httpx.ConnectError(""))) == f"{URL}: ConnectError"


# ---- whom it trusts


@pytest.fixture
def authorities(tmp_path: Path) -> Path:
    path = tmp_path / "trust.pem"
    trustme.CA().cert_pem.write_to_path(path)
    return path


def contexts(wire_client: IssuerClient) -> ssl.SSLContext:
    return wire_client._tls.value


def test_the_authorities_of_a_file_are_the_only_ones(authorities: Path) -> None:
    context = contexts(client(None, trust=str(authorities)))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert len(context.get_ca_certs()) == 1


async def test_a_changed_file_counts(wire: Wire, authorities: Path, autojump_clock: trio.testing.MockClock) -> None:
    asking = client(None, trust=str(authorities))
    before = contexts(asking).get_ca_certs()
    trustme.CA().cert_pem.write_to_path(authorities)
    await trio.sleep(1)
    await asking.get_json(URL, Answer)
    assert contexts(asking).get_ca_certs() != before


@pytest.mark.parametrize("content", ["", "rubbish", None])
def test_a_file_without_certificates(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "trust.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"^some.key: .*trust.pem"):
        client(None, trust=str(file))
