"""proxy.http.authentication: whose a request is, by the words of a real auth worker, and what brokers are shown."""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
import structlog.testing
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from passlib.hash import bcrypt
from worker_fakes import CLIENT, SEAL_KEY, as_told, auth_worker, make_config, request_head

from proto.http_rules import RequestHead, RequestRefused
from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, BrokerCredentialsRequest
from proto.sealed_principal import unseal
from proxy.common import reloading_file
from proxy.common.eager import Finished, continue_in_task, step_eagerly
from proxy.http import authentication
from proxy.http.authentication import HttpAuthenticator
from proxy.http.client import HttpIdentity
from proxy.http.routes import http_routes

SECRET = b"not-to-be-seen-anywhere-" + bytes(range(128, 168))
PASSWORD = "not-to-be-seen-either"
USERS = f"alice:{bcrypt.using(rounds=4).hash(PASSWORD)}\n"


def token(role: str = "alice", **claims: Any) -> str:
    return jwt.encode({"sub": role, **claims}, SECRET, algorithm="HS256")


def bearer(role: str = "alice", **claims: Any) -> str:
    return f"Bearer {token(role, **claims)}"


def basic(user: str = "alice", password: str = PASSWORD) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def certificate(role: str) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(1))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


BY_CERTIFICATE = replace(CLIENT, certificate=certificate("carol"))

PROXY_TOKEN = token("this-proxy")


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What was logged; no secret may be in it, whatever the test does."""
    with structlog.testing.capture_logs() as entries:
        yield entries
    text = str(entries)
    assert "not-to-be-seen" not in text
    assert "eyJ" not in text


class Worker:
    """An HTTP worker's authenticator, and its auth worker."""

    def __init__(
        self, nursery: trio.Nursery, directory: Path, *, credentials: Any = None, http: Any = None, **table: Any
    ) -> None:
        (directory / "key").write_bytes(SECRET)
        (directory / "users").write_text(USERS)
        methods = table.pop("methods", ("token", "basic", "tls"))
        providers = {
            "token": {"secret_key": str(directory / "key")},
            "basic": {"file": str(directory / "users")},
            "tls": {},
        }
        settings = {"enabled": True, "failure_delay_ms": 0, **{name: providers[name] for name in methods}, **table}
        brokers = {"credentials": credentials, "web_service_url": "http://web.example.com:8080"}
        config = make_config(authentication=settings, brokers=brokers, http=http or {})
        self._routes = http_routes(config)
        self.auth = auth_worker(config, nursery)
        self.authenticator = HttpAuthenticator(as_told(config), self.auth, nursery)  # type: ignore[arg-type]

    async def identity(self, head: RequestHead, client: Any = CLIENT) -> HttpIdentity:
        return await self.authenticator.authenticate(head, self._routes.find(head.path) or "none", client)

    async def refusal(self, head: RequestHead, client: Any = CLIENT) -> tuple[int, str]:
        with pytest.raises(RequestRefused) as refused:
            await self.identity(head, client)
        assert "eyJ" not in refused.value.text
        assert PASSWORD not in repr(refused.value)
        return refused.value.status, refused.value.reason

    @property
    def questions(self) -> int:
        """How many an auth worker was asked about clients."""
        return sum(isinstance(call, AuthenticateRequest) for call in self.auth.calls)


Make = Callable[..., Worker]


@pytest.fixture
def make(nursery: trio.Nursery, tmp_path: Path) -> Make:
    return lambda **how: Worker(nursery, tmp_path, **how)


# ---- what a client comes by


