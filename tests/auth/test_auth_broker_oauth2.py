"""The proxy's own token from an issuer: asked for once, renewed in time, and its secret never shown."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
import structlog.testing
import trio
import trio.testing
from fake_issuer import URL, FakeIssuer

from auth.broker_credentials import broker_authentication
from auth.broker_oauth2 import LIFETIME_UNKNOWN_S, REQUEST_TIMEOUT_MS, RETRY_INTERVAL_S, OAuth2Credentials
from auth.state import CredentialsUnavailable
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import file_stamps, take_over_held_files
from proxy.config.types import BrokerCredentials, Brokers

Clock = trio.testing.MockClock
Make = Callable[..., OAuth2Credentials]
SECRET = "not-to-be-seen"
DISCOVERY = "/.well-known/openid-configuration"
ACCOUNT = {"type": "client_credentials", "client_id": "proxy", "client_secret": SECRET}


@pytest.fixture
def issuer() -> FakeIssuer:
    return FakeIssuer()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "account.json"
    path.write_text(json.dumps(ACCOUNT))
    return path


@pytest.fixture
def make(issuer: FakeIssuer, file: Path) -> Make:
    def made(**settings: Any) -> OAuth2Credentials:
        config = BrokerCredentials(**{"method": "oauth2", "file": str(file), "issuer_url": URL, **settings})
        return OAuth2Credentials(config, issuer.transport)

    return made


@pytest.fixture
def credentials(make: Make) -> OAuth2Credentials:
    return make()


async def token(credentials: OAuth2Credentials) -> bytes:
    return await credentials.get_auth_data("broker-1").authenticate(None)


async def unavailable(credentials: OAuth2Credentials) -> str:
    with structlog.testing.capture_logs() as entries, pytest.raises(CredentialsUnavailable) as caught:
        await token(credentials)
    assert SECRET not in f"{caught.value}{entries}{caught.value.__cause__}"
    assert caught.value.__suppress_context__
    assert str(caught.value).startswith("brokers.credentials: ")
    return str(caught.value)


def form(issuer: FakeIssuer) -> dict[str, list[str]]:
    return parse_qs(issuer.requests[-1].content.decode(), strict_parsing=True)


async def test_a_token_for_client_credentials(credentials: OAuth2Credentials, issuer: FakeIssuer) -> None:
    """RFC 6749, section 4.4.2, with the account in the form as Pulsar's client sends it."""
    assert credentials.method == "token"
    assert await token(credentials) == b"token-1"
    assert issuer.asked == [DISCOVERY, "/token"]
    assert issuer.requests[-1].method == "POST"
    assert form(issuer) == {"grant_type": ["client_credentials"], "client_id": ["proxy"], "client_secret": [SECRET]}
    assert SECRET not in str(issuer.requests[-1].url)


async def test_audience_and_scope_are_sent_to_the_issuer(make: Make, issuer: FakeIssuer) -> None:
    await token(make(audience="urn:pulsar", scope="produce consume"))
    assert (form(issuer)["audience"], form(issuer)["scope"]) == (["urn:pulsar"], ["produce consume"])


def test_the_method_oauth2_makes_oauth2_credentials(file: Path) -> None:
    made = broker_authentication(BrokerCredentials(method="oauth2", file=str(file), issuer_url=URL))
    assert isinstance(made, OAuth2Credentials)


