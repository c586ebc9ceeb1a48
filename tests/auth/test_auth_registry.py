"""Which provider serves which method; a method without one is denied. And providers from elsewhere."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from auth import registry as module
from auth.providers.tls import TlsProvider
from auth.providers.token import TokenProvider
from auth.registry import PLUGINS, ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identity, OneStageAuthState, Provider
from proxy.common.errors import ConfigError
from proxy.config.types import (
    Authentication,
    BasicAuthentication,
    OidcAuthentication,
    SaslAuthentication,
    ScramAuthentication,
    TlsAuthentication,
    TokenAuthentication,
)

CLIENT = ClientContext("10.0.0.1:1234")


def registry_with_token(secret_file: str) -> ProviderRegistry:
    config = Authentication(enabled=True, token=TokenAuthentication(secret_key=secret_file))
    return ProviderRegistry(config, configured_providers)


def test_without_configuration_there_is_no_provider() -> None:
    assert list(configured_providers(Authentication())) == []
    assert ProviderRegistry(Authentication(), configured_providers).methods == ()


def test_the_token_provider(secret_file: str) -> None:
    config = Authentication(token=TokenAuthentication(secret_key=secret_file))
    (provider,) = configured_providers(config)
    assert isinstance(provider, TokenProvider)
    assert registry_with_token(secret_file).methods == ("token",)


@pytest.mark.conforms("pip-30.36")
def test_every_client_gets_a_state_of_its_own(secret_file: str) -> None:
    registry = registry_with_token(secret_file)
    first, second = registry.new_auth_state("token", CLIENT), registry.new_auth_state("token", CLIENT)
    assert isinstance(first, OneStageAuthState)
    assert first is not second


@pytest.mark.conforms("pip-30.53")
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


def test_the_tls_provider() -> None:
    (provider,) = configured_providers(Authentication(tls=TlsAuthentication()))
    assert isinstance(provider, TlsProvider)


class Made:
    """In place of a provider's class, or of the function that makes several."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.method = "made"

    def __iter__(self) -> Iterator[Any]:
        return iter([self, self])

    def new_auth_state(self, client: ClientContext) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("maker", "settings", "count"),
    [
        ("auth.providers.basic.BasicProvider", {"basic": BasicAuthentication(file="x")}, 1),
        ("auth.providers.scram.scram_providers", {"scram": ScramAuthentication(file="x")}, 2),
        ("auth.providers.sasl.SaslProvider", {"sasl": SaslAuthentication(principal="a/b@C", keytab="x")}, 1),
        (
            "auth.providers.oidc.OidcProvider",
            {"oidc": OidcAuthentication(allowed_issuers=("https://i",), allowed_audiences=("a",))},
            1,
        ),
    ],
)
def test_each_provider_is_made_from_its_own_table(
    maker: str, settings: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sasl" in maker:
        pytest.importorskip("gssapi")
    monkeypatch.setattr(maker, Made)
    providers: list[Any] = list(configured_providers(Authentication(**settings)))
    assert [provider.config for provider in providers] == list(settings.values()) * count


def test_the_provider_of_a_method(secret_file: str) -> None:
    registry = registry_with_token(secret_file)
    assert registry.provider_name("token") == "TokenProvider"
    assert registry.provider_name("sasl") == "none"


# ---- clients that bring nothing


def judged_by(*providers: Provider, **settings: Any) -> ProviderRegistry:
    return ProviderRegistry(Authentication(enabled=True, **settings), lambda _config: providers)


@pytest.mark.conforms("pip-30.54")
@pytest.mark.parametrize("method", ["", "none"])
async def test_an_anonymous_role_only_where_it_is_configured(method: str) -> None:
    with pytest.raises(AuthenticationDenied) as denied:
        judged_by().new_auth_state(method, CLIENT)
    assert denied.value.reason == "unknown_method"
    state = judged_by(anonymous_role="guest").new_auth_state(method, CLIENT)
    assert await state.authenticate(b"whatever") is None
    assert state.get_identity() == Identity("guest")


@pytest.mark.parametrize("method", ["None", "NONE", " ", "none ", "anonymous", "guest", "token"])
def test_a_client_that_names_an_unknown_method_is_not_anonymous(method: str) -> None:
    """A method without a provider must not pass for a client without credentials."""
    with pytest.raises(AuthenticationDenied):
        judged_by(anonymous_role="guest").new_auth_state(method, CLIENT)


async def test_a_bad_token_does_not_make_a_guest(secret_file: str) -> None:
    config = Authentication(enabled=True, anonymous_role="guest", token=TokenAuthentication(secret_key=secret_file))
    state = ProviderRegistry(config, configured_providers).new_auth_state("token", CLIENT)
    with pytest.raises(AuthenticationDenied):
        await state.authenticate(b"")
    assert not state.is_complete()


# ---- two providers for one method


class Word:
    """Takes one word for a role."""

    method = "token"

    def __init__(self, word: bytes, role: str) -> None:
        self._word, self._role = word, role

    def new_auth_state(self, client: ClientContext) -> AuthState:
        return OneStageAuthState(self, client)

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        assert client == CLIENT
        if data != self._word:
            raise AuthenticationDenied(f"not_{self._role}")
        return Identity(self._role, 4711)


class Asking:
    """A method of two rounds."""

    method = "token"

    def new_auth_state(self, client: ClientContext) -> Any:
        del client
        return self

    async def authenticate(self, data: bytes) -> bytes | None:
        return b"challenge" + data

    def is_complete(self) -> bool:
        return True  # what it says with a challenge in hand counts for nothing

    def get_auth_role(self) -> str:
        return "admin"

    def get_identity(self) -> Identity:
        return Identity("admin")


async def outcome(registry: ProviderRegistry, data: bytes) -> Identity | str:
    """A client's principal, or why it has none."""
    state = registry.new_auth_state("token", CLIENT)
    try:
        assert await state.authenticate(data) is None
    except AuthenticationDenied as denied:
        assert not state.is_complete()
        return denied.reason
    return state.get_identity()


async def test_a_credential_that_one_of_several_providers_accepts_is_accepted() -> None:
    registry = judged_by(Word(b"a", "alice"), Word(b"b", "bob"), Word(b"c", "carol"))
    assert registry.methods == ("token",)
    assert registry.provider_name("token") == "EitherProvider"
    assert await outcome(registry, b"a") == Identity("alice", 4711)
    assert await outcome(registry, b"b") == Identity("bob", 4711)
    assert await outcome(registry, b"c") == Identity("carol", 4711)


async def test_the_first_denial_is_the_one_that_is_told() -> None:
    registry = judged_by(Word(b"a", "alice"), Word(b"b", "bob"))
    assert await outcome(registry, b"x") == "not_alice"


class Denying:
    """Denies every client for one reason."""

    method = "token"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def new_auth_state(self, client: ClientContext) -> AuthState:
        return OneStageAuthState(self, client)

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        raise AuthenticationDenied(self._reason)


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        # Who only sees that a token is not for it leaves the word to one who knows better.
        (("bad_signature", "expired"), "expired"),
        (("bad_algorithm", "expired"), "expired"),
        (("bad_signature", "bad_algorithm"), "bad_algorithm"),
        # An unknown issuer is no better name.
        (("bad_signature", "unknown_issuer"), "bad_signature"),
        (("bad_algorithm", "unknown_issuer"), "bad_algorithm"),
        # Who knows the token has the word, whatever the other one says.
        (("expired", "bad_signature"), "expired"),
        (("expired", "issuer_unavailable"), "expired"),
        (("unknown_issuer", "expired"), "unknown_issuer"),
        # Of three likewise.
        (("bad_signature", "unknown_issuer", "wrong_audience"), "wrong_audience"),
        (("bad_signature", "expired", "wrong_audience"), "expired"),
        (("unknown_issuer", "bad_signature", "wrong_audience"), "unknown_issuer"),
    ],
)
async def test_which_of_several_denials_is_told(reasons: tuple[str, ...], told: str) -> None:
    assert await outcome(judged_by(*map(Denying, reasons)), b"x") == told


