"""Kerberos at the proxy: every state, every illegal word, threads and deadlines, without a KDC.

The real library and a real KDC are in tests/e2e/test_kerberos.py.
"""

# ruff: noqa: ASYNC240 -- what a test writes is small

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import trio
import trio.testing
from fake_gssapi import FakeKerberos, GSSError, library

from auth.registry import configured_providers
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identity
from proxy.common.errors import ConfigError
from proxy.config.types import Authentication, SaslAuthentication

PROXY, ALICE = "proxy/localhost@REALM", "alice@REALM"
TICKET = f"ticket for {PROXY} of {ALICE}".encode()
OFFER = b"server:\x01\x00\x00\x00"
CHOICE = b"client:\x01\x00\x00\x00"


@pytest.fixture
def kerberos() -> Iterator[FakeKerberos]:
    fake = FakeKerberos()
    with library(fake.module()):
        yield fake


@pytest.fixture
def keytab(tmp_path: Path) -> Path:
    file = tmp_path / "proxy.keytab"
    file.write_text(PROXY)
    return file


@pytest.fixture
def config(keytab: Path) -> SaslAuthentication:
    return SaslAuthentication(principal=PROXY, keytab=str(keytab), threads_max=2)


def new_state(config: SaslAuthentication, **changes: Any) -> AuthState:
    return provider(config, **changes).new_auth_state(ClientContext("127.0.0.1:1"))


def provider(config: SaslAuthentication, **changes: Any) -> Any:
    settings = {key: getattr(config, key) for key in config.__struct_fields__} | changes
    (made,) = configured_providers(Authentication(sasl=SaslAuthentication(**settings)))
    assert made.method == "sasl"
    return made


@pytest.fixture
def state(kerberos: FakeKerberos, config: SaslAuthentication) -> AuthState:
    return new_state(config)


async def denied(state: AuthState, data: bytes) -> AuthenticationDenied:
    """The denial, after which nothing works any more."""
    with pytest.raises(AuthenticationDenied) as caught:
        await state.authenticate(data)
    assert not state.is_complete()
    with pytest.raises(RuntimeError):
        state.get_identity()
    with pytest.raises(AuthenticationDenied) as again:
        await state.authenticate(CHOICE)
    assert again.value.reason == "unexpected_round"
    assert caught.value.__cause__ is None
    assert str(caught.value).isprintable()
    return caught.value


async def reason(state: AuthState, data: bytes) -> str:
    return (await denied(state, data)).reason


# ---- the good way


@pytest.mark.conforms("pip-30.39")
async def test_ticket_offer_choice(state: AuthState) -> None:
    assert await state.authenticate(TICKET) == OFFER
    assert not state.is_complete()
    assert await state.authenticate(CHOICE + ALICE.encode()) is None
    assert state.is_complete()
    assert state.get_auth_role() == ALICE


async def test_an_authorization_identity_may_be_missing(state: AuthState) -> None:
    await state.authenticate(TICKET)
    assert await state.authenticate(CHOICE) is None
    assert state.get_identity().role == ALICE


