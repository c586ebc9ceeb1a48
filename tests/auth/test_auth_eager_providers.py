"""Which providers' states need a task for an answer, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from fake_issuer import FakeIssuer, issued
from scramp import ScramClient
from tokens import token

from auth.providers.basic import BasicProvider
from auth.providers.oidc import OidcProvider
from auth.providers.scram import credential_line, scram_providers
from auth.providers.tls import TlsProvider
from auth.providers.token import TokenProvider
from auth.refreshing_cache import Fetched, RefreshingCache
from auth.registry import ProviderRegistry
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identity, OneStageAuthState, Provider
from proxy.common.eager import Finished, call_eagerly, continue_in_task, start_eagerly
from proxy.config.types import (
    Authentication,
    BasicAuthentication,
    OidcAuthentication,
    ScramAuthentication,
    TlsAuthentication,
    TokenAuthentication,
)

CLIENT = ClientContext("10.0.0.1:1234")
USER = "alice:$1$abcdefgh$G//4keteveJp0qb8z2DxG/\n"


def registry_of(*providers: Provider, anonymous_role: str = "") -> ProviderRegistry:
    return ProviderRegistry(Authentication(anonymous_role=anonymous_role), lambda _config: providers)


def oidc_provider(issuer: FakeIssuer) -> OidcProvider:
    config = OidcAuthentication(
        allowed_issuers=(issuer.url,), allowed_audiences=("pulsar",), keys_retry_interval_ms=10_000
    )
    return OidcProvider(config, issuer.transport)


def needs_task(state: AuthState, data: bytes) -> bool:
    """Whether a round needs a task; the answer is the state's, or AuthenticationDenied."""
    coroutine = call_eagerly(state.authenticate, data)
    finished = start_eagerly(coroutine)
    if finished is None:
        coroutine.close()  # type: ignore[attr-defined]
    return finished is None


async def identity(registry: ProviderRegistry, method: str, data: bytes) -> Identity:
    state = registry.new_auth_state(method, CLIENT)
    await state.authenticate(data)
    return state.get_identity()


async def test_an_anonymous_client_needs_no_task() -> None:
    state = registry_of(anonymous_role="guest").new_auth_state("none", CLIENT)
    assert not needs_task(state, b"")
    assert state.get_identity() == Identity("guest")


async def test_a_certificate_needs_no_task() -> None:
    registry = registry_of(TlsProvider(TlsAuthentication()))
    with pytest.raises(AuthenticationDenied, match="no client certificate"):
        needs_task(registry.new_auth_state("tls", CLIENT), b"")


async def test_a_token_needs_one_where_its_key_file_is_to_be_looked_at(secret_file: str) -> None:
    registry = registry_of(TokenProvider(TokenAuthentication(secret_key=secret_file)))
    assert needs_task(registry.new_auth_state("token", CLIENT), token())
    assert await identity(registry, "token", token()) == Identity("alice")
    assert not needs_task(registry.new_auth_state("token", CLIENT), token())


