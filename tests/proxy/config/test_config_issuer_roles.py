"""proxy.config.issuer_roles: each of several issuers has its roles, no role has two issuers; nor has a proxy's role."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common.errors import ConfigError
from proxy.config.checks import validate_config
from proxy.config.issuer_roles import check_allowed_roles, fits_entry
from proxy.config.types import Config, OidcAuthentication

A, B = "https://a.example", "https://b.example"
Roles = dict[str, list[str]]


def check(roles: Roles, *issuers: str, proxy_roles: tuple[str, ...] = (), **tables: Any) -> None:
    """Check a configuration with these issuers. Raises ConfigError."""
    oidc = {"allowed_issuers": issuers or (A, B), "allowed_audiences": ["pulsar"], "allowed_roles": roles}
    authentication = {"enabled": True, "oidc": oidc, "proxy_roles": proxy_roles, **tables}
    validate_config(msgspec.convert({"authentication": authentication}, Config))


@pytest.mark.parametrize(
    ("role", "fits"),
    [
        ("admin", True),
        ("admin2", False),
        ("Admin", False),
        ("app-", True),
        ("app-1", True),
        ("app", False),
        ("*", False),
    ],
)
def test_a_role_fits_an_entry_as_it_is_or_one_with_a_star_by_its_beginning(role: str, fits: bool) -> None:
    assert fits_entry(role, ["admin", "app-*"]) is fits


@pytest.mark.parametrize(
    ("roles", "issuers"),
    [
        ({}, [A]),
        ({}, [A, A]),
        ({A: ["*"]}, [A]),
        ({A: ["admin", "app-*"], B: ["partner-*", "application"]}, [A, B]),
        ({A: ["a", "ab*"], B: ["aa", "ac*"]}, [A, B]),
    ],
)
def test_roles_of_one_issuer_each_are_in_order(roles: Roles, issuers: list[str]) -> None:
    check(roles, *issuers)


def test_several_issuers_without_a_list_for_each_are_refused() -> None:
    roles: Roles = {}
    for missing in (A, B):
        with pytest.raises(
            ConfigError, match=rf'^authentication\.oidc\.allowed_roles: "{re.escape(missing)}" has no entry.* any role'
        ):
            check(roles)
        roles[missing] = [f"{missing}*"]
    check(roles)


@pytest.mark.parametrize(
    ("one", "other"), [("x", "x"), ("*", "*"), ("x", "*"), ("x-*", "x-*"), ("x-1", "x-*"), ("x-", "x-*"), ("x*", "x-*")]
)
def test_a_role_that_two_issuers_could_sign_is_refused(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        with pytest.raises(ConfigError, match=r"allowed_roles: .* could sign the same role") as caught:
            check({A: [first, "own"], B: [second]})
        assert f'by "{first}" and "{second}"' in str(caught.value)


ENTRIES = st.lists(st.text("ab*", min_size=1, max_size=4), min_size=1, max_size=3)


@given(a=ENTRIES, b=ENTRIES, role=st.text("ab", min_size=1, max_size=6))
def test_no_role_fits_two_issuers_that_were_accepted(a: list[str], b: list[str], role: str) -> None:
    oidc = OidcAuthentication(
        allowed_issuers=(A, B), allowed_audiences=("p",), allowed_roles={A: tuple(a), B: tuple(b)}
    )
    try:
        check_allowed_roles(oidc)
    except ConfigError:
        return
    assert not (fits_entry(role, a) and fits_entry(role, b))


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({A: ["a"], "https://c": ["c"]}, '"https://c" is none of allowed_issuers'),
        ({A + "/": ["a"], B: ["b"]}, f'did you mean "{A}"?'),
        ({A: ["a*b"], B: ["b"]}, '"a*b" has a "*" that is not its last character'),
        ({A: ["**"], B: ["b"]}, '"**" has a "*" that is not its last character'),
    ],
)
def test_a_mistake_in_a_list_is_named(roles: Roles, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^authentication\.oidc\.allowed_roles: ") as caught:
        check(roles)
    assert text in str(caught.value)


# ---- Kubernetes


def check_kubernetes(*entries: str, roles: Roles | None = None, proxy_roles: tuple[str, ...] = ()) -> None:
    """Check a configuration with Kubernetes beside the issuers of ``roles``. Raises ConfigError."""
    kubernetes = {"token_file": "/dev/null", "trust": "/dev/null", **({"allowed_roles": entries} if entries else {})}
    oidc = {"allowed_issuers": [*(roles or {})], "allowed_audiences": ["pulsar"], "kubernetes": kubernetes}
    oidc["allowed_roles"] = {issuer: entries for issuer, entries in (roles or {}).items() if entries}
    authentication = {"enabled": True, "oidc": oidc, "proxy_roles": proxy_roles}
    validate_config(msgspec.convert({"authentication": authentication}, Config))


def test_kubernetes_signs_for_service_accounts_and_others_for_none_of_them() -> None:
    check_kubernetes()
    check_kubernetes("system:serviceaccount:apps:*", "system:serviceaccount:pulsar:proxy", roles={A: ["app-*"]})
    for entry in ("admin", "*", "system:*", "system:serviceaccount"):
        with pytest.raises(ConfigError, match=r"^authentication\.oidc\.kubernetes\.allowed_roles: .*begin with"):
            check_kubernetes(entry)
    with pytest.raises(ConfigError, match=r"^authentication\.oidc\.kubernetes\.allowed_roles: .*last character"):
        check_kubernetes("system:serviceaccount:*:a")
    with pytest.raises(ConfigError, match=r"^authentication\.oidc\.allowed_roles: .*has no entry"):
        check_kubernetes(roles={A: []})
    for other in ("*", "system:*", "system:serviceaccount:apps:a"):
        with pytest.raises(ConfigError, match=r"allowed_roles: .* could sign the same role"):
            check_kubernetes(roles={A: [other]})


def test_a_proxy_role_of_a_service_account_is_named() -> None:
    account = "system:serviceaccount:pulsar:proxy"
    check_kubernetes("system:serviceaccount:*", account, proxy_roles=(f"token:{account}",))
    with pytest.raises(ConfigError, match=r"could be signed by .*kubernetes\.allowed_roles does not name"):
        check_kubernetes(proxy_roles=(f"token:{account}",))


# ---- proxies


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """The table of keys of our own."""
    (tmp_path / "secret").write_text("x")
    return {"token": {"secret_key": str(tmp_path / "secret")}}


@pytest.mark.parametrize("entry", ["front", "*:front", "token:front"])
def test_a_proxy_role_is_of_the_issuer_that_is_named_with_it(entry: str, keys: dict[str, Any]) -> None:
    check({A: ["front", "fr*"], B: ["partner-*"]}, proxy_roles=(entry,))
    check({A: ["front"]}, A, proxy_roles=(entry,), **keys)
    check({A: ["app-*"]}, A, proxy_roles=(entry,), **keys)
    check({}, A, proxy_roles=(entry,))


@pytest.mark.parametrize("entry", ["front", "*:front", "token:front"])
def test_a_proxy_role_that_an_issuer_could_sign_without_being_named_for_it_is_refused(
    entry: str, keys: dict[str, Any]
) -> None:
    for refused in (
        lambda: check({A: ["app-*"], B: ["fr*"]}, proxy_roles=(entry,)),
        lambda: check({A: ["*"]}, A, proxy_roles=(entry,)),
        lambda: check({}, A, proxy_roles=(entry,), **keys),  # beside keys that could sign it, too
    ):
        with pytest.raises(
            ConfigError, match=rf'^authentication\.proxy_roles: "{re.escape(entry)}" could be signed by'
        ):
            refused()


def test_a_proxy_role_by_another_method_is_no_matter_of_issuers(keys: dict[str, Any], tmp_path: Path) -> None:
    basic = {"file": str(tmp_path / "secret")}
    check({A: ["app-*"], B: ["fr*"]}, proxy_roles=("basic:front",), basic=basic, **keys)
