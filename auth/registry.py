"""Registry of the configured authentication providers, by method."""

import functools
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points

import msgspec

from auth.state import (
    AuthenticationDenied,
    AuthenticationProvider,
    AuthState,
    ClientContext,
    Identity,
    OneStageAuthState,
    Provider,
    new_auth_state,
)
from proxy.common.eager import call_eagerly, eager
from proxy.common.errors import ConfigError
from proxy.common.suggestions import did_you_mean
from proxy.config.proxy_roles import ALL_METHODS
from proxy.config.types import Authentication, OidcAuthentication

PLUGINS = "pulsar_trio_proxy.authentication"
"""The group of entry points where providers from elsewhere are found."""

NO_METHODS = frozenset({"", "none"})
"""What clients that do not authenticate themselves call their method."""


def configured_providers(config: Authentication) -> Iterator[Provider]:
    """Make the configured providers; raise ConfigError where one cannot be made.

    Each is imported only where it is configured: some need libraries that are optional.
    """
    if config.token is not None:
        from auth.providers.token import TokenProvider

        yield TokenProvider(config.token)
    if config.tls is not None:
        from auth.providers.tls import TlsProvider

        yield TlsProvider(config.tls)
    if config.basic is not None:
        from auth.providers.basic import BasicProvider

        yield BasicProvider(config.basic)
    if config.scram is not None:
        from auth.providers.scram import scram_providers

        yield from scram_providers(config.scram)
    if config.sasl is not None:
        from auth.providers.sasl import SaslProvider

        yield SaslProvider(config.sasl)
    if config.oidc is not None:
        yield _oidc_provider(msgspec.json.encode(config.oidc))
    if config.plugins:
        yield from _plugins(config)


@functools.lru_cache(maxsize=1)
def _oidc_provider(config: bytes) -> Provider:
    """Make the OIDC provider, the same one over reloads that leave its table (as JSON) as it is.

    The issuers' keys are kept with it: an issuer may be down at a reload.
    """
    from auth.providers.oidc import OidcProvider

    return OidcProvider(msgspec.json.decode(config, type=OidcAuthentication))


def _plugins(config: Authentication) -> Iterator[Provider]:
    found = {entry.name: entry for entry in entry_points(group=PLUGINS)}
    for name, options in config.plugins.items():
        key = f"authentication.plugins.{name}"
        if name not in found:
            meant = did_you_mean(name, found)
            raise ConfigError(f"{key}: no installed package has an entry point of that name in {PLUGINS}{meant}")
        yield _plugin(key, found[name], options)


def _plugin(key: str, entry: EntryPoint, options: dict[str, object]) -> Provider:
    """Make a provider of a third party: ``entry`` names a callable that takes the table of options."""
    try:
        provider: Provider = entry.load()(options)
        method = provider.method
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {entry.value} makes no provider: {type(error).__name__}: {error}") from error
    if not isinstance(method, str) or method in NO_METHODS:
        raise ConfigError(f"{key}: {entry.value} makes a provider without a method")
    return provider


class ProviderRegistry:
    """Providers by method. A method that is not configured is always denied."""

    def __init__(self, config: Authentication, providers: Callable[[Authentication], Iterable[Provider]]) -> None:
        self._anonymous_role = config.anonymous_role
        self._providers: dict[str, Provider] = {}
        for provider in providers(config):
            first = self._providers.get(provider.method)
            self._providers[provider.method] = provider if first is None else _combine_providers(first, provider)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that clients may use."""
        return tuple(sorted(self._providers))

    @property
    def several_round_methods(self) -> tuple[str, ...]:
        """The methods of plugins of which a client's first data alone prove nothing, as far as they can tell."""
        plugins = [method for method in self.methods if method not in ALL_METHODS]
        return tuple(method for method in plugins if not _has_one_round(self._providers[method]))

    def provider_name(self, method: str) -> str:
        """Return the name of a method's provider, for a metric's label; "none" where there is none."""
        provider = self._providers.get(method)
        return "none" if provider is None else type(provider).__name__.lstrip("_")

    def new_auth_state(self, method: str, client: ClientContext) -> AuthState:
        """Make a state for one client; raise AuthenticationDenied for an unknown method."""
        provider = self._providers.get(method)
        if provider is not None:
            return new_auth_state(provider, client)
        if method in NO_METHODS and self._anonymous_role:
            return new_auth_state(_Anonymous(self._anonymous_role), client)
        raise AuthenticationDenied("unknown_method", f"no provider for method {method[:64]!r}")


class _Anonymous(AuthenticationProvider):
    """Provider that takes in clients without credentials, under ``authentication.anonymous_role``."""

    method = "none"

    def __init__(self, role: str) -> None:
        self._role = role

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- the interface's
        return Identity(self._role)


def _has_one_round(provider: Provider) -> bool:
    return isinstance(new_auth_state(provider, ClientContext("")), OneStageAuthState)


def _combine_providers(first: Provider, second: Provider) -> Provider:
    for provider in (first, second):
        if not _has_one_round(provider):
            text = "two providers judge it, which only works for methods of one round"
            raise ConfigError(f"authentication: method {first.method}: {text}")
    return _EitherProvider(first, second)


class _EitherProvider(AuthenticationProvider):
    """Two providers for one method (tokens of our own keys, and of an issuer): either may accept a client."""

    def __init__(self, first: Provider, second: Provider) -> None:
        self._both = (first, second)

    @property
    def method(self) -> str:
        """The method of both."""
        return self._both[0].method

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        """Return the first identity that one of them finds; where neither does, raise the more specific denial."""
        first, second = self._both
        try:
            return await _identity(first, data, client)
        except AuthenticationDenied as denied:
            before = denied
        try:
            return await _identity(second, data, client)
        except AuthenticationDenied as denied:
            raise (denied if _is_more_specific(denied, before) else before) from None


async def _identity(provider: Provider, data: bytes, client: ClientContext) -> Identity:
    state = new_auth_state(provider, client)
    challenge = await call_eagerly(state.authenticate, data)
    if challenge is not None or not state.is_complete():
        raise AuthenticationDenied("several_rounds", "two providers share a method of several rounds")
    return state.get_identity()


def _is_more_specific(second: AuthenticationDenied, first: AuthenticationDenied) -> bool:
    """Return True if the first only saw that the credential is not for it, and the second knew more."""
    return first.reason in {"bad_algorithm", "bad_signature"} and second.reason != "unknown_issuer"