@pytest.mark.conforms("pip-30.1")
async def test_mutual_authentication_costs_a_round_more(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.proof = b"AP-REP"
    assert await state.authenticate(TICKET) == b"AP-REP"
    assert await state.authenticate(b"") == OFFER
    assert await state.authenticate(CHOICE) is None
    assert state.is_complete()


@pytest.mark.parametrize("now_s", [1_000_000.25, 1_000_000.75, 1_000_001.5])
async def test_the_identity_ends_with_the_ticket_at_a_whole_second(
    kerberos: FakeKerberos, state: AuthState, monkeypatch: pytest.MonkeyPatch, now_s: float
) -> None:
    """One ticket, whose end is 1,086,700.9, has one end whenever it is used."""
    monkeypatch.setattr("auth.gss.time", SimpleNamespace(time=lambda: now_s))
    kerberos.lifetime_s = int(1_086_700.9 - now_s)
    await state.authenticate(TICKET)
    await state.authenticate(CHOICE)
    assert state.get_identity().expires_at_unix_ms == 1_086_700_000


async def test_a_ticket_without_an_end(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.lifetime_s = 2**32 - 1
    await state.authenticate(TICKET)
    await state.authenticate(CHOICE)
    assert state.get_identity() == Identity(ALICE)


async def test_only_kerberos_and_the_principal_as_it_stands(kerberos: FakeKerberos, state: AuthState) -> None:
    await state.authenticate(TICKET)
    credentials = kerberos.credentials[-1]
    assert (credentials.usage, credentials.mechs) == ("accept", ["kerberos"])
    assert (credentials.name.text, credentials.name.kind) == (PROXY, "kerberos_principal")


async def test_a_replaced_keytab_counts_for_the_next_exchange(
    kerberos: FakeKerberos, config: SaslAuthentication, keytab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.common.reloading_file.CHECK_INTERVAL_S", 0)
    made = provider(config)
    keytab.write_text("another/host@REALM")
    assert await reason(made.new_auth_state(ClientContext("a")), TICKET) == "bad_keytab"
    keytab.write_text(PROXY)
    assert await made.new_auth_state(ClientContext("a")).authenticate(TICKET) == OFFER


# ---- the first round


async def test_no_ticket(kerberos: FakeKerberos, state: AuthState) -> None:
    before = len(kerberos.calls)
    assert await reason(state, b"") == "missing"
    assert len(kerberos.calls) == before


async def test_garbage(state: AuthState) -> None:
    assert await reason(state, b"\x00garbage") == "malformed"


async def test_data_that_is_not_utf_8_is_denied_as_malformed(state: AuthState) -> None:
    assert await reason(state, b"\xff\xfe") == "malformed"  # a UnicodeDecodeError


async def test_the_largest_ticket(kerberos: FakeKerberos, config: SaslAuthentication) -> None:
    assert await new_state(config).authenticate(TICKET.ljust(64 * 1024, b"x")) == OFFER
    steps = [call for call, _ in kerberos.calls].count("step")
    assert await reason(new_state(config), TICKET.ljust(64 * 1024 + 1, b"x")) == "malformed"
    assert [call for call, _ in kerberos.calls].count("step") == steps


async def test_an_error_that_the_library_keeps_back(state: AuthState) -> None:
    """It has a token for the client then, which must not be taken for a challenge."""
    assert await reason(state, b"silent failure") == "bad_ticket"


async def test_a_context_that_wants_more_tokens(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.complete = False
    kerberos.proof = b"AP-REP"
    assert await reason(state, TICKET) == "bad_ticket"


@pytest.mark.parametrize(
    ("min_code", "name"),
    [
        (2529638944, "expired"),
        (2529638944 - 2**32, "expired"),
        (2529638946, "replayed"),
        (2529638949, "clock_skew"),
        (1, "bad_ticket"),
    ],
)
async def test_reasons(kerberos: FakeKerberos, state: AuthState, min_code: int, name: str) -> None:
    kerberos.failing("step", GSSError("words\nof the mechanism" + "." * 1000, min_code))
    denial = await denied(state, TICKET)
    assert denial.reason == name
    assert "wordsof the mechanism" in str(denial)
    assert len(str(denial)) <= 400


@pytest.mark.parametrize("call", ["initiator_name", "lifetime", "wrap"])
async def test_the_library_fails_late(kerberos: FakeKerberos, state: AuthState, call: str) -> None:
    kerberos.failing(call, GSSError())
    assert await reason(state, TICKET) == "bad_ticket"


async def test_an_anonymous_ticket(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.name_shown = "WELLKNOWN/ANONYMOUS@WELLKNOWN:ANONYMOUS"
    assert await reason(state, TICKET) == "not_allowed"


@pytest.mark.parametrize("principal", ["alice@REALM", "bob@REALM"])
async def test_allowed_principals(kerberos: FakeKerberos, config: SaslAuthentication, principal: str) -> None:
    kerberos.name_shown = principal
    state = new_state(config, allowed_principals=r"(alice|bob)@REALM")
    assert await state.authenticate(TICKET) == OFFER


@pytest.mark.parametrize("principal", ["xalice@REALM", "alice@REALMS", "alice@REALM\n", "carol@REALM", "alice", ""])
async def test_others_are_denied_in_the_first_round(
    kerberos: FakeKerberos, config: SaslAuthentication, principal: str
) -> None:
    kerberos.name_shown = principal or "x"
    state = new_state(config, allowed_principals=r"(alice|bob)@REALM")
    assert await reason(state, TICKET) == "not_allowed"


# ---- the rounds after it


async def test_data_in_answer_to_the_proof(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.proof = b"AP-REP"
    await state.authenticate(TICKET)
    assert await reason(state, CHOICE) == "malformed"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (b"", "bad_layer"),
        (b"garbage", "bad_layer"),
        (OFFER, "bad_layer"),
        (b"client:", "bad_layer"),
        (b"client:\x01\x00\x00", "bad_layer"),
        (b"client:\x00\x00\x00\x00", "bad_layer"),
        (b"client:\x02\x00\x00\x00", "bad_layer"),
        (b"client:\x03\x00\x00\x00", "bad_layer"),
        (b"client:\x01\x00\x00\x01", "bad_layer"),
        (CHOICE + b"bob@REALM", "bad_authzid"),
        (CHOICE + b"alice", "bad_authzid"),
        (CHOICE + b"alice@REALM\x00", "bad_authzid"),
        (CHOICE + b"\xff", "bad_authzid"),
        (CHOICE.ljust(4 * 1024, b"x"), "bad_authzid"),
        (CHOICE.ljust(4 * 1024 + 1, b"x"), "malformed"),
    ],
)
async def test_choices(state: AuthState, choice: bytes, name: str) -> None:
    await state.authenticate(TICKET)
    assert await reason(state, choice) == name


async def test_a_round_after_the_end(state: AuthState) -> None:
    await state.authenticate(TICKET)
    await state.authenticate(CHOICE)
    with pytest.raises(AuthenticationDenied) as caught:
        await state.authenticate(CHOICE)
    assert caught.value.reason == "unexpected_round"


# ---- threads


async def test_the_library_is_only_called_in_threads(kerberos: FakeKerberos, state: AuthState) -> None:
    kerberos.calls.clear()
    await state.authenticate(TICKET)
    await state.authenticate(CHOICE)
    assert {"credentials", "step", "wrap", "unwrap"} <= {call for call, _ in kerberos.calls}
    assert threading.get_ident() not in {thread for _, thread in kerberos.calls}


class Slow:
    """Holds the first call of a kind until it is released."""

    def __init__(self, kerberos: FakeKerberos, call: str) -> None:
        self.begun, self._end, self._first = threading.Event(), threading.Event(), True
        kerberos.on[call] = self._hold

    def _hold(self) -> None:
        first, self._first = self._first, False
        if first:
            self.begun.set()
            self._end.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()


@pytest.mark.conforms("pip-30.32")
async def test_a_slow_exchange_delays_no_other(kerberos: FakeKerberos, config: SaslAuthentication) -> None:
    made = provider(config)
    slow, other = (made.new_auth_state(ClientContext(name)) for name in "ab")
    with Slow(kerberos, "step") as hold:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow.authenticate, TICKET)
            await trio.to_thread.run_sync(partial(hold.begun.wait, 10))
            assert await other.authenticate(TICKET) == OFFER
            assert await other.authenticate(CHOICE) is None
            with pytest.raises(AuthenticationDenied):  # a second round of one that has not ended its first
                await slow.authenticate(CHOICE)
            nursery.cancel_scope.cancel()


async def test_threads_are_bounded_and_those_left_behind_count(
    kerberos: FakeKerberos, config: SaslAuthentication, autojump_clock: trio.testing.MockClock
) -> None:
    made = provider(config, threads_max=1)
    with Slow(kerberos, "step") as hold:
        assert await reason(made.new_auth_state(ClientContext("a")), TICKET) == "timeout"
        assert trio.current_time() == pytest.approx(10, abs=0.01)
        assert await trio.to_thread.run_sync(partial(hold.begun.wait, 10))
        assert made._threads.statistics().borrowed_tokens == 1
        kerberos.calls.clear()
        before = trio.current_time()
        assert await reason(made.new_auth_state(ClientContext("b")), TICKET) == "timeout"
        assert trio.current_time() - before == pytest.approx(10, abs=0.01)
        assert kerberos.calls == []


async def test_exchanges_have_their_turns_by_address(kerberos: FakeKerberos, config: SaslAuthentication) -> None:
    """Strangers' tickets must not keep a user's waiting: here they wait in the same line as passwords do."""
    made = provider(config, threads_max=1)
    with Slow(kerberos, "step") as hold:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(made.new_auth_state(ClientContext(f"10.0.0.66:{number}")).authenticate, TICKET)
            await trio.to_thread.run_sync(partial(hold.begun.wait, 10))
            nursery.start_soon(made.new_auth_state(ClientContext("10.0.0.1:1")).authenticate, TICKET)
            await trio.testing.wait_all_tasks_blocked()
            waiting = {owner.name: len(turns) for owner, turns in made._checks._queue._waiting.items()}
            assert waiting == {"10.0.0.66": 2, "10.0.0.1": 1}
            nursery.cancel_scope.cancel()


async def test_a_login_is_remembered_of_its_address_once_the_last_round_is_done(
    kerberos: FakeKerberos,
    config: SaslAuthentication,
) -> None:
    made = provider(config)
    state = made.new_auth_state(ClientContext("10.0.0.1:1"))
    await state.authenticate(TICKET)
    assert not made._checks._logins.recent_value("10.0.0.1")
    await state.authenticate(CHOICE)
    assert made._checks._logins.recent_value("10.0.0.1")


async def test_no_certificate_is_kept_between_rounds(kerberos: FakeKerberos, config: SaslAuthentication) -> None:
    """Security: a captured forwarder can claim one of megabytes for each of 20,000 exchanges."""
    state = provider(config).new_auth_state(ClientContext("10.0.0.1:1", certificate=b"DER"))
    assert state._client == ClientContext("10.0.0.1:1")


# ---- the configuration


def test_the_keytab_must_be_there(kerberos: FakeKerberos, config: SaslAuthentication, keytab: Path) -> None:
    keytab.unlink()
    with pytest.raises(ConfigError, match=r"^authentication\.sasl\.keytab: .*/proxy\.keytab: No such file"):
        provider(config)


@pytest.mark.parametrize("content", ["", "other/host@REALM"])
def test_the_keytab_must_hold_the_principal(
    kerberos: FakeKerberos, config: SaslAuthentication, keytab: Path, content: str
) -> None:
    keytab.write_text(content)
    with pytest.raises(ConfigError, match=r"^authentication\.sasl\.keytab: .* holds no key of proxy/localhost@REALM: "):
        provider(config)


def test_without_the_library(config: SaslAuthentication) -> None:
    with library(None), pytest.raises(ConfigError, match=r"authentication\.sasl.*extra `kerberos`"):
        provider(config)
