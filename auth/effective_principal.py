"""The principal of a connection that came through other proxies: which of them may name an original principal.

The rules are the broker's own (4.0.8, ``AuthorizationService.isValidOriginalPrincipal``): only a proxy role names an
original principal, it must name one, and that one is no proxy itself. Over HTTP a client may name itself: a proxy that
passes on its clients' own credentials says so of each.
"""

from dataclasses import dataclass

from auth.state import AuthenticationDenied, is_fit_for_a_role
from proto.connect_rules import INVALID_ROLES, NOT_A_PROXY
from proxy.config.proxy_roles import ProxyRoles


@dataclass(frozen=True, slots=True)
class ProxyClaim:
    """Claim of a client, in CONNECT or in the head of an HTTP request, to be a proxy.

    ``may_name_itself``: the original principal may be the client's own role.
    """

    original_principal: str = ""
    through_proxy: bool = False
    may_name_itself: bool = False


@dataclass(frozen=True, slots=True)
class EffectivePrincipal:
    """Principal of a connection, and the proxy that named it; ``proxy`` is empty where the client is no proxy."""

    principal: str
    proxy: str = ""


def resolve_effective_principal(
    role: str, method: str, claim: ProxyClaim, proxy_roles: ProxyRoles
) -> EffectivePrincipal:
    """Return the principal of a connection that ``role`` has authenticated by ``method``. Raises AuthenticationDenied.

    A role that is a proxy's by another method only is an ordinary client. As an original principal it is refused all
    the same, as a broker refuses it, which knows roles but not methods.
    """
    if not proxy_roles.includes(role, method):
        if claim.through_proxy:
            raise AuthenticationDenied(NOT_A_PROXY, f"{role!r} says that it is a proxy")
        if claim.original_principal.strip() and not (claim.may_name_itself and claim.original_principal == role):
            text = f"{role!r} is no proxy, but names {claim.original_principal[:200]!r} as original principal"
            raise AuthenticationDenied(INVALID_ROLES, text)
        return EffectivePrincipal(role)
    if not claim.original_principal.strip():
        raise AuthenticationDenied(INVALID_ROLES, f"the proxy {role!r} names no original principal")
    if proxy_roles.contains_role(claim.original_principal):
        raise AuthenticationDenied(INVALID_ROLES, f"the proxy {role!r} names a proxy as original principal")
    if not is_fit_for_a_role(claim.original_principal):
        raise AuthenticationDenied(INVALID_ROLES, f"the proxy {role!r} names an original principal that cannot be one")
    return EffectivePrincipal(claim.original_principal, proxy=role)
