"""Tokens of OpenID Connect issuers: what is believed, for every rule a token that only this rule keeps out, and what
strangers can make us ask.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import jwt
import pytest
import structlog.testing
import trio
import trio.testing
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fake_issuer import URL, FakeIssuer, issued, jwk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokens import by_hand, ec_key, ed25519_key, rsa_key, segment, token

from auth.jwt_rules import NEVER_S, TOKEN_BYTES_MAX
from auth.providers.oidc import KEYS_MAX, OidcProvider
from auth.providers.token import TokenProvider
from auth.registry import ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, ClientContext, Identity, OneStageAuthState
from proxy.common.errors import ConfigError
from proxy.config.types import Authentication, OidcAuthentication, TokenAuthentication

Clock = trio.testing.MockClock
Make = Callable[..., OidcProvider]
CLIENT = ClientContext("10.0.0.1:1234")
LIFETIME_S, RETRY_S, TIMEOUT_S = 300, 10, 5
OTHER = "https://other.example"


def provider_of(issuer: FakeIssuer, **settings: Any) -> OidcProvider:
    config: dict[str, Any] = {
        "allowed_issuers": (issuer.url,),
        "allowed_audiences": ("pulsar",),
        "keys_lifetime_ms": LIFETIME_S * 1000,
        "keys_retry_interval_ms": RETRY_S * 1000,
        "request_timeout_ms": TIMEOUT_S * 1000,
        **settings,
    }
    return OidcProvider(OidcAuthentication(**config), issuer.transport)


@pytest.fixture
def issuer() -> FakeIssuer:
    return FakeIssuer()


@pytest.fixture
def make(issuer: FakeIssuer) -> Make:
    return lambda **settings: provider_of(issuer, **settings)


@pytest.fixture
def provider(make: Make) -> OidcProvider:
    return make()


async def role(provider: OidcProvider, data: bytes) -> str:
    return (await provider.identify(data, CLIENT)).role


async def denial(provider: OidcProvider, data: bytes) -> str:
    """Why a token is denied. Nothing of it may stand in the text or the log."""
    with structlog.testing.capture_logs() as entries, pytest.raises(AuthenticationDenied) as caught:
        await provider.identify(data, CLIENT)
    told = f"{caught.value}{entries}{caught.value.__cause__}"
    for part in [data, *data.split(b".")]:
        assert len(part) <= 8 or part.decode("latin-1") not in told
    assert len(str(caught.value)) <= 500
    assert str(caught.value).isprintable()
    return caught.value.reason


# ---- verification


async def test_a_token_of_the_issuer(provider: OidcProvider, issuer: FakeIssuer) -> None:
    end = int(time.time()) + 600
    assert await provider.identify(issued(exp=end), CLIENT) == Identity("alice", end * 1000)
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


@pytest.mark.conforms("pip-30.35")
async def test_a_state_for_a_client(provider: OidcProvider) -> None:
    assert provider.method == "token"
    state = provider.new_auth_state(CLIENT)
    assert isinstance(state, OneStageAuthState)
    assert await state.authenticate(issued()) is None
    assert state.get_auth_role() == "alice"


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
async def test_an_rsa_key(provider: OidcProvider, algorithm: str) -> None:
    assert await role(provider, issued(rsa_key(), algorithm)) == "alice"


CURVES = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}


@pytest.mark.parametrize("algorithm", CURVES)
async def test_an_ec_key(issuer: FakeIssuer, provider: OidcProvider, algorithm: str) -> None:
    key = ec_key(CURVES[algorithm])
    issuer.keys = [jwk(key, "first")]
    assert await role(provider, issued(key, algorithm)) == "alice"


async def test_the_key_of_the_tokens_name(issuer: FakeIssuer, provider: OidcProvider) -> None:
    issuer.keys = [jwk(rsa_key(1), "second"), jwk(rsa_key(), "first")]
    assert await role(provider, issued()) == "alice"
    assert await role(provider, issued(rsa_key(1), name="second")) == "alice"
    assert await denial(provider, issued(rsa_key(1), name="first")) == "bad_signature"


async def test_several_kinds_of_keys_under_one_name(issuer: FakeIssuer, provider: OidcProvider) -> None:
    """RFC 7517, section 4.5."""
    issuer.keys = [jwk(rsa_key(), "first"), jwk(ec_key(), "first")]
    assert await role(provider, issued()) == "alice"
    assert await role(provider, issued(ec_key(), "ES256")) == "alice"


@pytest.mark.parametrize("key_name", [None, "first"])
async def test_a_sole_key_needs_no_name(issuer: FakeIssuer, provider: OidcProvider, key_name: str | None) -> None:
    issuer.keys = [jwk(rsa_key(), key_name), jwk(rsa_key(1), "for encryption", use="enc")]
    assert await role(provider, issued(name=None)) == "alice"


async def test_a_token_without_key_id_is_denied_where_the_issuer_has_several_keys(
    issuer: FakeIssuer, provider: OidcProvider
) -> None:
    issuer.keys = [jwk(rsa_key(), "first"), jwk(rsa_key(1), "second")]
    assert await denial(provider, issued(name=None)) == "unknown_key"
    assert issuer.fetches == 1


@pytest.mark.parametrize("url", ["https://issuer.example/tenant/a", "https://issuer.example/"])
async def test_issuers_below_a_path_and_with_a_slash_at_the_end(url: str) -> None:
    """OpenID Connect Discovery 1.0, section 4.1: the slash goes; in the names it stays."""
    issuer = FakeIssuer(url)
    assert await role(provider_of(issuer), issued(issuer=url)) == "alice"
    assert issuer.asked[0] == f"{httpx.URL(url).path.rstrip('/')}/.well-known/openid-configuration"


async def test_the_role_in_another_claim(make: Make) -> None:
    provider = make(role_claim="groups")
    assert await role(provider, issued(groups=["bob", "carol"])) == "bob"
    assert await denial(provider, issued()) == "no_role"


# ---- issuers


@pytest.mark.parametrize(
    "name",
    [
        OTHER,
        f"{URL}/",
        f"{URL}/x",
        URL.upper(),
        URL.replace("https", "http"),
        f"{URL}.evil.example",
        f"{URL}@evil.example",
        f" {URL}",
        "",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        ...,
    ],
)
async def test_an_issuer_that_only_a_token_names_is_not_asked(
    provider: OidcProvider, issuer: FakeIssuer, name: Any
) -> None:
    assert await denial(provider, issued(issuer=name)) == "unknown_issuer"
    assert not issuer.asked


@pytest.mark.parametrize("name", [None, 5, True, [URL], {"a": URL}, {}])
async def test_an_issuer_that_is_no_name(provider: OidcProvider, issuer: FakeIssuer, name: Any) -> None:
    claims = {"iss": name, "sub": "alice", "aud": "pulsar", "exp": int(time.time()) + 60}
    assert await denial(provider, by_hand({"alg": "RS256", "kid": "first"}, claims, b"")) == "unknown_issuer"
    assert not issuer.asked


@pytest.mark.parametrize("header", ["jku", "x5u", "jwk", "x5c", "iss"])
async def test_nothing_else_in_a_token_leads_anywhere(provider: OidcProvider, issuer: FakeIssuer, header: str) -> None:
    own = jwk(rsa_key(1), "first")
    value = {"jku": f"{OTHER}/keys", "x5u": f"{OTHER}/keys", "jwk": own, "x5c": ["AAAA"], "iss": URL}[header]
    forged = jwt_with({header: value}, rsa_key(1))
    assert await denial(provider, forged) == "bad_signature"
    assert {request.url.host for request in issuer.requests} == {"issuer.example"}
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


def jwt_with(headers: dict[str, Any], key: Any, **claims: Any) -> bytes:
    written = {"iss": URL, "sub": "alice", "aud": "pulsar", "exp": int(time.time()) + 600, **claims}
    return jwt.encode(written, key, "RS256", headers={"kid": "first", **headers}).encode()


@pytest.mark.parametrize("name", [OTHER, f"{URL}/", "", URL.upper()])
async def test_a_description_of_another_issuer(provider: OidcProvider, issuer: FakeIssuer, name: str) -> None:
    """OpenID Connect Discovery 1.0, section 4.3."""
    issuer.metadata = {"issuer": name}
    assert await denial(provider, issued()) == "issuer_unavailable"
    assert "/keys" not in issuer.asked


async def test_each_issuer_has_keys_of_its_own() -> None:
    """Who may sign for one issuer may not for another."""
    one, two = FakeIssuer(URL), FakeIssuer(f"{OTHER}/b", keys=[jwk(rsa_key(1), "first")])
    two.metadata = {"jwks_uri": f"{OTHER}/keys"}

    async def answer(request: httpx.Request) -> httpx.Response:
        return await (one if request.url.host == "issuer.example" else two)._answer(request)

    config = OidcAuthentication(allowed_issuers=(one.url, two.url), allowed_audiences=("pulsar",))
    provider = OidcProvider(config, httpx.MockTransport(answer))
    assert await role(provider, issued()) == "alice"
    assert await role(provider, issued(rsa_key(1), issuer=two.url)) == "alice"
    assert await denial(provider, issued(rsa_key(1))) == "bad_signature"
    assert await denial(provider, issued(issuer=two.url)) == "bad_signature"


async def test_keys_without_tls(issuer: FakeIssuer, provider: OidcProvider) -> None:
    issuer.metadata = {"jwks_uri": "http://issuer.example/keys"}
    assert await denial(provider, issued()) == "issuer_unavailable"
    assert "/keys" not in issuer.asked


async def test_an_issuer_without_tls() -> None:
    issuer = FakeIssuer("http://issuer.example", metadata={"jwks_uri": "http://issuer.example/keys"})
    assert await denial(provider_of(issuer), issued(issuer=issuer.url)) == "issuer_unavailable"
    assert not issuer.asked
    assert await role(provider_of(issuer, require_https=False), issued(issuer=issuer.url)) == "alice"


# ---- algorithms


def claims(**more: Any) -> dict[str, Any]:
    return {"iss": URL, "sub": "admin", "aud": "pulsar", "exp": int(time.time()) + 600, **more}


@pytest.mark.parametrize("kind", ["rsa", "ec"])
@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
async def test_a_public_key_taken_for_a_secret(
    issuer: FakeIssuer, provider: OidcProvider, kind: str, form: str
) -> None:
    """Algorithm confusion: the issuer's key is public, so anyone who signs with it has proved nothing."""
    key = rsa_key() if kind == "rsa" else ec_key()
    issuer.keys = [jwk(key, "first")]
    secret = {
        "pem": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "der": key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        "jwk": json.dumps(issuer.keys[0]).encode(),
    }[form]
    assert await denial(provider, by_hand({"alg": "HS256", "kid": "first"}, claims(), secret)) == "bad_algorithm"