async def test_a_password_needs_one(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Hashing takes tens of milliseconds, and has a queue; what is no password is denied before."""
    (tmp_path / "users").write_text(USER)
    registry = registry_of(BasicProvider(BasicAuthentication(file=str(tmp_path / "users"))))
    with pytest.raises(AuthenticationDenied):
        await identity(registry, "basic", b"alice:wrong")
    assert needs_task(registry.new_auth_state("basic", CLIENT), b"alice:wrong"), "although the file was looked at"
    with pytest.raises(AuthenticationDenied) as denied:
        needs_task(registry.new_auth_state("basic", CLIENT), b"no password")
    assert denied.value.reason == "malformed"


async def test_scram_needs_one_where_its_file_is_to_be_looked_at(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    (tmp_path / "users").write_text(credential_line("alice", "pencil", "SCRAM-SHA-256", 4096))
    registry = registry_of(*scram_providers(ScramAuthentication(file=str(tmp_path / "users"))))
    client = ScramClient(["SCRAM-SHA-256"], "alice", "pencil")
    first = client.get_client_first().encode()
    assert needs_task(registry.new_auth_state("SCRAM-SHA-256", CLIENT), first)
    await registry.new_auth_state("SCRAM-SHA-256", CLIENT).authenticate(first)
    state = registry.new_auth_state("SCRAM-SHA-256", CLIENT)
    for data, take in ((first, client.set_server_first), (None, client.set_server_final)):
        answer = start_eagerly(call_eagerly(state.authenticate, data or client.get_client_final().encode()))
        assert isinstance(answer, Finished)
        assert answer.value is not None
        take(answer.value.decode())
    assert state.get_identity() == Identity("alice")


async def test_an_issuers_token_needs_one_while_its_keys_are_fetched(autojump_clock: trio.testing.MockClock) -> None:
    issuer = FakeIssuer()
    registry = registry_of(oidc_provider(issuer))
    assert needs_task(registry.new_auth_state("token", CLIENT), issued())
    await identity(registry, "token", issued())
    assert not needs_task(registry.new_auth_state("token", CLIENT), issued())
    await trio.sleep(10)
    assert needs_task(registry.new_auth_state("token", CLIENT), issued(name="unknown")), "it may be a new key"
    assert issuer.fetches == 1


async def test_two_providers_of_a_method_need_one_where_either_does(
    secret_file: str, autojump_clock: trio.testing.MockClock
) -> None:
    token_provider = TokenProvider(TokenAuthentication(secret_key=secret_file))
    registry = registry_of(token_provider, oidc_provider(FakeIssuer()))
    await identity(registry, "token", token())
    assert not needs_task(registry.new_auth_state("token", CLIENT), token())
    assert needs_task(registry.new_auth_state("token", CLIENT), issued()), "the issuer's keys are not there"
    await identity(registry, "token", issued())
    assert not needs_task(registry.new_auth_state("token", CLIENT), issued())


class Stricter(TokenProvider):
    """One of a third party's, which has a rule of its own, and waits for it."""

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        await trio.lowlevel.checkpoint()
        found = await super().identify(data, client)
        raise AuthenticationDenied("on_holiday", found.role)


async def test_a_provider_derived_from_ours_keeps_its_own_rules(secret_file: str) -> None:
    """Security: no answer without a task goes round what a third party's provider checks."""
    registry = registry_of(Stricter(TokenAuthentication(secret_key=secret_file)))
    for _ in range(2):
        assert needs_task(registry.new_auth_state("token", CLIENT), token())
        with pytest.raises(AuthenticationDenied, match="alice"):
            await identity(registry, "token", token())


class StricterAuthState(OneStageAuthState):
    """One of a third party's, which has its rule in its state."""

    async def authenticate(self, data: bytes) -> bytes | None:
        await trio.lowlevel.checkpoint()
        await super().authenticate(data)
        raise AuthenticationDenied("on_holiday", self.get_auth_role())


class StricterByState(TokenProvider):
    def new_auth_state(self, client: ClientContext) -> AuthState:
        return StricterAuthState(self, client)


@pytest.mark.parametrize("beside_another", [False, True])
async def test_a_state_derived_from_ours_keeps_its_own_rules(secret_file: str, beside_another: bool) -> None:
    """Security: also where another provider of the same method is asked before."""
    providers: list[Provider] = [StricterByState(TokenAuthentication(secret_key=secret_file))]
    if beside_another:
        providers.insert(0, oidc_provider(FakeIssuer()))
    registry = registry_of(*providers)
    for _ in range(2):
        assert needs_task(registry.new_auth_state("token", CLIENT), token())
        with pytest.raises(AuthenticationDenied):
            await identity(registry, "token", token())


async def test_a_fetch_that_ends_before_the_task_begins_is_not_repeated(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    fetches: list[float] = []

    async def fetch() -> Fetched[int]:
        fetches.append(trio.current_time())
        await trio.sleep(1)
        return Fetched(len(fetches), 100, 200)

    cache: RefreshingCache[int] = RefreshingCache("a number", fetch, retry_interval_s=10)
    coroutine: Any = cache.current_value()
    assert start_eagerly(coroutine) is None
    await trio.sleep(2)
    assert await continue_in_task(coroutine) == 1
    assert len(fetches) == 1