@pytest.mark.parametrize(
    ("head", "client", "role", "method"),
    [
        (request_head(authorization=bearer()), CLIENT, "alice", "token"),
        (request_head(authorization=bearer().replace("Bearer", "bearer")), CLIENT, "alice", "token"),
        (request_head(authorization=bearer(), x_pulsar_auth_method_name="token"), CLIENT, "alice", "token"),
        (request_head(authorization=bearer(), x_pulsar_auth_method_name="unknown"), CLIENT, "alice", "token"),
        (request_head(authorization=bearer()), BY_CERTIFICATE, "alice", "token"),
        (request_head(authorization=basic()), CLIENT, "alice", "basic"),
        (request_head(), BY_CERTIFICATE, "carol", "tls"),
        (request_head(x_pulsar_auth_method_name="tls"), BY_CERTIFICATE, "carol", "tls"),
        (request_head(f"/ws/v2/producer/persistent/a/b/c?x=1&token={token()}"), CLIENT, "alice", "token"),
        (request_head(f"/ws/v2/producer/persistent/a/b/c?%74oken={token()}"), CLIENT, "alice", "token"),
        (request_head(), CLIENT, "anyone", "none"),
        (request_head(x_pulsar_auth_method_name="none"), BY_CERTIFICATE, "anyone", "none"),
        (request_head(f"/admin/v2/clusters?token={token()}"), CLIENT, "anyone", "none"),
    ],
)
async def test_a_client_is_known_by_what_it_brings(
    make: Make, head: RequestHead, client: Any, role: str, method: str
) -> None:
    identity = await make(anonymous_role="anyone").identity(head, client)
    assert (identity.principal.name, identity.principal.method) == (role, method)
    assert unseal(identity.sealed, SEAL_KEY) == identity.principal


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (request_head(), "no_credentials"),
        (request_head(f"/admin/v2/clusters?token={token()}"), "no_credentials"),
        (request_head(authorization="Negotiate abc"), "unknown_scheme"),
        (request_head(authorization="Bearer"), "malformed"),
        (request_head(authorization="Basic %%%"), "malformed"),
        (request_head(authorization="Bearer a.b.c"), "malformed"),
        (request_head(authorization=bearer(exp=1)), "expired"),
        (request_head(authorization=basic(password="wrong")), "bad_password"),
        (request_head(authorization=basic("alice").replace("Basic", "Bearer")), "malformed"),
    ],
)
async def test_a_client_that_brings_nothing_good(make: Make, head: RequestHead, reason: str) -> None:
    assert await make().refusal(head) == (401, reason)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (request_head(authorization=bearer(), x_pulsar_auth_method_name="tls"), "other_method"),
        (request_head(authorization=bearer(), x_pulsar_auth_method_name="none"), "other_method"),
        (request_head(authorization=basic(), x_pulsar_auth_method_name="token"), "other_method"),
        (request_head(x_pulsar_auth_method_name="token"), "other_method"),
        (request_head(f"/ws/v2?token={token('bob')}", authorization=bearer()), "several_credentials"),
    ],
)
async def test_what_goes_on_to_a_server_was_verified(make: Make, head: RequestHead, reason: str) -> None:
    """Security: otherwise clients could guess at brokers past the auth workers."""
    worker = make(anonymous_role="anyone")
    assert await worker.refusal(head, BY_CERTIFICATE) == (401, reason)
    assert worker.questions == 0


async def test_two_tokens_in_a_query(make: Make) -> None:
    """Security: the server might take the other one."""
    head = request_head(f"/ws/v2?token={token()}&token={token('bob')}")
    assert await make().refusal(head) == (400, "several_credentials")


@pytest.mark.parametrize("method", ["SCRAM-SHA-256", "SCRAM-SHA-512", "sasl"])
async def test_methods_of_several_rounds(make: Make, method: str) -> None:
    worker = make(methods=("token", "tls"))
    with pytest.raises(RequestRefused) as refused:
        await worker.identity(request_head(x_pulsar_auth_method_name=method))
    assert refused.value.status == 401
    assert method in refused.value.text
    assert refused.value.text.endswith("a token (Authorization: Bearer) or a client certificate")


@pytest.mark.parametrize(("methods", "head", "client"), [
    (("token",), request_head(authorization=basic()), CLIENT),
    (("basic",), request_head(authorization=bearer()), CLIENT),
    (("token",), request_head(), BY_CERTIFICATE),
])  # fmt: skip
async def test_a_method_that_is_not_configured(make: Make, methods: Any, head: RequestHead, client: Any) -> None:
    worker = make(methods=methods)
    assert (await worker.refusal(head, client))[0] == 401
    assert worker.questions == 0


async def test_without_authentication_no_worker_is_asked(make: Make) -> None:
    """Security, too: without a role beside it, the proxy's own authorization would be anybody's."""
    worker = make(enabled=False, credentials={"method": "token", "token": PROXY_TOKEN})
    identity = await worker.identity(request_head())
    assert identity == HttpIdentity(identity.principal)
    assert not identity.principal.name
    assert worker.auth.calls == []


# ---- proxies before this one