async def test_a_reload_reads_the_account_again_and_keeps_the_token(
    issuer: FakeIssuer, file: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    """What a reload applies, by force too, is no held content: nothing else would tell this worker of the file."""
    made = partial(OAuth2Credentials, transport=issuer.transport)
    monkeypatch.setattr("auth.broker_oauth2.OAuth2Credentials", made)
    config = BrokerCredentials(method="oauth2", file=str(file), issuer_url=URL)

    async def token_after_reload() -> bytes:
        credentials = broker_authentication(config)
        assert isinstance(credentials, OAuth2Credentials)
        return await token(credentials)

    assert [await token_after_reload() for _ in range(2)] == [b"token-1"] * 2
    assert issuer.fetches == 1
    issuer.token = {"access_token": "token-2"}
    file.write_text(json.dumps({**ACCOUNT, "client_secret": "another"}))
    assert await token_after_reload() == b"token-2"
    file.unlink()
    with pytest.raises(ConfigError, match=r"^brokers.credentials.file: "):
        broker_authentication(config)


@pytest.mark.conforms("pip-30.28")
async def test_every_broker_and_every_challenge_gets_it(credentials: OAuth2Credentials, issuer: FakeIssuer) -> None:
    for host in ("broker-1", "broker-2"):
        state = credentials.get_auth_data(host)
        assert await state.authenticate(None) == b"token-1"
        assert await state.authenticate(b"PulsarAuthRefresh") == b"token-1"
    assert len(issuer.asked) == 2


# ---- when the issuer is asked


async def test_a_token_is_renewed_in_the_last_part_of_its_life(
    make: Make, issuer: FakeIssuer, autojump_clock: Clock
) -> None:
    """At another time by each proxy."""
    renewed_at = set()
    for _ in range(10):
        credentials = make()
        asked = len(issuer.asked)
        began_at = trio.current_time()
        while len(issuer.asked) <= asked + 2:
            await token(credentials)
            await trio.sleep(10)
        age_s = trio.current_time() - began_at
        assert 850 <= age_s <= 970
        renewed_at.add(age_s)
    assert len(renewed_at) > 2


async def test_many_dials_at_once_cost_one_request(
    credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock
) -> None:
    issuer.delay_s = 1
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(token, credentials)
        with trio.move_on_after(0.5):
            await token(credentials)
    assert len(issuer.asked) == 2


async def test_an_old_token_that_is_valid_is_used_while_the_issuer_is_down(
    credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock
) -> None:
    await token(credentials)
    issuer.down = True
    await trio.sleep(960)
    with structlog.testing.capture_logs() as entries:
        assert await token(credentials) == b"token-1"
    [entry] = entries
    assert (entry["log_level"], entry["what"]) == ("error", "the proxy's token for brokers")
    assert entry["going_on_with_the_old_one"] is True
    await trio.sleep(40)
    assert "nobody there" in await unavailable(credentials)
    issuer.down, issuer.token = False, {"access_token": "token-2"}
    await trio.sleep(RETRY_INTERVAL_S)
    assert await token(credentials) == b"token-2"


async def test_an_issuer_in_trouble_is_not_hammered(
    credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock
) -> None:
    issuer.down = True
    for _ in range(300):
        await unavailable(credentials)
        await trio.sleep(0.1)
    assert 30 / RETRY_INTERVAL_S <= issuer.fetches <= 30 / RETRY_INTERVAL_S + 1


async def test_both_requests_to_a_slow_issuer_end_before_a_dial_does(
    credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock
) -> None:
    assert Brokers().handshake_timeout_ms > 2 * REQUEST_TIMEOUT_MS
    issuer.delay_s = 60
    assert "no answer within" in await unavailable(credentials)
    assert trio.current_time() == pytest.approx(REQUEST_TIMEOUT_MS / 1000)


@pytest.mark.parametrize("lifetime", [{}, {"expires_in": None}, {"expires_in": 0}, {"expires_in": -5}])
async def test_a_token_of_unknown_life(
    credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock, lifetime: dict[str, Any]
) -> None:
    issuer.token = {"access_token": "token-1", **lifetime}
    await token(credentials)
    await trio.sleep(LIFETIME_UNKNOWN_S * 0.8)
    await token(credentials)
    assert issuer.fetches == 1
    await trio.sleep(LIFETIME_UNKNOWN_S * 0.2)
    await token(credentials)
    assert issuer.fetches == 2


async def test_a_lifetime_as_text(credentials: OAuth2Credentials, issuer: FakeIssuer, autojump_clock: Clock) -> None:
    """As some issuers write it."""
    issuer.token = {"access_token": "token-1", "expires_in": "1000", "token_type": "Bearer"}
    await token(credentials)
    await trio.sleep(840)
    await token(credentials)
    assert issuer.fetches == 1


# ---- the issuer's answers


@pytest.mark.parametrize(("own", "says"), [(URL, f"{URL}/"), (f"{URL}/", URL), (f"{URL}/", f"{URL}/")])
async def test_a_slash_at_the_end_is_no_matter(make: Make, issuer: FakeIssuer, own: str, says: str) -> None:
    issuer.metadata = {"issuer": says}
    assert await token(make(issuer_url=own)) == b"token-1"
    assert issuer.asked[0] == DISCOVERY


@pytest.mark.parametrize("says", ["https://other.example", f"{URL}/other", "", 5])
async def test_a_description_of_another_issuer(credentials: OAuth2Credentials, issuer: FakeIssuer, says: Any) -> None:
    issuer.metadata = {"issuer": says}
    await unavailable(credentials)
    assert issuer.asked == [DISCOVERY]


@pytest.mark.parametrize("url", ["http://issuer.example/token", "ftp://issuer.example/token", "token", ""])
async def test_the_secret_goes_nowhere_without_tls(
    credentials: OAuth2Credentials, issuer: FakeIssuer, url: str
) -> None:
    issuer.metadata = {"token_endpoint": url}
    await unavailable(credentials)
    assert issuer.asked == [DISCOVERY]


async def test_an_issuer_without_tls(make: Make, issuer: FakeIssuer) -> None:
    assert "is not https" in await unavailable(make(issuer_url="http://issuer.example"))
    assert not issuer.asked


async def test_an_issuer_at_loopback_needs_no_tls(make: Make, issuer: FakeIssuer) -> None:
    local = "http://127.0.0.1:8080"
    issuer.metadata = {"issuer": local, "token_endpoint": f"{local}/token"}
    assert await token(make(issuer_url=local)) == b"token-1"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_the_secret_follows_no_redirect(credentials: OAuth2Credentials, issuer: FakeIssuer, status: int) -> None:
    issuer.answers["/token"] = lambda: httpx.Response(status, headers={"location": "https://other.example/"})
    assert f"status {status}" in await unavailable(credentials)
    assert issuer.asked == [DISCOVERY, "/token"]


async def test_a_refusal_says_why(credentials: OAuth2Credentials, issuer: FakeIssuer) -> None:
    refusal = {"error": "invalid_client", "error_description": f"the secret {SECRET} is wrong"}
    issuer.answers["/token"] = lambda: httpx.Response(401, json=refusal)
    assert (await unavailable(credentials)).endswith("status 401 (invalid_client)")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "token",
        {"access_token": ""},
        {"access_token": None},
        {"access_token": 5},
        {"access_token": "two\nlines"},
        {"access_token": "\u202e"},
        {"access_token": "token", "expires_in": "soon"},
        {"access_token": SECRET + "é"},
    ],
)
async def test_an_answer_without_a_token(credentials: OAuth2Credentials, issuer: FakeIssuer, answer: Any) -> None:
    issuer.token = answer
    await unavailable(credentials)