async def test_a_shared_secret_among_the_keys(issuer: FakeIssuer, provider: OidcProvider) -> None:
    """What a set of keys that is public calls a secret is none."""
    secret = b"s" * 64
    issuer.keys = [{"kty": "oct", "k": segment(secret).decode(), "kid": "first", "alg": "HS256"}]
    assert await denial(provider, by_hand({"alg": "HS256", "kid": "first"}, claims(), secret)) == "bad_algorithm"


@pytest.mark.parametrize("name", ["none", "None", "NONE", "", "HS256", "EdDSA", "ES256K", None, 5, ["RS256"], {}])
async def test_other_algorithms(provider: OidcProvider, issuer: FakeIssuer, name: Any) -> None:
    for secret in (None, b"", b"s" * 32):
        forged = by_hand({"alg": name, "kid": "first"}, claims(), secret)
        assert await denial(provider, forged) == "bad_algorithm"
    assert not issuer.asked


async def test_the_algorithm_of_another_kind_of_key(provider: OidcProvider) -> None:
    assert await denial(provider, issued(ec_key(), "ES256")) == "bad_algorithm"


async def test_a_key_for_one_algorithm_only(issuer: FakeIssuer, provider: OidcProvider) -> None:
    issuer.keys = [jwk(rsa_key(), "first", alg="PS256")]
    assert await role(provider, issued(rsa_key(), "PS256")) == "alice"
    assert await denial(provider, issued(rsa_key(), "RS256")) == "bad_algorithm"


