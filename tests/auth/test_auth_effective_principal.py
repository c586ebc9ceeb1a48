"""Proxies before this one: only they say whose a connection is, and what they say has to make sense.

The same cases as the broker's (4.0.8, ``AuthorizationService.isValidOriginalPrincipal``).
"""

import pytest

from auth.effective_principal import EffectivePrincipal, ProxyClaim, resolve_effective_principal
from auth.state import ROLE_CHARACTERS_MAX, AuthenticationDenied
from proto.connect_rules import INVALID_ROLES, NOT_A_PROXY
from proxy.config.proxy_roles import ProxyRoles

PROXIES, NO_PROXIES = ProxyRoles(["proxy-a", "proxy-b"]), ProxyRoles([])


def denial(role: str, claim: ProxyClaim, proxies: ProxyRoles = PROXIES, method: str = "token") -> AuthenticationDenied:
    with pytest.raises(AuthenticationDenied) as caught:
        resolve_effective_principal(role, method, claim, proxies)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    return caught.value


# ---- clients


@pytest.mark.parametrize("proxies", [PROXIES, NO_PROXIES], ids=["some", "none"])
def test_a_clients_effective_principal_is_its_own(proxies: ProxyRoles) -> None:
    assert resolve_effective_principal("alice", "token", ProxyClaim(), proxies) == EffectivePrincipal("alice", proxy="")


@pytest.mark.parametrize("blank", [" ", "\t\n", "\u3000"])
def test_a_client_with_a_blank_original_principal_is_itself(blank: str) -> None:
    """As the broker: what is blank is not there."""
    assert resolve_effective_principal(
        "alice", "token", ProxyClaim(original_principal=blank), PROXIES
    ) == EffectivePrincipal("alice")


@pytest.mark.conforms("pip-1.31")
@pytest.mark.parametrize("proxies", [PROXIES, NO_PROXIES], ids=["some", "none"])
@pytest.mark.parametrize("original", ["bob", "alice", "proxy-a", "admin", " bob"])
def test_a_client_names_no_original_principal(original: str, proxies: ProxyRoles) -> None:
    """Security: not even its own name, as the broker has it."""
    denied = denial("alice", ProxyClaim(original_principal=original), proxies)
    assert denied.reason == INVALID_ROLES
    assert "'alice' is no proxy" in str(denied)


@pytest.mark.parametrize("proxies", [PROXIES, NO_PROXIES], ids=["some", "none"])
@pytest.mark.parametrize("original", ["", "bob"])
def test_a_client_does_not_say_that_it_is_a_proxy(original: str, proxies: ProxyRoles) -> None:
    """Security: the broker decides by this field whom it talks to."""
    assert denial("alice", ProxyClaim(original, through_proxy=True), proxies).reason == NOT_A_PROXY


@pytest.mark.parametrize("role", ["Proxy-a", "proxy-a ", "proxy", "proxy-", "proxy-aa", "*"])
def test_a_role_that_only_resembles_a_proxy_role_is_no_proxy(role: str) -> None:
    assert denial(role, ProxyClaim("bob", through_proxy=True)).reason == NOT_A_PROXY
    assert denial(role, ProxyClaim("bob")).reason == INVALID_ROLES


def test_an_original_principal_cannot_flood_or_forge_the_log() -> None:
    assert "\n" not in str(denial("alice", ProxyClaim("bob\nlevel=info " + "x" * 100_000)))


# ---- proxies


@pytest.mark.parametrize("through_proxy", [True, False])
@pytest.mark.parametrize("original", ["alice", "bob", "Ünïcödé 角色", "Proxy-A", "r" * ROLE_CHARACTERS_MAX])
def test_a_proxy_names_the_principal_of_the_connection(original: str, through_proxy: bool) -> None:
    assert resolve_effective_principal(
        "proxy-a", "token", ProxyClaim(original, through_proxy), PROXIES
    ) == EffectivePrincipal(original, proxy="proxy-a")