async def test_the_first_of_two_providers_that_accept_decides() -> None:
    assert await outcome(judged_by(Word(b"w", "alice"), Word(b"w", "bob")), b"w") == Identity("alice", 4711)


@pytest.mark.parametrize("others", [(0, 1), (1, 0), (0, 0)])
def test_a_method_of_several_rounds_cannot_be_shared(others: tuple[int, int]) -> None:
    kinds: list[Any] = [Asking(), Word(b"a", "alice")]
    with pytest.raises(ConfigError, match="two providers judge it"):
        judged_by(*(kinds[other] for other in others))


# ---- providers from elsewhere


def test_which_methods_of_plugins_need_several_rounds() -> None:
    """Their clients' credentials cannot be forwarded to brokers."""
    single, several = Word(b"a", "alice"), Asking()
    single.method, several.method = "single", "several"
    registry = ProviderRegistry(Authentication(), lambda _config: [single, several])
    assert registry.methods == ("several", "single")
    assert registry.several_round_methods == ("several",)


OPTIONS = {"word": "open sesame", "deep": {"list": [1, 2]}}


def good_plugin(options: dict[str, Any]) -> Provider:
    assert options == OPTIONS
    provider = Word(options["word"].encode(), "plugged")
    provider.method = "words"
    return provider


