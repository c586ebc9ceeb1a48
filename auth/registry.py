"""Which provider judges which method, made from the configuration."""

from collections.abc import Callable, Iterator

from auth.providers.token import TokenProvider
from auth.state import AuthenticationDenied, AuthState, ClientContext, Provider
from proxy.config.types import Authentication


def configured_providers(config: Authentication) -> Iterator[Provider]:
    """The providers that the configuration asks for; raises ConfigError where one cannot be made."""
    if config.token is not None:
        yield TokenProvider(config.token)


class ProviderRegistry:
    """Method → provider. A method that nobody configured is denied, always."""

    def __init__(self, config: Authentication, providers: Callable[[Authentication], Iterator[Provider]]) -> None:
        self._providers = {provider.method: provider for provider in providers(config)}

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that clients may use."""
        return tuple(sorted(self._providers))

    def new_auth_state(self, method: str, client: ClientContext) -> AuthState:
        """A state for one client; raises AuthenticationDenied for an unknown method."""
        provider = self._providers.get(method)
        if provider is None:
            raise AuthenticationDenied("unknown_method", f"no provider for method {method[:64]!r}")
        return provider.new_auth_state(client)