@pytest.mark.parametrize(
    ("role", "claim", "expected"),
    [
        ("proxy-a", "alice", ("alice", "proxy-a")),
        ("alice", "alice", ("alice", "")),
        ("alice", "bob", (401, "invalid_roles")),
        ("proxy-a", "", (401, "invalid_roles")),
        ("proxy-a", "proxy-a", (401, "invalid_roles")),
    ],
)
async def test_only_proxies_speak_for_others(make: Make, role: str, claim: str, expected: Any) -> None:
    """Security. A client may say who it is itself, as a broker lets it: proxies that pass on tokens say so of each."""
    worker = make(proxy_roles=["token:proxy-a"])
    head = request_head(authorization=bearer(role), **({"x_original_principal": claim} if claim else {}))
    if isinstance(expected[0], int):
        assert await worker.refusal(head) == expected
    else:
        principal = (await worker.identity(head)).principal
        assert (principal.name, principal.proxy) == expected


async def test_an_original_principal_that_is_no_text(make: Make) -> None:
    head = request_head(authorization=bearer(), x_original_principal=b"\xff")
    assert await make().refusal(head) == (400, "invalid_roles")


# ---- verdicts that are kept


async def test_a_verdict_holds_for_a_second(make: Make, mock_clock: trio.testing.MockClock) -> None:
    worker, head = make(), request_head(authorization=bearer())
    first = await worker.identity(head)
    mock_clock.jump(0.9)
    assert await worker.identity(head) is first
    assert worker.questions == 1
    mock_clock.jump(0.1)
    await worker.identity(head)
    assert worker.questions == 2


