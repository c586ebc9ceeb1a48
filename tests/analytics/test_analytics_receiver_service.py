"""The receiver over real sockets in this process: TLS, tokens, the number of connections."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio
import trustme
from receiver_requests import body, http_request, named

from analytics.receiver.config import Admin, Authentication, Config, Limits, Listen, Spool, Tls
from analytics.receiver.http_server import RequestHead, Response
from analytics.receiver.service import ADMIN_CONNECTIONS_MAX, Addresses, open_spool, serve
from analytics.receiver.write_endpoint import WriteEndpoint
from analytics.spool import reader

TOKEN = "a-token-of-good-length"
GOOD = body(2, [named("a")])


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Addresses]:
    writer = open_spool(config)
    with structlog.testing.capture_logs():
        async with trio.open_nursery() as nursery:
            yield await nursery.start(serve, config, writer)
            nursery.cancel_scope.cancel()
    writer.close()


def config_for(directory: Path, tls: Tls | None = None, tokens: tuple[str, ...] = (), **limits: int) -> Config:
    return Config(
        listen=Listen(bind="127.0.0.1:0", tls=tls),
        admin=Admin(bind="127.0.0.1:0"),
        authentication=Authentication(token_files=tokens),
        limits=Limits(**limits),
        spool=Spool(directory=str(directory / "spool"), free_bytes_min=0),
    )


async def connect(address: str, local_address: str | None = None) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port), local_address=local_address)


async def status(stream: trio.abc.Stream, data: bytes) -> int:
    """The status of an answer; 0 if there is none."""
    try:
        await stream.send_all(data)
        answer = await stream.receive_some()
    except trio.BrokenResourceError:
        return 0
    return int(answer.split()[1]) if answer else 0


def spooled(directory: Path) -> int:
    return sum(
        len(list(reader.read_records(one.path, 0, one.size_bytes))) for one in reader.list_segments(directory / "spool")
    )


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_tls(authority: trustme.CA, directory: Path, client_ca: bool = False) -> Tls:
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    (directory / "cert.pem").write_bytes(b"".join(one.bytes() for one in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(directory / "ca.pem")
    files = {"certificate": str(directory / "cert.pem"), "key": str(directory / "key.pem")}
    return Tls(**files, client_ca=str(directory / "ca.pem") if client_ca else "")


async def secured(address: str, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    return trio.SSLStream(await connect(address), context, server_hostname="localhost", https_compatible=True)


async def test_tokens_are_required_by_the_write_listener_and_not_by_the_admin_one(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    async with running(config_for(tmp_path, tokens=(str(tmp_path / "tokens"),))) as addresses:
        for header, expected in (
            (f"Authorization: Bearer {TOKEN}", 204),
            ("Authorization: Bearer wrong", 401),
            ("X: y", 401),
        ):
            async with await connect(addresses.write[0]) as stream:
                assert await status(stream, http_request(2, GOOD, header)) == expected
        async with await connect(addresses.admin[0]) as stream:
            assert await status(stream, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n") == 200
        async with await connect(addresses.write[0]) as stream:
            assert await status(stream, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == 401
    assert spooled(tmp_path) == 1


async def test_tls_with_and_without_client_certificates(authority: trustme.CA, tmp_path: Path) -> None:
    async with running(config_for(tmp_path, server_tls(authority, tmp_path, client_ca=True))) as addresses:
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        async with await secured(addresses.write[0], trusting) as stream:
            assert await status(stream, http_request(2, GOOD)) == 0  # no certificate
        strange = ssl.create_default_context()
        authority.configure_trust(strange)
        trustme.CA().issue_cert("prometheus").configure_cert(strange)
        async with await secured(addresses.write[0], strange) as stream:
            assert await status(stream, http_request(2, GOOD)) == 0  # of another's
        known = ssl.create_default_context()
        authority.configure_trust(known)
        authority.issue_cert("prometheus").configure_cert(known)
        async with await secured(addresses.write[0], known) as stream:
            for _ in range(3):
                assert await status(stream, http_request(2, GOOD)) == 204
            assert await status(stream, http_request(2, b"", content_type="text/plain")) == 415
        async with await connect(addresses.write[0]) as plain:
            assert await status(plain, http_request(2, GOOD)) == 0  # no TLS at all
    assert spooled(tmp_path) == 3


async def test_a_handshake_that_never_comes_is_not_waited_for(authority: trustme.CA, tmp_path: Path) -> None:
    async with running(config_for(tmp_path, server_tls(authority, tmp_path), header_timeout_ms=50)) as addresses:
        stream = await connect(addresses.write[0])
        with trio.fail_after(60):
            assert await stream.receive_some() == b""
        await stream.aclose()


async def test_of_too_many_connections_an_unauthenticated_one_gives_way_then_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    good = http_request(2, GOOD, f"Authorization: Bearer {TOKEN}")
    config = config_for(tmp_path, tokens=(str(tmp_path / "tokens"),), max_connections=2)
    async with running(config) as addresses, AsyncExitStack() as stack:

        async def join() -> trio.SocketStream:
            return await stack.enter_async_context(await connect(addresses.write[0]))

        first = await join()
        assert await status(first, good) == 204
        silent = await join()
        second = await join()
        assert await silent.receive_some() == b""
        assert await status(second, good) == 204
        assert await status(first, good) == 204  # it is the oldest, and has authenticated
        assert await status(await join(), good) == 204
        assert await first.receive_some() == b""
        assert await status(second, good) == 204


async def test_of_too_many_connections_the_busiest_networks_oldest_gives_way(tmp_path: Path) -> None:
    async with running(config_for(tmp_path, max_connections=3)) as addresses, AsyncExitStack() as stack:
        where = addresses.write[0]
        first, second, third, fourth = [
            await stack.enter_async_context(await connect(where, local_address))
            for local_address in ("127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.3")
        ]
        assert await second.receive_some() == b""
        for other in (first, third, fourth):
            assert await status(other, http_request(2, GOOD)) == 204


async def test_the_admin_listeners_connections_are_bounded(tmp_path: Path) -> None:
    async with running(config_for(tmp_path)) as addresses, AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(await connect(addresses.admin[0])) for _ in range(ADMIN_CONNECTIONS_MAX + 1)
        ]
        healthz = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        assert await status(silent[-1], healthz) == 200
        assert await status(silent[0], healthz) == 0  # displaced, before it could ask
        assert await status(silent[1], healthz) == 200


async def test_connections_that_are_being_answered_are_never_displaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = trio.Event(), trio.Event()
    respond = WriteEndpoint.respond
    good = http_request(2, GOOD)

    async def waits(self: WriteEndpoint, head: RequestHead, body: bytes) -> Response:
        asked.set()
        await go.wait()
        return await respond(self, head, body)

    monkeypatch.setattr(WriteEndpoint, "respond", waits)
    config = config_for(tmp_path, max_connections=1)
    async with running(config) as addresses, await connect(addresses.write[0]) as busy:
        await busy.send_all(good)
        await asked.wait()
        async with await connect(addresses.write[0]) as late:
            assert await status(late, good) == 0
        go.set()
        assert (await busy.receive_some()).startswith(b"HTTP/1.1 204")
        async with await connect(addresses.write[0]) as later:
            assert await status(later, good) == 204
        assert await busy.receive_some() == b""  # it waited for its peer


async def test_a_bug_behind_one_connection_ends_that_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_raw: bytes, _version: int, _interner: object) -> None:
        raise RuntimeError("a bug")

    async with running(config_for(tmp_path)) as addresses:
        with monkeypatch.context() as patch:
            patch.setattr("analytics.receiver.request_parser.decode_request", broken)
            async with await connect(addresses.write[0]) as stream:
                assert await status(stream, http_request(2, GOOD)) == 0
        async with await connect(addresses.write[0]) as stream:
            assert await status(stream, http_request(2, GOOD)) == 204