async def test_another_key(provider: OidcProvider) -> None:
    assert await denial(provider, issued(rsa_key(1))) == "bad_signature"


async def test_claims_under_another_tokens_signature(provider: OidcProvider) -> None:
    header, _, signature = issued().split(b".")
    forged = b".".join((header, segment(json.dumps(claims()).encode()), signature))
    assert await denial(provider, forged) == "bad_signature"
    assert await denial(provider, b".".join((header, segment(json.dumps(claims()).encode()), b""))) == "bad_signature"


# ---- claims


@pytest.mark.parametrize("audience", ["pulsar", ["pulsar"], ["x", "pulsar"], "second", ["pulsar", 5, None]])
async def test_a_token_meant_for_us(make: Make, audience: Any) -> None:
    assert await role(make(allowed_audiences=("pulsar", "second")), issued(aud=audience)) == "alice"


@pytest.mark.parametrize(
    "audience",
    [..., None, "", "other", "pulsar2", "Pulsar", "*", "other pulsar", [], ["x"], [["pulsar"]], {"pulsar": 1}],
)
async def test_a_token_meant_for_others(provider: OidcProvider, audience: Any) -> None:
    assert await denial(provider, issued(aud=audience)) == "bad_audience"


@pytest.mark.parametrize("end", [..., None])
async def test_a_token_without_an_end(provider: OidcProvider, end: Any) -> None:
    assert await denial(provider, issued(exp=end)) == "missing_claim"


