"""Properties of authentication methods that follow from the configuration.

Brokers with ``authenticateOriginalAuthData`` (the default of Pulsar 5) want the client's own credentials behind the
proxy's. What a client has said in one round can be forwarded; what only its own connection or a dialogue proves cannot.
"""

from collections.abc import Collection

from proxy.config.proxy_roles import configured_methods
from proxy.config.session_lifetime import max_reauth_ms
from proxy.config.types import Authentication, Config

ANONYMOUS = "none"
"""The method that clients without credentials are taken for."""

WANTS_CLIENT_CREDENTIALS = "the broker wants the client's own credentials (authenticateOriginalAuthData)"

_NOT_FORWARDED = {
    "tls": "a certificate cannot be forwarded",
    "SCRAM-SHA-256": "a SCRAM exchange cannot be forwarded",
    "SCRAM-SHA-512": "a SCRAM exchange cannot be forwarded",
    "sasl": "a Kerberos ticket cannot be forwarded",
    ANONYMOUS: "a client without credentials (authentication.anonymous_role) has none to forward",
}
"""The methods with nothing to forward. proto.connect_rules.original_credentials forwards accordingly."""

_DIALOGUE = "an exchange of several rounds cannot be forwarded"
_ONE_ROUND = frozenset({"token", "basic"})
_KEPT_BACK = f"{WANTS_CLIENT_CREDENTIALS}, and the proxy in front of this one does not forward them"
_SETTING = f"{WANTS_CLIENT_CREDENTIALS}: set brokers.forward_authorization_credentials = true"


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
        methods.add(ANONYMOUS)
    return frozenset(methods)


def client_methods(config: Authentication) -> frozenset[str]:
    """Return the methods by which clients may come; a plugin stands under its own name, since only it knows more."""
    anonymous = {ANONYMOUS} if config.anonymous_role else set()
    return configured_methods(config) | anonymous | config.plugins.keys()


def not_forwarded_methods(methods: Collection[str], several_rounds: Collection[str] = ()) -> dict[str, str]:
    """Return those of the methods with nothing to forward, and why. ``several_rounds``: further ones, of plugins."""
    known = {method: _NOT_FORWARDED.get(method, _DIALOGUE if method in several_rounds else "") for method in methods}
    return {method: why for method, why in sorted(known.items()) if why}


def missing_credentials_text(method: str, *, forwards: bool) -> str:
    """Return why a broker that checks clients' own credentials did not get those of a client, and what helps.

    ``forwards``: credentials are forwarded where they can be.
    """
    if forwards and method in _ONE_ROUND:
        return _KEPT_BACK
    why = _NOT_FORWARDED.get(method, _DIALOGUE if forwards else "")
    return _not_forwarded_text(why) if why else _SETTING


def _not_forwarded_text(why: str) -> str:
    return f"{WANTS_CLIENT_CREDENTIALS}, and {why}: set it to false at the brokers"


def forwards_credentials(config: Config) -> bool:
    """Return True if credentials of any client go to brokers: its method has some, or it is a proxy that has them."""
    authentication = config.authentication
    if not (authentication.enabled and config.brokers.forward_authorization_credentials):
        return False
    methods = client_methods(authentication)
    return bool(authentication.proxy_roles) or len(not_forwarded_methods(methods)) < len(methods)


def refused_methods(
    config: Config, methods: Collection[str] | None = None, several_rounds: Collection[str] = ()
) -> dict[str, str]:
    """Return the methods whose clients are refused by a broker that checks clients' own credentials, and a sentence
    for each. ``methods``: where plugins were asked for theirs.

    Not before another proxy (``through_proxy``), which checks no credentials but this proxy's.
    """
    if not config.authentication.enabled or config.brokers.through_proxy:
        return {}
    methods = client_methods(config.authentication) if methods is None else methods
    sentences = {}
    if not config.brokers.forward_authorization_credentials:
        sentences = dict.fromkeys(sorted(methods), _SETTING)
    for method, why in not_forwarded_methods(methods, several_rounds).items():
        sentences[method] = _not_forwarded_text(why)
    return sentences


def forwarding_warnings(
    config: Config, methods: Collection[str] | None = None, several_rounds: Collection[str] = ()
) -> list[str]:
    """Return what an operator should know of forwarded credentials: clients of some methods need a setting of brokers,
    and a maximum lifetime does not hold for all relays. Arguments as in refused_methods.
    """
    if not config.brokers.forward_authorization_credentials:
        return []  # the operator's own choice: no principal's are
    warnings = []
    refused = refused_methods(config, methods, several_rounds)
    if refused:
        warnings.append(
            f"credentials of clients by {', '.join(refused)} cannot be forwarded: brokers with "
            "authenticateOriginalAuthData = true (Pulsar 5's default) refuse these clients; "
            "set it to false at the brokers"
        )
    if config.authentication.enabled and config.authentication.proxy_roles and _has_maximum(config):
        warnings.append(
            "no maximum lifetime of a session (connections_max_reauth_ms) holds in relays of proxies "
            "(authentication.proxy_roles) that leave brokers' challenges to their clients, as Pulsar's own does: "
            "set it at these proxies"
        )
    return warnings


def _has_maximum(config: Config) -> bool:
    methods, listeners = client_methods(config.authentication), range(len(config.listener))
    return any(max_reauth_ms(config, listener, method) for listener in listeners for method in methods)
