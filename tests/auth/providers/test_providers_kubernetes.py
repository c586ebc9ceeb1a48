"""Tokens of Kubernetes' service accounts: what is believed, what strangers make us ask, where the pod's token goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from fake_issuer import URL, FakeIssuer, issued, jwk
from fake_kubernetes import API, CLUSTER_ISSUER, DISCOVERY, JWKS, FakeKubernetes
from tokens import by_hand, rsa_key

from auth.kubernetes_api import TOKEN_BYTES_MAX, KubernetesApi, api_server_url
from auth.providers.oidc import OidcProvider
from auth.state import AuthenticationDenied, ClientContext, Identity
from proxy.common.errors import ConfigError
from proxy.config.types import KubernetesIssuer, OidcAuthentication

Clock = trio.testing.MockClock
CLIENT = ClientContext("10.0.0.1:1234")
ACCOUNT = "system:serviceaccount:apps:alice"
LIFETIME_S, RETRY_S = 300, 10
BOTH = [API + DISCOVERY, API + JWKS]
EKS = "https://oidc.eks.example/id/ABC"
EKS_ANSWERS = {
    f"{EKS}{DISCOVERY}": {"issuer": EKS, "jwks_uri": f"{EKS}/keys"},
    f"{EKS}/keys": {"keys": [jwk(rsa_key(1), "first")]},
}


@pytest.fixture
def kubernetes(tmp_path: Path) -> FakeKubernetes:
    return FakeKubernetes(tmp_path)


def table(kubernetes: FakeKubernetes, **more: Any) -> KubernetesIssuer:
    return KubernetesIssuer(
        **{"api_server": API, "token_file": str(kubernetes.token), "trust": str(kubernetes.trust), **more}
    )


def provider_of(kubernetes: FakeKubernetes, oidc: dict[str, Any] | None = None, **more: Any) -> OidcProvider:
    config: dict[str, Any] = {
        "allowed_audiences": ("pulsar",),
        "keys_lifetime_ms": LIFETIME_S * 1000,
        "keys_retry_interval_ms": RETRY_S * 1000,
        "kubernetes": table(kubernetes, **more),
        **(oidc or {}),
    }
    return OidcProvider(OidcAuthentication(**config), kubernetes.transport)


@pytest.fixture
def provider(kubernetes: FakeKubernetes) -> OidcProvider:
    return provider_of(kubernetes)


def account_token(key: Any = None, *, issuer: str = CLUSTER_ISSUER, **claims: Any) -> bytes:
    """A token as TokenRequest issues it."""
    bound = {"namespace": "apps", "serviceaccount": {"name": "alice", "uid": "1"}}
    claims = {"sub": ACCOUNT, "aud": ["pulsar"], "kubernetes.io": bound, "iat": int(time.time()), **claims}
    return issued(key, issuer=issuer, **claims)


async def role(provider: OidcProvider, data: bytes) -> str:
    return (await provider.identify(data, CLIENT)).role


async def denial(provider: OidcProvider, data: bytes) -> str:
    with structlog.testing.capture_logs() as entries, pytest.raises(AuthenticationDenied) as caught:
        await provider.identify(data, CLIENT)
    assert "pod-token" not in f"{caught.value}{entries}"
    return caught.value.reason


# ---- who is believed


async def test_a_service_account_is_its_subject_by_the_keys_of_the_api_server(
    provider: OidcProvider, kubernetes: FakeKubernetes
) -> None:
    end = int(time.time()) + 600
    assert await provider.identify(account_token(exp=end), CLIENT) == Identity(ACCOUNT, end * 1000)
    assert kubernetes.asked == BOTH, "and not the jwks_uri of the description"


async def test_a_trusted_issuer_is_asked_itself_and_without_the_pods_token(kubernetes: FakeKubernetes) -> None:
    """The API server of EKS names an issuer with other keys than its own."""
    kubernetes.issuer, kubernetes.elsewhere = EKS, EKS_ANSWERS
    provider = provider_of(kubernetes, discovery="trusted_issuer")
    assert await role(provider, account_token(rsa_key(1), issuer=EKS)) == ACCOUNT
    assert kubernetes.asked == [API + DISCOVERY, *EKS_ANSWERS]
    assert [bool(request.headers.get("authorization")) for request in kubernetes.requests] == [True, False, False]
    assert await denial(provider, account_token(issuer=EKS)) == "bad_signature"


async def test_a_trusted_issuer_that_describes_another_one(kubernetes: FakeKubernetes) -> None:
    kubernetes.issuer = EKS
    kubernetes.elsewhere = EKS_ANSWERS | {f"{EKS}{DISCOVERY}": {"issuer": URL, "jwks_uri": f"{EKS}/keys"}}
    provider = provider_of(kubernetes, discovery="trusted_issuer")
    assert await denial(provider, account_token(rsa_key(1), issuer=EKS)) == "issuer_unavailable"


async def test_a_trusted_issuer_without_tls_is_not_asked(kubernetes: FakeKubernetes) -> None:
    kubernetes.issuer = "http://issuer.example"
    provider = provider_of(kubernetes, discovery="trusted_issuer")
    assert await denial(provider, account_token(issuer=kubernetes.issuer)) == "issuer_unavailable"
    assert kubernetes.asked == [API + DISCOVERY]


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": ["https://kubernetes.default.svc"]}, "bad_audience"),
        ({"aud": ...}, "bad_audience"),
        ({"exp": 1}, "expired"),
        ({"exp": ...}, "missing_claim"),
        ({"sub": ...}, "no_role"),
        ({"sub": "admin"}, "role_not_allowed"),
        ({"sub": "system:node:a"}, "role_not_allowed"),
        ({"sub": [ACCOUNT, "admin"]}, "role_not_allowed"),
    ],
)
async def test_a_token_that_the_cluster_has_signed_for_something_else_is_denied(
    provider: OidcProvider, claims: dict[str, Any], reason: str
) -> None:
    assert await denial(provider, account_token(**claims)) == reason


async def test_only_listed_service_accounts_are_allowed(kubernetes: FakeKubernetes) -> None:
    provider = provider_of(kubernetes, allowed_roles=("system:serviceaccount:apps:*",))
    assert await role(provider, account_token()) == ACCOUNT
    assert await denial(provider, account_token(sub="system:serviceaccount:other:alice")) == "role_not_allowed"


async def test_an_allowed_issuer_and_kubernetes_sign_for_themselves_alone(kubernetes: FakeKubernetes) -> None:
    other = FakeIssuer(keys=[jwk(rsa_key(1), "first")])
    kubernetes.elsewhere = {
        f"{URL}{DISCOVERY}": {"issuer": URL, "jwks_uri": f"{URL}/keys"},
        f"{URL}/keys": {"keys": other.keys},
    }
    oidc = {"allowed_issuers": (URL,), "allowed_roles": {URL: ("al*",)}, "role_claim": "azp"}
    provider = provider_of(kubernetes, oidc)
    assert await role(provider, issued(rsa_key(1), azp="alice")) == "alice"
    assert not any(url.startswith(API) for url in kubernetes.asked), "an allowed issuer is asked itself"
    assert await role(provider, account_token(azp="admin")) == ACCOUNT, "Kubernetes' roles are its subjects"
    assert await denial(provider, account_token(rsa_key(1))) == "bad_signature"
    assert await denial(provider, issued(rsa_key(1), azp=ACCOUNT)) == "role_not_allowed"


# ---- what strangers can make us ask


@pytest.mark.parametrize("discovery", ["public_keys", "trusted_issuer"])
async def test_an_issuer_that_only_a_token_names_causes_no_request_of_its_own(
    kubernetes: FakeKubernetes, discovery: str, autojump_clock: Clock
) -> None:
    kubernetes.issuer, kubernetes.elsewhere = EKS, EKS_ANSWERS
    provider = provider_of(kubernetes, discovery=discovery)
    for number in range(20):
        name = f"https://attacker.example/{number}"
        assert await denial(provider, account_token(issuer=name)) == "unknown_issuer"
        await trio.sleep(RETRY_S)
    assert {request.url.host for request in kubernetes.requests} <= {"10.96.0.1", "oidc.eks.example"}
    assert len(kubernetes.requests) <= 3, "all within the lifetime of one answer"


@pytest.mark.parametrize("name", [None, 5, "", [CLUSTER_ISSUER], {"a": 1}])
async def test_a_token_without_an_issuer_causes_no_request(
    provider: OidcProvider, kubernetes: FakeKubernetes, name: Any
) -> None:
    claims = {"iss": name, "sub": ACCOUNT, "aud": "pulsar", "exp": int(time.time()) + 60}
    assert await denial(provider, by_hand({"alg": "RS256", "kid": "first"}, claims, b"")) == "unknown_issuer"
    assert not kubernetes.asked


async def test_a_token_of_a_shared_secret_causes_no_request(provider: OidcProvider, kubernetes: FakeKubernetes) -> None:
    claims = {"iss": CLUSTER_ISSUER, "sub": ACCOUNT, "aud": "pulsar", "exp": int(time.time()) + 60}
    forged = by_hand({"alg": "HS256", "kid": "first"}, claims, b"s" * 32)
    assert await denial(provider, forged) == "bad_algorithm"
    assert not kubernetes.asked


async def test_unknown_keys_cause_requests_at_a_bounded_rate(
    provider: OidcProvider, kubernetes: FakeKubernetes, autojump_clock: Clock
) -> None:
    await role(provider, account_token())
    await trio.sleep(RETRY_S)
    for number in range(100):
        assert await denial(provider, account_token(name=f"invented-{number}")) == "unknown_key"
    assert kubernetes.asked == BOTH * 2


async def test_an_api_server_that_is_down_is_asked_at_a_bounded_rate(
    provider: OidcProvider, kubernetes: FakeKubernetes, autojump_clock: Clock
) -> None:
    kubernetes.down = True
    for _ in range(100):
        assert await denial(provider, account_token()) == "issuer_unavailable"
    assert len(kubernetes.asked) == 1
    kubernetes.down = False
    await trio.sleep(RETRY_S)
    assert await role(provider, account_token()) == ACCOUNT


async def test_an_issuer_that_the_api_server_no_longer_names_is_denied(
    provider: OidcProvider, kubernetes: FakeKubernetes, autojump_clock: Clock
) -> None:
    """Also where an unknown key causes the request that tells."""
    await role(provider, account_token())
    kubernetes.issuer, kubernetes.keys = EKS, [jwk(rsa_key(1), "second")]
    await trio.sleep(RETRY_S)
    assert await denial(provider, issued(rsa_key(1), name="second", issuer=CLUSTER_ISSUER)) == "unknown_issuer"
    assert await role(provider, issued(rsa_key(1), name="second", issuer=EKS, sub=ACCOUNT)) == ACCOUNT


# ---- the pod's token


async def test_the_pods_token_is_read_again(
    provider: OidcProvider, kubernetes: FakeKubernetes, autojump_clock: Clock
) -> None:
    """Kubernetes replaces it before it expires."""
    await role(provider, account_token())
    kubernetes.accounts = {"pod-token-2": True}
    kubernetes.token.write_text("pod-token-2")
    await trio.sleep(LIFETIME_S)
    assert await role(provider, account_token()) == ACCOUNT
    assert kubernetes.requests[-1].headers["authorization"] == "Bearer pod-token-2"


@pytest.mark.parametrize("accounts", [{}, {"pod-token-1": False}])
async def test_a_pod_without_the_right(
    provider: OidcProvider, kubernetes: FakeKubernetes, accounts: dict[str, bool]
) -> None:
    kubernetes.accounts = accounts
    assert await denial(provider, account_token()) == "issuer_unavailable"


@pytest.mark.parametrize("target", ["https://elsewhere.example/", JWKS])
async def test_no_redirect_of_the_api_server_is_followed(
    provider: OidcProvider, kubernetes: FakeKubernetes, target: str
) -> None:
    kubernetes.redirect = target
    assert await denial(provider, account_token()) == "issuer_unavailable"
    assert kubernetes.asked == [API + DISCOVERY]


@pytest.mark.parametrize("content", ["", "a b", "a\r\nx: y", "ä", "x" * (TOKEN_BYTES_MAX + 1)])
def test_a_file_without_a_token_is_refused(kubernetes: FakeKubernetes, content: str) -> None:
    kubernetes.token.write_text(content)
    with pytest.raises(ConfigError, match=r"^authentication\.oidc\.kubernetes\.token_file: .*holds no token"):
        KubernetesApi(table(kubernetes), 1000)


def test_without_a_token_or_the_clusters_authority_there_is_no_provider(kubernetes: FakeKubernetes) -> None:
    for key in ("token_file", "trust"):
        with pytest.raises(ConfigError, match=rf"^authentication\.oidc\.kubernetes\.{key}: .*/nothing"):
            provider_of(kubernetes, **{key: "/nothing"})


async def test_the_pods_token_goes_nowhere_without_tls(kubernetes: FakeKubernetes) -> None:
    plain = provider_of(kubernetes, api_server="http://10.96.0.1")
    assert await denial(plain, account_token()) == "issuer_unavailable"
    assert not kubernetes.asked


@pytest.mark.parametrize(
    ("configured", "environment", "url"),
    [
        ("", {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.96.0.1:6443"),
        ("", {"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443"),
        ("https://api.example/", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://api.example"),
    ],
)
def test_where_the_api_server_is(configured: str, environment: dict[str, str], url: str) -> None:
    assert api_server_url(configured, environment) == url


def test_outside_of_a_pod_the_api_server_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"^authentication\.oidc\.kubernetes\.api_server: is needed"):
        api_server_url("", {})