async def test_an_expired_token(provider: OidcProvider) -> None:
    assert await denial(provider, issued(exp=int(time.time()) - 1)) == "expired"


async def test_a_token_that_begins_later(provider: OidcProvider) -> None:
    assert await denial(provider, issued(nbf=int(time.time()) + 100)) == "not_yet_valid"
    assert await role(provider, issued(nbf=int(time.time()) - 100, iat=int(time.time()) + 100)) == "alice"


async def test_clock_skew(make: Make) -> None:
    now = int(time.time())
    provider = make(allowed_clock_skew_ms=60_000)
    assert await provider.identify(issued(exp=now - 30), CLIENT) == Identity("alice", (now + 30) * 1000)
    assert await role(provider, issued(nbf=now + 30)) == "alice"
    assert await denial(provider, issued(exp=now - 90)) == "expired"
    assert await denial(provider, issued(nbf=now + 90)) == "not_yet_valid"


async def test_an_end_beyond_all_times(provider: OidcProvider) -> None:
    assert await provider.identify(issued(exp=NEVER_S + 1), CLIENT) == Identity("alice")


@pytest.mark.parametrize("claim", ["", " ", None, 5, [], [5], {}])
async def test_a_token_without_a_role(make: Make, claim: Any) -> None:
    assert await denial(make(role_claim="groups"), issued(groups=claim)) == "no_role"


# ---- bytes


@pytest.mark.parametrize("data", [b".", b"..", b"a.b.c", b"\xff\xfe", b"x" * TOKEN_BYTES_MAX, bytes(1000)])
async def test_bytes_that_are_no_token(provider: OidcProvider, issuer: FakeIssuer, data: bytes) -> None:
    assert await denial(provider, data) == "malformed"
    assert not issuer.asked


async def test_no_token_and_too_much_of_one(provider: OidcProvider, issuer: FakeIssuer) -> None:
    assert await denial(provider, b"") == "missing"
    assert await role(provider, issued(padding="x" * 40_000)) == "alice"
    assert await denial(provider, issued(padding="x" * 50_000)) == "malformed"


@pytest.mark.parametrize("name", [5, None, ["first"], {}])
async def test_a_name_of_a_key_that_is_none(provider: OidcProvider, issuer: FakeIssuer, name: Any) -> None:
    assert await denial(provider, by_hand({"alg": "RS256", "kid": name}, claims(), b"")) == "invalid"
    assert not issuer.asked


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SERVED = JSON.filter(lambda value: "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value))


@given(st.binary(max_size=100), JSON, JSON)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_whatever_a_stranger_sends_is_denied(
    provider: OidcProvider, garbage: bytes, value: Any, other: Any
) -> None:
    for header in (value, {"alg": "RS256", "kid": value}, {"alg": value, "kid": "first"}):
        for written in (other, claims(iss=other), claims(exp=other)):
            with pytest.raises(AuthenticationDenied):
                await provider.identify(by_hand(header, written, garbage), CLIENT)


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("kty", "kid", "alg", "use", "n", "e"), SERVED))))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_whatever_stands_beside_a_good_key_it_is_found(entries: list[Any]) -> None:
    issuer = FakeIssuer()
    beside = [entry for entry in entries if entry.get("kid") != "first"][: KEYS_MAX - 1]
    issuer.keys = [*beside, *issuer.keys]
    assert await role(provider_of(issuer), issued()) == "alice"


# ---- sets of keys