OTHERS = {
    "another token": (request_head(authorization=bearer("bob")), CLIENT),
    "another method": (request_head(authorization=basic()), CLIENT),
    "another original principal": (request_head(authorization=bearer(), x_original_principal="alice"), CLIENT),
    "another address": (request_head(authorization=bearer()), replace(CLIENT, ip="192.0.2.8")),
    "another certificate": (request_head(authorization=bearer()), BY_CERTIFICATE),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_a_verdict_is_about_all_that_was_presented(
    make: Make, mock_clock: trio.testing.MockClock, other: str
) -> None:
    """Security."""
    del mock_clock
    worker = make()
    await worker.identity(request_head(authorization=bearer()))
    await worker.identity(*OTHERS[other])
    assert worker.questions == 2


async def test_a_verdict_ends_with_the_credential(
    make: Make, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    """Security."""
    del mock_clock
    worker, end = make(), int(time.time()) + 100
    head = request_head(authorization=bearer(exp=end))
    await worker.identity(head)
    monkeypatch.setattr(authentication, "time", SimpleNamespace(time=lambda: end - 0.001))
    await worker.identity(head)
    assert worker.questions == 1
    monkeypatch.setattr(authentication, "time", SimpleNamespace(time=lambda: end))
    await worker.identity(head)
    assert worker.questions == 2


async def test_a_denial_is_not_kept(make: Make, mock_clock: trio.testing.MockClock) -> None:
    del mock_clock
    worker, head = make(), request_head(authorization=bearer(exp=1))
    for _ in range(2):
        await worker.refusal(head)
    assert worker.questions == 2


@pytest.mark.parametrize(
    ("head", "client", "entry"),
    [
        (request_head(authorization=bearer(jti="leaked")), CLIENT, "token-id leaked"),
        (
            request_head(),
            BY_CERTIFICATE,
            f"certificate-serial {x509.load_der_x509_certificate(BY_CERTIFICATE.certificate).serial_number:x}",
        ),
    ],
    ids=["token", "certificate"],
)
async def test_the_deny_list_ends_a_verdict(  # noqa: PLR0917 -- fixtures and cases
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: trio.testing.MockClock,
    head: RequestHead,
    client: Any,
    entry: str,
) -> None:
    """Security: at once, although the auth worker is not asked."""
    del mock_clock
    monkeypatch.setattr(reloading_file, "CHECK_INTERVAL_S", 0.0)
    (tmp_path / "denied").write_text("# nothing\n")
    worker = make(deny_file=str(tmp_path / "denied"))
    await worker.identity(head, client)
    (tmp_path / "denied").write_text(f"{entry}\n")
    assert await worker.refusal(head, client) == (401, "denied_credential")
    assert worker.questions == 1


async def test_verdicts_are_bounded_and_a_flood_displaces_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    """Security."""
    del mock_clock
    monkeypatch.setattr(authentication, "VERDICTS_MAX", 4)
    worker, quiet = make(), replace(CLIENT, address="192.0.2.9:1", ip="192.0.2.9")
    await worker.identity(request_head(authorization=bearer()), quiet)
    flood = [request_head(authorization=bearer(f"role-{number}")) for number in range(10)]
    for head in flood:
        await worker.identity(head)
    assert len(worker.authenticator._verdicts._kept) == 4
    asked = worker.questions
    await worker.identity(request_head(authorization=bearer()), quiet)
    await worker.identity(flood[-1])
    assert worker.questions == asked
    await worker.identity(flood[0])
    assert worker.questions == asked + 1


async def test_verdicts_that_have_ended_make_room(make: Make, mock_clock: trio.testing.MockClock) -> None:
    worker = make()
    for number in range(5):
        await worker.identity(request_head(authorization=bearer(f"role-{number}")))
    mock_clock.jump(1.0)
    await worker.identity(request_head(authorization=bearer()))
    assert len(worker.authenticator._verdicts._kept) == 1


@pytest.mark.parametrize("head", [request_head(authorization=bearer()), request_head(authorization=bearer(exp=1))])
async def test_equal_requests_at_a_time_ask_once(make: Make, head: RequestHead) -> None:
    worker = make()
    worker.auth.gate = trio.Event()
    outcomes: list[Any] = []

    async def one() -> None:
        try:
            outcomes.append((await worker.identity(head)).principal.name)
        except RequestRefused as refused:
            outcomes.append(refused.status)

    async with trio.open_nursery() as requests:
        for _ in range(3):
            requests.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        worker.auth.gate.set()
    assert outcomes in (["alice"] * 3, [401] * 3)
    assert worker.questions == 1


async def test_a_client_that_leaves_takes_no_verdict_along(make: Make) -> None:
    worker, head = make(), request_head(authorization=bearer())
    worker.auth.gate = trio.Event()
    leaving, found = trio.CancelScope(), []

    async def leave() -> None:
        with leaving:
            await worker.identity(head)

    async def stay() -> None:
        found.append(await worker.identity(head))

    async with trio.open_nursery() as requests:
        requests.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        requests.start_soon(stay)
        await trio.testing.wait_all_tasks_blocked()
        leaving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert worker.questions == 2
        worker.auth.gate.set()
    assert [identity.principal.name for identity in found] == ["alice"]


# ---- auth workers that cannot say


async def test_no_auth_worker(make: Make) -> None:
    worker = make()
    worker.auth.is_lost = True
    assert await worker.refusal(request_head(authorization=bearer())) == (503, "authentication_unavailable")


async def test_an_auth_worker_that_hangs(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    worker = make()
    worker.auth.gate = trio.Event()
    assert await worker.refusal(request_head(authorization=bearer())) == (503, "authentication_unavailable")


async def test_a_denial_that_is_not_the_clients_fault(make: Make) -> None:
    worker = make()
    worker.auth.answers = [AuthenticateResponse(denied={"reason": "overloaded"})]
    assert await worker.refusal(request_head(authorization=bearer())) == (503, "overloaded")


async def test_a_challenge_is_a_denial_and_ends_the_exchange(make: Make) -> None:
    worker = make()
    worker.auth.answers = [AuthenticateResponse(challenge=b"more")]
    assert await worker.refusal(request_head(authorization=bearer())) == (401, "no_verdict")
    [over] = worker.auth.notified
    assert isinstance(over, AuthenticateRequest)
    assert over.over


async def test_a_denied_client_waits_for_its_answer(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    worker = make(failure_delay_ms=700)
    worker.auth.answers = [AuthenticateResponse(denied={"reason": "bad_signature"})]
    started = trio.current_time()
    assert await worker.refusal(request_head(authorization=bearer())) == (401, "bad_signature")
    assert trio.current_time() - started == pytest.approx(0.7)


# ---- the proxy's own authorization

OWN_TOKEN = {"method": "token", "token": PROXY_TOKEN}


@pytest.mark.parametrize(
    "path", ["/admin/v2/clusters", "/admin", "/lookup/v2/topic/persistent/a/b/c", "/admin/v3/functions"]
)
@pytest.mark.parametrize("client", [BY_CERTIFICATE, CLIENT])
async def test_clients_that_have_nothing_to_pass_on(make: Make, path: str, client: Any) -> None:
    worker = make(credentials=OWN_TOKEN, anonymous_role="anyone")
    identity = await worker.identity(request_head(path), client)
    assert identity.authorization == b"Bearer " + PROXY_TOKEN.encode()
    assert identity.principal.name


@pytest.mark.parametrize("path", ["/ws/v2/producer/persistent/a/b/c", "/ws", "/tools/x", "/admin/tools", "/x"])
async def test_other_servers_do_not_get_it(make: Make, path: str) -> None:
    """Security: they would take the proxy for the client."""
    routes = [{"path": path, "url": "http://tools.example.com"} for path in ("/tools", "/admin/tools")]
    worker = make(credentials=OWN_TOKEN, http={"routes": routes})
    assert (await worker.identity(request_head(path), BY_CERTIFICATE)).authorization == b""


@pytest.mark.parametrize("authorization", [bearer(), basic()])
async def test_a_client_with_its_own_credentials(make: Make, authorization: str) -> None:
    worker = make(credentials=OWN_TOKEN)
    identity = await worker.identity(request_head(authorization=authorization), BY_CERTIFICATE)
    assert identity.authorization == b""
    assert worker.questions == len(worker.auth.calls)


async def test_a_password_of_the_proxys_own(make: Make, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("proxy:sesame")
    worker = make(credentials={"method": "basic", "file": str(tmp_path / "own")})
    identity = await worker.identity(request_head(), BY_CERTIFICATE)
    assert identity.authorization == b"Basic " + base64.b64encode(b"proxy:sesame")


@pytest.mark.parametrize("credentials", [None, {"method": "tls"}])
async def test_a_proxy_without_a_header_of_its_own(make: Make, credentials: Any) -> None:
    worker = make(credentials=credentials)
    assert (await worker.identity(request_head(), BY_CERTIFICATE)).authorization == b""
    assert worker.questions == len(worker.auth.calls)


def own_calls(worker: Worker) -> int:
    return sum(isinstance(call, BrokerCredentialsRequest) for call in worker.auth.calls)


@pytest.mark.parametrize(("lifetime_s", "kept_s"), [(None, 30.0), (3600, 30.0), (25, 15.0), (5, 0.0)])
async def test_how_long_it_is_kept(
    make: Make, mock_clock: trio.testing.MockClock, lifetime_s: float | None, kept_s: float
) -> None:
    ends = {} if lifetime_s is None else {"exp": int(time.time()) + lifetime_s}
    worker = make(credentials={"method": "token", "token": token("this-proxy", **ends)})
    await worker.identity(request_head(), BY_CERTIFICATE)
    mock_clock.jump(max(0.0, kept_s - 2.0))
    await worker.identity(request_head(), BY_CERTIFICATE)
    assert own_calls(worker) == (1 if kept_s else 2)
    mock_clock.jump(3.0)
    await worker.identity(request_head(), BY_CERTIFICATE)
    assert own_calls(worker) == (2 if kept_s else 3)


async def test_it_is_not_to_be_had(make: Make, mock_clock: trio.testing.MockClock) -> None:
    del mock_clock
    worker = make(credentials=OWN_TOKEN)
    await worker.identity(request_head("/ws"), BY_CERTIFICATE)
    worker.auth.is_lost = True
    assert await worker.refusal(request_head(), BY_CERTIFICATE) == (503, "no_own_credentials")


async def test_no_secret_is_in_what_may_be_logged(make: Make) -> None:
    worker = make(credentials=OWN_TOKEN)
    identity = await worker.identity(request_head(), BY_CERTIFICATE)
    presented = worker.authenticator._presented(request_head(authorization=basic()), CLIENT)
    for text in (repr(identity), repr(presented), repr(worker.authenticator.__dict__)):
        assert PROXY_TOKEN not in text
        assert PASSWORD not in text


async def test_only_a_verdict_that_is_known_needs_no_task(nursery: trio.Nursery, tmp_path: Path) -> None:
    worker = Worker(nursery, tmp_path, credentials={"method": "token", "token": PROXY_TOKEN})
    for client, head in ((CLIENT, request_head(authorization=bearer())), (BY_CERTIFICATE, request_head())):
        waits = worker.identity(head, client)
        assert step_eagerly(waits) is None
        asked = await continue_in_task(waits)
        assert step_eagerly(worker.identity(head, client)) == Finished(asked)
    denied = worker.identity(request_head(authorization=bearer() + "x"))
    assert step_eagerly(denied) is None
    with pytest.raises(RequestRefused):
        await continue_in_task(denied)
