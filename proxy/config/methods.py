"""Properties of authentication methods that follow from the configuration."""

from proxy.config.types import Authentication


def one_round_methods(config: Authentication) -> frozenset[str]:
    """Return the methods whose first round is also the last one, as far as the configuration alone can tell.

    Methods of plugins are not among them: only a plugin knows how many rounds it needs. Where
    one shares a method with a provider of our own, both have a single round (auth.registry).
    """
    methods = set()
    if config.token is not None or config.oidc is not None:
        methods.add("token")
    if config.tls is not None:
        methods.add("tls")
    if config.basic is not None:
        methods.add("basic")
    if config.anonymous_role:
        methods.add("none")  # what clients that name no method are taken for
    return frozenset(methods)