@pytest.mark.parametrize(
    "entry",
    [
        jwk(rsa_key(), "first", use="enc"),
        jwk(rsa_key(), "first", use=5),
        jwk(rsa_key(), "first", key_ops=["encrypt"]),
        jwk(rsa_key(), "first", key_ops=5),
        jwk(rsa_key(), "first", alg="RSA-OAEP"),
        jwk(rsa_key(), "first", alg="HS256"),
        jwk(rsa_key(), "first", alg="ES256"),
        jwk(rsa_key(), "first", alg=5),
        jwk(rsa_key(), "first", kty="oct", k="c2VjcmV0"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "first"},
        {"kty": "OKP", "crv": "X25519", "x": "AAAA", "kid": "first"},
        {"kty": "RSA", "kid": "first"},
        {"kty": "RSA", "kid": "first", "n": "AQ", "e": "AQ"},
        {"kty": "EC", "kid": "first", "crv": "P-256", "x": "AA", "y": "AA"},
        {"kid": "first"},
        jwk(rsa_key(), "first", n=None),
        5,
        None,
        "key",
        [],
    ],
    ids=lambda entry: str(
        {**entry, "n": ...} if isinstance(entry, dict) and "n" in entry else entry
    ),  # a random number
)
async def test_entries_that_are_no_keys_for_signatures(issuer: FakeIssuer, provider: OidcProvider, entry: Any) -> None:
    issuer.keys = [entry, jwk(rsa_key(1), "second")]
    assert await role(provider, issued(rsa_key(1), name="second")) == "alice"
    assert await denial(provider, issued()) == "unknown_key"


@pytest.mark.parametrize("more", [{"use": "sig"}, {"key_ops": ["verify"]}, {"alg": "RS256"}, {"x5c": ["?"], "new": {}}])
async def test_a_key_with_permitted_or_unknown_attributes_is_used(
    issuer: FakeIssuer, provider: OidcProvider, more: dict[str, Any]
) -> None:
    issuer.keys = [jwk(rsa_key(), "first", **more)]
    assert await role(provider, issued()) == "alice"


async def test_an_rsa_key_that_can_be_factored(issuer: FakeIssuer, provider: OidcProvider) -> None:
    """RFC 7518, section 3.3: at least 2048 bits."""
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    issuer.keys = [jwk(weak, "first"), jwk(rsa_key(), "second")]
    assert await denial(provider, weak_token(weak)) == "unknown_key"


def weak_token(key: rsa.RSAPrivateKey) -> bytes:
    written = by_hand({"alg": "RS256", "kid": "first"}, claims(), None).rstrip(b".")
    return written + b"." + segment(key.sign(written, padding.PKCS1v15(), hashes.SHA256()))


async def test_a_curve_without_an_algorithm(issuer: FakeIssuer, provider: OidcProvider) -> None:
    key = ec.generate_private_key(ec.SECP256K1())
    issuer.keys = [jwk(key, "first")]
    assert await denial(provider, issued(key, "ES256K")) == "bad_algorithm"
    assert await denial(provider, by_hand({"alg": "ES256", "kid": "first"}, claims(), b"")) == "unknown_key"


async def test_a_private_key_in_the_set(issuer: FakeIssuer, provider: OidcProvider) -> None:
    """An issuer that publishes it has lost it: any reader can sign tokens."""
    issuer.keys = [{**jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key(), as_dict=True), "kid": "first"}]
    issuer.keys[0].pop("key_ops")
    assert await denial(provider, issued()) == "unknown_key"


async def test_an_ed25519_key(issuer: FakeIssuer, provider: OidcProvider) -> None:
    issuer.keys = [jwt.algorithms.OKPAlgorithm.to_jwk(ed25519_key().public_key(), as_dict=True)]
    assert await denial(provider, issued(ed25519_key(), "EdDSA")) == "bad_algorithm"
    assert await denial(provider, issued(name=None)) == "unknown_key"


async def test_an_issuer_without_keys(issuer: FakeIssuer, provider: OidcProvider) -> None:
    issuer.keys = []
    with structlog.testing.capture_logs() as entries:
        assert await denial(provider, issued()) == "unknown_key"
        await provider._issuers[URL]._fetch()
    assert [entry["event"] for entry in entries] == ["an issuer has no usable key"]


