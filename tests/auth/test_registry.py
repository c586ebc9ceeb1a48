"""Which provider judges which method; a method without one is denied."""

import pytest

from auth.providers.token import TokenProvider
from auth.registry import ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, ClientContext, OneStageAuthState
from proxy.config.types import Authentication, TokenAuthentication

CLIENT = ClientContext("10.0.0.1:1234")


def registry_with_token(secret_file: str) -> ProviderRegistry:
    config = Authentication(enabled=True, token=TokenAuthentication(secret_key=secret_file))
    return ProviderRegistry(config, configured_providers)


def test_nothing_configured_nobody_judges() -> None:
    assert list(configured_providers(Authentication())) == []
    assert ProviderRegistry(Authentication(), configured_providers).methods == ()


def test_the_token_provider(secret_file: str) -> None:
    config = Authentication(token=TokenAuthentication(secret_key=secret_file))
    (provider,) = configured_providers(config)
    assert isinstance(provider, TokenProvider)
    assert registry_with_token(secret_file).methods == ("token",)


def test_every_client_gets_a_state_of_its_own(secret_file: str) -> None:
    registry = registry_with_token(secret_file)
    first, second = registry.new_auth_state("token", CLIENT), registry.new_auth_state("token", CLIENT)
    assert isinstance(first, OneStageAuthState)
    assert first is not second


@pytest.mark.parametrize("method", ["", "none", "Token", "TOKEN", "token ", "token\0", "sasl", "basic", "tls"])
def test_an_unknown_method_is_denied(method: str, secret_file: str) -> None:
    with pytest.raises(AuthenticationDenied) as denied:
        registry_with_token(secret_file).new_auth_state(method, CLIENT)
    assert denied.value.reason == "unknown_method"


def test_every_method_is_unknown_where_none_is_configured() -> None:
    with pytest.raises(AuthenticationDenied):
        ProviderRegistry(Authentication(), configured_providers).new_auth_state("token", CLIENT)


def test_the_text_of_a_denial_is_one_short_line(secret_file: str) -> None:
    with pytest.raises(AuthenticationDenied) as denied:
        registry_with_token(secret_file).new_auth_state("evil\nlevel=info " + "x" * 1000, CLIENT)
    assert "\n" not in str(denied.value)
    assert len(str(denied.value)) < 120