@pytest.mark.parametrize("through_proxy", [True, False])
@pytest.mark.parametrize("original", ["", " ", "\t\n", "\u3000"])
def test_a_proxy_without_an_original_principal_is_denied(original: str, through_proxy: bool) -> None:
    """Security: a proxy never acts in its own name, which has the rights of all."""
    denied = denial("proxy-a", ProxyClaim(original, through_proxy))
    assert denied.reason == INVALID_ROLES
    assert "names no original principal" in str(denied)


@pytest.mark.parametrize("original", ["proxy-a", "proxy-b"])
def test_a_proxy_that_names_a_proxy(original: str) -> None:
    denied = denial("proxy-a", ProxyClaim(original, through_proxy=True))
    assert denied.reason == INVALID_ROLES
    assert "names a proxy" in str(denied)


@pytest.mark.parametrize(
    "original", ["ali\nce", "alice\x00", "\x1b[31malice", "\u202ealice", "ali\u200bce", "r" * (ROLE_CHARACTERS_MAX + 1)]
)
def test_a_proxy_that_names_what_no_role_can_be(original: str) -> None:
    denied = denial("proxy-a", ProxyClaim(original, through_proxy=True))
    assert denied.reason == INVALID_ROLES
    assert "cannot be one" in str(denied)


# ---- proxies by one method alone


BOUND = ProxyRoles(["tls:proxy-a", "proxy-b", "*:system:proxy-c"])


def test_a_role_that_is_a_proxys_by_one_method_alone() -> None:
    """Security: one who can make a token for the role (or a user of the name) is not the proxy with the certificate."""
    claim = ProxyClaim("alice", through_proxy=True)
    assert resolve_effective_principal("proxy-a", "tls", claim, BOUND) == EffectivePrincipal("alice", proxy="proxy-a")
    for method in ("token", "basic", "sasl", "none", "", "TLS", "*"):
        assert denial("proxy-a", claim, BOUND, method).reason == NOT_A_PROXY
        assert denial("proxy-a", ProxyClaim("alice"), BOUND, method).reason == INVALID_ROLES
        assert resolve_effective_principal("proxy-a", method, ProxyClaim(), BOUND) == EffectivePrincipal("proxy-a"), (
            "a client like any other"
        )


@pytest.mark.parametrize("method", ["token", "tls", "sasl"])
def test_a_role_that_is_a_proxys_by_any_method(method: str) -> None:
    claim = ProxyClaim("alice", through_proxy=True)
    for role in ("proxy-b", "system:proxy-c"):
        assert resolve_effective_principal(role, method, claim, BOUND) == EffectivePrincipal("alice", proxy=role)


@pytest.mark.parametrize("role", ["tls:proxy-a", "*:system:proxy-c", "proxy-c", "system", ":proxy-c"])
def test_an_entry_is_no_role(role: str) -> None:
    for method in ("tls", "token", "system", "*"):
        assert denial(role, ProxyClaim("alice", through_proxy=True), BOUND, method).reason == NOT_A_PROXY


@pytest.mark.parametrize("original", ["proxy-a", "proxy-b", "system:proxy-c"])
def test_a_bound_proxy_names_no_proxy(original: str) -> None:
    """Security: a broker knows roles, not methods, and would take it for a proxy."""
    assert denial("proxy-a", ProxyClaim(original), BOUND, "tls").reason == INVALID_ROLES


@pytest.mark.parametrize("through_proxy", [True, False])
def test_a_proxy_names_no_role_that_is_a_proxys_by_another_method(through_proxy: bool) -> None:
    """Security: with the token of one proxy no client takes the rights of the one that has a certificate."""
    for role, method in (("proxy-b", "token"), ("system:proxy-c", "sasl")):
        denied = denial(role, ProxyClaim("proxy-a", through_proxy), BOUND, method)
        assert denied.reason == INVALID_ROLES
        assert "names a proxy" in str(denied)