@pytest.mark.parametrize(("count", "reason"), [(KEYS_MAX, "bad_signature"), (KEYS_MAX + 1, "issuer_unavailable")])
async def test_more_keys_than_any_issuer_has(
    issuer: FakeIssuer, provider: OidcProvider, count: int, reason: str
) -> None:
    issuer.keys = [jwk(rsa_key(), "first")] * count
    assert await denial(provider, issued(rsa_key(1))) == reason


@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/keys"])
@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, content=b"rubbish"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"keys": "x", "issuer": URL}),
        httpx.Response(200, json={"keys": {}, "jwks_uri": "https://issuer.example/keys"}),
        httpx.Response(404),
        httpx.Response(500, json={"issuer": URL, "jwks_uri": f"{URL}/keys", "keys": [jwk(rsa_key(), "first")]}),
        httpx.Response(302, headers={"location": f"{URL}/elsewhere"}),
        httpx.Response(200, content=b" " * (2 * 1024 * 1024)),
    ],
    ids=["rubbish", "list", "no set", "no url", "404", "500", "redirect", "oversized"],
)
async def test_answers_that_are_of_no_use(
    issuer: FakeIssuer, provider: OidcProvider, path: str, answer: httpx.Response
) -> None:
    issuer.answers[path] = lambda: answer
    assert await denial(provider, issued()) == "issuer_unavailable"
    assert "/elsewhere" not in issuer.asked


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "//issuer.example/keys", "keys", "", f"https://u:p@{URL[8:]}/keys"]
)
async def test_keys_that_are_nowhere(issuer: FakeIssuer, provider: OidcProvider, url: str) -> None:
    issuer.metadata = {"jwks_uri": url}
    assert await denial(provider, issued()) == "issuer_unavailable"
    assert "/keys" not in issuer.asked


# ---- roles of issuers


@pytest.mark.parametrize("claimed", ["alice", "app-7", ["alice"], ["app-7", "alice"]])
async def test_a_role_of_the_issuers_list_is_accepted(make: Make, claimed: Any) -> None:
    provider = make(allowed_roles={URL: ("alice", "app-*"), OTHER: ("admin",)})
    assert await role(provider, issued(sub=claimed)) == (claimed if isinstance(claimed, str) else claimed[0])


@pytest.mark.parametrize(
    "claimed", ["admin", "Alice", "alice ", " alice", "app", "\x1bapp-7", "a" * 5000, ["alice", "admin"], ["alice", 5]]
)
async def test_a_role_outside_of_the_issuers_list_is_denied(make: Make, claimed: Any) -> None:
    """Of a list, all count: a broker that takes several roles reads them from the same token."""
    provider = make(allowed_roles={URL: ("alice", "app-*"), OTHER: ("admin",)})
    assert await denial(provider, issued(sub=claimed)) == "role_not_allowed"


async def test_a_role_is_compared_once_the_token_is_verified(make: Make) -> None:
    provider = make(allowed_roles={URL: ("alice",)})
    assert await denial(provider, issued(rsa_key(1), sub="admin")) == "bad_signature"
    assert await denial(provider, issued(sub=...)) == "no_role"


async def test_a_role_outside_of_the_list_is_the_reason_beside_keys_of_our_own(make: Make, secret_file: str) -> None:
    own = TokenProvider(TokenAuthentication(secret_key=secret_file))
    registry = ProviderRegistry(Authentication(), lambda _: [own, make(allowed_roles={URL: ("alice",)})])
    with pytest.raises(AuthenticationDenied) as caught:
        await registry.new_auth_state("token", CLIENT).authenticate(issued(sub="admin"))
    assert caught.value.reason == "role_not_allowed"


# ---- when the issuer is asked


