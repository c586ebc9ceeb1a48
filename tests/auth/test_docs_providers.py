"""docs/authentication.md: the providers that it shows how to write, run as they stand there."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from auth import registry as module
from auth.registry import PLUGINS, ProviderRegistry, configured_providers
from auth.state import (
    AuthenticationDenied,
    AuthenticationProvider,
    AuthenticationState,
    AuthState,
    ClientContext,
    Identity,
    OneStageAuthState,
)
from proxy.common.errors import ConfigError
from proxy.config.types import Authentication

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "authentication.md").read_text()
CLIENT = ClientContext("192.0.2.1:4000", b"certificate")
OPTIONS = {"voucher": {"vouchers": {"alice": "correct horse"}}, "riddle": {"keys": {"alice": "k1", "bob": "k2"}}}

Registry = Callable[..., ProviderRegistry]


def shown() -> dict[str, Any]:
    """What the page's Python defines."""
    defined: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/authentication.md", "exec"), defined)
    return defined


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry whose providers are a plug-in package's."""

    def make(plugins: dict[str, Any], made_by: dict[str, Any]) -> ProviderRegistry:
        def found(*, group: str) -> list[EntryPoint]:
            assert group == PLUGINS
            return [EntryPoint(name, f"anothers.package:{name}", group) for name in made_by]

        monkeypatch.setattr(module, "entry_points", found)
        monkeypatch.setattr(EntryPoint, "load", lambda self: made_by[self.name])
        return ProviderRegistry(Authentication(enabled=True, plugins=plugins), configured_providers)

    return make


@pytest.fixture
def documented(registry: Registry) -> ProviderRegistry:
    page = shown()
    return registry(OPTIONS, {"voucher": page["VoucherProvider"], "riddle": page["RiddleProvider"]})


@pytest.mark.conforms("pip-30.34", "pip-30.42", "pip-30.43")
async def test_the_provider_of_one_round(documented: ProviderRegistry) -> None:
    assert documented.methods == ("riddle", "voucher")
    state = documented.new_auth_state("voucher", CLIENT)
    assert await state.authenticate(b"correct horse") is None
    assert (state.is_complete(), state.get_auth_role(), state.get_identity()) == (True, "alice", Identity("alice"))
    other = documented.new_auth_state("voucher", CLIENT)
    with pytest.raises(AuthenticationDenied) as denied:
        await other.authenticate(b"wrong horse")
    assert denied.value.reason == "bad_voucher"
    assert not other.is_complete()


@pytest.mark.conforms("pip-30.42", "pip-30.43")
def test_the_provider_of_one_round_is_three_methods_long() -> None:
    provider = shown()["VoucherProvider"]
    assert {name for name in vars(provider) if not name.startswith("_")} == {"method", "identify"}
    assert "__init__" in vars(provider)


@pytest.mark.conforms("pip-30.20", "pip-30.30", "pip-30.31", "pip-30.33")
async def test_the_provider_of_several_rounds(documented: ProviderRegistry) -> None:
    state = documented.new_auth_state("riddle", CLIENT)
    nonce = await state.authenticate(b"bob")
    assert nonce is not None
    assert not state.is_complete()
    assert await state.authenticate(hmac.digest(b"k2", nonce, hashlib.sha256)) is None
    assert state.is_complete()
    assert state.get_identity() == Identity("bob"), "by default a credential does not end"


@pytest.mark.parametrize("who", [b"alice", b"nobody", b"", b"\xff"])
async def test_a_client_without_the_key_is_denied(documented: ProviderRegistry, who: bytes) -> None:
    state = documented.new_auth_state("riddle", CLIENT)
    nonce = await state.authenticate(who)
    assert nonce is not None
    with pytest.raises(AuthenticationDenied):
        await state.authenticate(hmac.digest(b"k2", nonce, hashlib.sha256))
    assert not state.is_complete()


def test_the_configuration_on_the_page_has_the_options_of_the_provider() -> None:
    import tomllib

    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "voucher" in text]
    assert [table["authentication"]["plugins"]["voucher"] for table in tables] == [OPTIONS["voucher"]]


# ---- PIP-30's defaults


class Shouting(AuthenticationProvider):
    """Its data source has the address in capitals."""

    method = "shouting"

    def __init__(self, options: dict[str, Any]) -> None:
        del options

    def get_auth_data_source(self, client: ClientContext) -> ClientContext:
        return ClientContext("A HOST", client.certificate)

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        del data
        return Identity(f"{client.address} {client.certificate.decode()}")


@pytest.mark.conforms("pip-30.41")
async def test_the_data_source_is_the_providers(registry: Registry) -> None:
    state = registry({"shouting": {}}, {"shouting": Shouting}).new_auth_state("shouting", CLIENT)
    await state.authenticate(b"")
    assert state.get_auth_role() == "A HOST certificate"


@pytest.mark.conforms("pip-30.41")
async def test_the_data_source_is_the_providers_also_where_two_share_a_method(registry: Registry) -> None:
    shared = registry({"one": {}, "two": {}}, {"one": Shouting, "two": Shouting}).new_auth_state("shouting", CLIENT)
    await shared.authenticate(b"")
    assert shared.get_auth_role() == "A HOST certificate"


class Bare:
    """A provider without our base."""

    method = "bare"

    def __init__(self, options: dict[str, Any]) -> None:
        del options
        self.told: list[ClientContext] = []

    def new_auth_state(self, client: ClientContext) -> AuthState:
        self.told.append(client)
        return OneStageAuthState(self, client)

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        return Identity(f"{client.address} {data.decode()}")


async def test_a_provider_needs_no_base_of_ours(registry: Registry) -> None:
    state = registry({"bare": {}}, {"bare": Bare}).new_auth_state("bare", CLIENT)
    await state.authenticate(b"x")
    assert state.get_auth_role() == "192.0.2.1:4000 x"


class Nameless(AuthenticationProvider):
    def __init__(self, options: dict[str, Any]) -> None:
        del options


def test_a_provider_without_a_method_is_none(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="makes no provider: TypeError"):
        registry({"nameless": {}}, {"nameless": Nameless})


class Mute(AuthenticationProvider):
    method = "mute"

    def __init__(self, options: dict[str, Any]) -> None:
        del options


@pytest.mark.conforms("pip-30.23")
async def test_a_provider_without_its_source_denies_clients(registry: Registry) -> None:
    state = registry({"mute": {}}, {"mute": Mute}).new_auth_state("mute", CLIENT)
    with pytest.raises(NotImplementedError, match="Mute has neither"):
        await state.authenticate(b"")
    assert not state.is_complete()


@pytest.mark.conforms("pip-30.23")
def test_a_state_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AuthenticationState()  # type: ignore[abstract]