def raising_plugin(options: dict[str, Any]) -> Provider:
    raise LookupError(f"there is no {sorted(options)}")


def refusing_plugin(options: dict[str, Any]) -> Provider:
    del options
    raise ConfigError("authentication.plugins.x.word: is too short")


def plugin_of_method(method: Any) -> Callable[[dict[str, Any]], Any]:
    def make(options: dict[str, Any]) -> Any:
        del options
        provider = Word(b"", "")
        provider.method = method
        return provider

    return make


def no_provider(options: dict[str, Any]) -> Any:
    return options


MADE_HERE = {
    "good": good_plugin,
    "raising": raising_plugin,
    "refusing": refusing_plugin,
    "methodless": plugin_of_method(""),
    "none": plugin_of_method("none"),
    "number": plugin_of_method(5),
    "nothing": no_provider,
}


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The entry points of a package that is installed; which groups were asked for."""
    asked: list[str] = []

    def found(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint(name, f"anothers.package:{name}", group) for name in MADE_HERE]

    monkeypatch.setattr(module, "entry_points", found)
    monkeypatch.setattr(EntryPoint, "load", lambda self: MADE_HERE[self.name])
    yield asked
    assert set(asked) <= {PLUGINS}


def with_plugin(name: str, options: dict[str, Any] | None = None) -> ProviderRegistry:
    config = Authentication(enabled=True, plugins={name: OPTIONS if options is None else options})
    return ProviderRegistry(config, configured_providers)


@pytest.mark.usefixtures("plugins")
async def test_a_provider_from_elsewhere() -> None:
    registry = with_plugin("good")
    assert registry.methods == ("words",)
    assert registry.provider_name("words") == "Word"
    state = registry.new_auth_state("words", CLIENT)
    assert await state.authenticate(b"open sesame") is None
    assert state.get_identity() == Identity("plugged", 4711)


def test_where_plugins_are_looked_for(plugins: list[str]) -> None:
    with_plugin("good")
    assert plugins == ["pulsar_trio_proxy.authentication"]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("absent", "no installed package has an entry point of that name in pulsar_trio_proxy.authentication"),
        ("raising", "makes no provider: LookupError: there is no ['deep', 'word']"),
        ("nothing", "makes no provider: AttributeError: 'dict' object has no attribute 'method'"),
        ("methodless", "makes a provider without a method"),
        ("none", "makes a provider without a method"),
        ("number", "makes a provider without a method"),
    ],
)
def test_a_plugin_that_is_of_no_use(name: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_plugin(name)
    assert str(caught.value).startswith(f"authentication.plugins.{name}: ")
    assert str(caught.value).endswith(error)


@pytest.mark.usefixtures("plugins")
def test_a_configuration_error_of_a_plugin_is_reported_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"^authentication\.plugins\.x\.word: is too short$"):
        with_plugin("refusing")


def test_a_plugin_whose_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("gone", "no_such_module_anywhere:make", PLUGINS)
    monkeypatch.setattr(module, "entry_points", lambda *, group: [entry] if group == PLUGINS else [])
    with pytest.raises(ConfigError, match=r"^authentication\.plugins\.gone: no_such_module_anywhere:make makes no"):
        with_plugin("gone")


def test_plugins_that_are_not_configured_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda _self: pytest.fail("a stranger's code was loaded"))
    assert list(configured_providers(Authentication())) == []