async def test_keys_are_asked_for_once_in_their_lifetime(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    for _ in range(10):
        await role(provider, issued())
        await trio.sleep(LIFETIME_S / 10)
    assert issuer.fetches == 1
    await role(provider, issued())
    assert issuer.fetches == 2


async def test_many_clients_at_once_cost_one_request(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    issuer.delay_s = 1
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(role, provider, issued())
    assert issuer.fetches == 1


async def test_a_cancelled_client_leaves_the_others_served(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    issuer.delay_s = 1
    found: list[str] = []

    async def stay() -> None:
        found.append(await role(provider, issued()))

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as leaving:
                leaving.start_soon(role, provider, issued())
                await trio.sleep(0.1)
                nursery.start_soon(stay)
                await trio.sleep_forever()
    assert found == ["alice"]
    assert (issuer.fetches, issuer.answered) == (1, 2)


async def test_a_new_key_is_found_as_soon_as_a_token_names_it(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    issuer.keys = [jwk(rsa_key(1), "second")]
    await trio.sleep(RETRY_S)
    assert await role(provider, issued(rsa_key(1), name="second")) == "alice"
    assert await denial(provider, issued()) == "unknown_key"  # the issuer has dropped it


async def test_a_dropped_key_is_gone_after_its_lifetime(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    issuer.keys = [jwk(rsa_key(1), "second")]
    await trio.sleep(LIFETIME_S)
    assert await denial(provider, issued()) == "unknown_key"


async def test_invented_keys_do_not_hammer_the_issuer(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    for number in range(600):
        assert await denial(provider, issued(name=f"invented-{number}")) == "unknown_key"
        await trio.sleep(0.1)
    assert issuer.fetches <= 1 + 60 / RETRY_S + 1
    assert issuer.fetches >= 60 / RETRY_S


async def test_many_invented_keys_at_once_cost_one_request(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    issuer.delay_s = 1
    await trio.sleep(RETRY_S)
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(denial, provider, issued(name=f"invented-{number}"))
    assert issuer.fetches == 2


async def test_a_stranger_with_an_invented_key_delays_no_other_client(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    issuer.delay_s = 1
    await trio.sleep(RETRY_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(denial, provider, issued(name="invented"))
        await trio.sleep(0.5)
        before = trio.current_time()
        assert await role(provider, issued()) == "alice"
        assert trio.current_time() == before


# ---- an issuer that is down


async def test_keys_are_used_for_two_lifetimes_where_the_issuer_is_down(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    await role(provider, issued())
    issuer.down = True
    await trio.sleep(2 * LIFETIME_S - 1)
    assert await role(provider, issued()) == "alice"
    await trio.sleep(1)
    assert await denial(provider, issued()) == "issuer_unavailable"
    issuer.down = False
    await trio.sleep(RETRY_S)
    assert await role(provider, issued()) == "alice"


async def test_an_issuer_that_was_never_there(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    issuer.down = True
    for _ in range(100):
        assert await denial(provider, issued()) == "issuer_unavailable"
    assert issuer.fetches == 1


async def test_a_key_that_cannot_be_looked_for(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    """It may be the issuer's: that it is unknown would be said too soon."""
    await role(provider, issued())
    issuer.down = True
    await trio.sleep(RETRY_S)
    assert await denial(provider, issued(name="second")) == "issuer_unavailable"
    assert await role(provider, issued()) == "alice"


async def test_a_slow_issuer(issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock) -> None:
    issuer.delay_s = 60
    assert await denial(provider, issued()) == "issuer_unavailable"
    assert trio.current_time() == pytest.approx(TIMEOUT_S)


async def test_repeated_failures_to_fetch_keys_are_logged_once(
    issuer: FakeIssuer, provider: OidcProvider, autojump_clock: Clock
) -> None:
    issuer.down = True
    with structlog.testing.capture_logs() as entries:
        for _ in range(10):
            with pytest.raises(AuthenticationDenied):
                await provider.identify(issued(), CLIENT)
    [entry] = entries
    assert entry["what"] == f"keys of {URL}"
    assert entry["reason"].endswith("nobody there")


# ---- configuration


def test_authorities_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"^authentication.oidc.trust: "):
        OidcProvider(OidcAuthentication(allowed_issuers=(URL,), allowed_audiences=("a",), trust="/missing"))


async def test_beside_tokens_of_our_own_keys(issuer: FakeIssuer, provider: OidcProvider, secret_file: str) -> None:
    own = TokenAuthentication(secret_key=secret_file)
    oidc = OidcAuthentication(allowed_issuers=(URL,), allowed_audiences=("pulsar",))
    made = list(configured_providers(Authentication(token=own, oidc=oidc)))
    assert isinstance(made[1], OidcProvider)
    registry = ProviderRegistry(Authentication(), lambda _: [made[0], provider])
    for data, name in ((token(sub="bob"), "bob"), (issued(), "alice")):
        state = registry.new_auth_state("token", CLIENT)
        assert await state.authenticate(data) is None
        assert state.get_auth_role() == name
    with pytest.raises(AuthenticationDenied):
        await registry.new_auth_state("token", CLIENT).authenticate(issued(rsa_key(1)))