async def test_an_oversized_answer(credentials: OAuth2Credentials, issuer: FakeIssuer) -> None:
    issuer.token = {"access_token": "x" * (2 * 1024 * 1024)}
    assert "more than" in await unavailable(credentials)


# ---- the account


async def test_a_changed_account_asks_for_a_token_of_its_own(
    credentials: OAuth2Credentials, issuer: FakeIssuer, file: Path, autojump_clock: Clock
) -> None:
    await token(credentials)
    issuer.token = {"access_token": "token-2"}
    file.write_text(json.dumps({**ACCOUNT, "client_secret": "another"}))
    assert await token(credentials) == b"token-1"
    await take_over_held_files(file_stamps([str(file)]))
    assert await token(credentials) == b"token-2"
    assert form(issuer)["client_secret"] == ["another"]


async def test_a_changed_account_is_not_kept_waiting_by_the_failure_of_the_one_before(
    credentials: OAuth2Credentials, issuer: FakeIssuer, file: Path, autojump_clock: Clock
) -> None:
    issuer.answers["/token"] = lambda: httpx.Response(401, json={"error": "invalid_client"})
    await unavailable(credentials)
    issuer.answers.clear()
    file.write_text(json.dumps({**ACCOUNT, "client_secret": "the right one"}))
    await take_over_held_files(file_stamps([str(file)]))
    assert await token(credentials) == b"token-1"


async def test_an_account_that_became_rubbish(
    credentials: OAuth2Credentials, issuer: FakeIssuer, file: Path, autojump_clock: Clock
) -> None:
    await token(credentials)
    file.write_text("rubbish")
    with pytest.raises(ConfigError, match="malformed"):
        await take_over_held_files(file_stamps([str(file)]))
    assert await token(credentials) == b"token-1"
    assert issuer.fetches == 1


@pytest.mark.parametrize(
    "account",
    [
        {"client_id": "proxy", "client_secret": SECRET},
        {**ACCOUNT, "client_email": "proxy@example", "issuer_url": "https://other.example"},
    ],
)
async def test_forms_of_the_account(make: Make, issuer: FakeIssuer, file: Path, account: dict[str, str]) -> None:
    """Pulsar's file may say more; the issuer is the configuration's all the same."""
    file.write_text(json.dumps(account))
    assert await token(make()) == b"token-1"
    assert {request.url.host for request in issuer.requests} == {"issuer.example"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "rubbish",
        "[]",
        "[" * 60_000,
        json.dumps({"client_id": "proxy"}),
        json.dumps({**ACCOUNT, "client_secret": ""}),
        json.dumps({**ACCOUNT, "client_id": ""}),
        json.dumps({**ACCOUNT, "client_secret": [SECRET]}),
        json.dumps({**ACCOUNT, "type": "authorization_code"}),
        json.dumps(ACCOUNT)[:-1],
        json.dumps({**ACCOUNT, "padding": "x" * 70_000}),
    ],
    ids=lambda content: content[:20],
)
def test_an_account_that_is_none(make: Make, file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(f"brokers.credentials.file: {file}")
    assert SECRET not in f"{caught.value}{caught.value.__cause__}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_files_that_are_not_there(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"^brokers.credentials.file: /missing: "):
        make(file="/missing")
    with pytest.raises(ConfigError, match=r"^brokers.credentials.trust: "):
        make(trust="/missing")


def test_the_text_of_an_account_does_not_show_its_secret(credentials: OAuth2Credentials) -> None:
    assert SECRET not in f"{credentials._account.value!r}{credentials._account.value}"
