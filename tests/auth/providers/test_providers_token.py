"""Tokens: what is believed, and for every rule a token that only this rule keeps out."""

import json
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog.testing
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jwt.warnings import InsecureKeyLengthWarning
from tokens import (
    OTHER_SECRET,
    SECRET,
    PrivateKey,
    by_hand,
    ec_key,
    ed25519_key,
    private_der,
    private_pem,
    public_der,
    public_pem,
    rsa_key,
    segment,
    token,
)

from auth.jwt_rules import TOKEN_BYTES_MAX
from auth.providers.token import TokenProvider
from auth.state import AuthenticationDenied, ClientContext, Identity, OneStageAuthState
from proxy.common.errors import ConfigError
from proxy.config.types import TokenAuthentication

KeyFile = Callable[[bytes], str]
CLIENT = ClientContext("10.0.0.1:1234")
ALICE = Identity("alice")


@pytest.fixture
def provider(secret_file: str) -> TokenProvider:
    """Believes SECRET."""
    return TokenProvider(TokenAuthentication(secret_key=secret_file))


@pytest.fixture
def make(secret_file: str) -> Callable[..., TokenProvider]:
    """Believes SECRET, with further settings."""
    return lambda **settings: TokenProvider(TokenAuthentication(secret_key=secret_file, **settings))


@pytest.fixture
def with_public_key(key_file: KeyFile) -> Callable[..., TokenProvider]:
    """Believes the public part of a key."""

    def make(key: PrivateKey, **settings: Any) -> TokenProvider:
        return TokenProvider(TokenAuthentication(public_key=key_file(public_pem(key)), **settings))

    return make


async def denial(provider: TokenProvider, data: bytes) -> str:
    """Why a token is denied. Nothing of it, and nothing of a key, may stand in the text, a log or what it came from."""
    with structlog.testing.capture_logs() as entries, pytest.raises(AuthenticationDenied) as caught:
        await provider.identify(data, CLIENT)
    told = "".join(traceback.format_exception_only(caught.value)) + str(entries)
    chained = caught.value.__cause__ or (None if caught.value.__suppress_context__ else caught.value.__context__)
    told += str(chained)
    for part in [data, *data.split(b".")]:
        if len(part) > 8:
            assert part.decode("latin-1") not in told
    assert SECRET[:20].decode() not in told
    assert len(str(caught.value)) <= 300
    assert str(caught.value).isprintable()
    return caught.value.reason


# ---- verification


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
async def test_a_shared_secret(provider: TokenProvider, algorithm: str) -> None:
    assert await provider.identify(token(algorithm=algorithm), CLIENT) == ALICE


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
@pytest.mark.parametrize("encode", [public_pem, public_der])
async def test_an_rsa_key(key_file: KeyFile, algorithm: str, encode: Callable[[PrivateKey], bytes]) -> None:
    provider = TokenProvider(TokenAuthentication(public_key=key_file(encode(rsa_key()))))
    assert await provider.identify(token(rsa_key(), algorithm), CLIENT) == ALICE


CURVES = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}


@pytest.mark.parametrize("algorithm", CURVES)
@pytest.mark.parametrize("encode", [public_pem, public_der])
async def test_an_ec_key(key_file: KeyFile, algorithm: str, encode: Callable[[PrivateKey], bytes]) -> None:
    key = ec_key(CURVES[algorithm])
    provider = TokenProvider(TokenAuthentication(public_key=key_file(encode(key))))
    assert await provider.identify(token(key, algorithm), CLIENT) == ALICE


async def test_white_space_before_a_pem(key_file: KeyFile) -> None:
    provider = TokenProvider(TokenAuthentication(public_key=key_file(b"\n " + public_pem(rsa_key()))))
    assert await provider.identify(token(rsa_key(), "RS256"), CLIENT) == ALICE


async def test_every_byte_of_a_secret_file_counts(key_file: KeyFile) -> None:
    provider = TokenProvider(TokenAuthentication(secret_key=key_file(SECRET + b"\n")))
    assert await provider.identify(token(SECRET + b"\n"), CLIENT) == ALICE
    assert await denial(provider, token(SECRET)) == "bad_signature"


@pytest.mark.conforms("pip-30.35")
async def test_a_state_for_a_client(provider: TokenProvider) -> None:
    assert provider.method == "token"
    state = provider.new_auth_state(CLIENT)
    assert isinstance(state, OneStageAuthState)
    assert await state.authenticate(token()) is None
    assert state.get_auth_role() == "alice"


async def test_claims_that_pulsar_does_not_look_at(provider: TokenProvider) -> None:
    odd = token(iat=time.time() + 10_000, jti="7", iss="anybody", aud=["another", "service"])
    assert await provider.identify(odd, CLIENT) == ALICE
    odd = by_hand({"alg": "HS256"}, {"sub": "alice", "iat": "yesterday", "jti": 7, "aud": 5}, SECRET)
    assert await provider.identify(odd, CLIENT) == ALICE


# ---- signatures


async def test_another_secret(provider: TokenProvider) -> None:
    assert await denial(provider, token(OTHER_SECRET)) == "bad_signature"


async def test_another_key(with_public_key: Callable[..., TokenProvider]) -> None:
    assert await denial(with_public_key(rsa_key()), token(rsa_key(1), "RS256")) == "bad_signature"
    assert await denial(with_public_key(rsa_key()), token(rsa_key(1), "PS256")) == "bad_signature"


async def test_claims_under_another_tokens_signature(provider: TokenProvider) -> None:
    header, _, signature = token().split(b".")
    claims = segment(json.dumps({"sub": "admin"}).encode())
    assert await denial(provider, b".".join((header, claims, signature))) == "bad_signature"


async def test_a_signature_left_out_or_cut(provider: TokenProvider) -> None:
    header, claims, signature = token().split(b".")
    assert await denial(provider, b".".join((header, claims, b""))) == "bad_signature"
    assert await denial(provider, b".".join((header, claims, signature[:20]))) == "bad_signature"
    assert await denial(provider, b".".join((header, claims))) == "malformed"


async def test_no_character_of_header_and_claims_can_be_changed(provider: TokenProvider) -> None:
    good = token()
    for position in range(good.rindex(b".")):
        if good[position : position + 1] != b".":
            changed = bytearray(good)
            changed[position] = ord("A") if good[position] != ord("A") else ord("B")
            assert await denial(provider, bytes(changed)) in {"bad_signature", "bad_algorithm", "malformed"}


# ---- algorithms


@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
@pytest.mark.parametrize("secret", [None, b"", SECRET])
async def test_no_algorithm(provider: TokenProvider, name: str, secret: bytes | None) -> None:
    assert await denial(provider, by_hand({"alg": name}, {"sub": "alice"}, secret)) == "bad_algorithm"


@pytest.mark.parametrize(
    "header", [{}, {"alg": None}, {"alg": 5}, {"alg": "HS1"}, {"alg": "ES256K"}, {"alg": "EdDSA"}, {"alg": "RS256"}]
)
async def test_an_algorithm_that_does_not_fit(provider: TokenProvider, header: dict[str, Any]) -> None:
    assert await denial(provider, by_hand(header, {"sub": "alice"}, SECRET)) == "bad_algorithm"


@pytest.mark.parametrize("header", [{"alg": ["HS256"]}, {"alg": {"HS256": 1}}, [], 5, None, "HS256"])
async def test_a_header_that_is_none(provider: TokenProvider, header: Any) -> None:
    assert await denial(provider, by_hand(header, {"sub": "alice"}, SECRET)) in {"bad_algorithm", "malformed"}


@pytest.mark.parametrize("encode", [public_pem, public_der])
@pytest.mark.parametrize("stripped", [False, True])
@pytest.mark.parametrize("kind", ["rsa", "ec"])
async def test_a_public_key_taken_for_a_secret(
    key_file: KeyFile, encode: Callable[[PrivateKey], bytes], stripped: bool, kind: str
) -> None:
    """Algorithm confusion: the public key is public, so anyone who signs with it has proved nothing."""
    public = encode(rsa_key() if kind == "rsa" else ec_key())
    provider = TokenProvider(TokenAuthentication(public_key=key_file(public)))
    forged = by_hand({"alg": "HS256"}, {"sub": "admin"}, public.strip() if stripped else public)
    assert await denial(provider, forged) == "bad_algorithm"


async def test_a_public_key_taken_for_a_secret_beside_a_secret(key_file: KeyFile, secret_file: str) -> None:
    public = public_pem(rsa_key())
    provider = TokenProvider(TokenAuthentication(secret_key=secret_file, public_key=key_file(public)))
    assert await denial(provider, by_hand({"alg": "HS256"}, {"sub": "admin"}, public)) == "bad_signature"


async def test_a_key_in_the_header_is_not_taken(provider: TokenProvider) -> None:
    own = {"kty": "oct", "k": segment(OTHER_SECRET).decode()}
    header = {"alg": "HS256", "jwk": own, "jku": "https://evil.example/keys", "kid": "../../dev/null"}
    assert await denial(provider, by_hand(header, {"sub": "admin"}, OTHER_SECRET)) == "bad_signature"


@pytest.mark.parametrize("crit", [["exp"], ["b64"], "b64", []])
async def test_critical_extensions_are_not_overlooked(provider: TokenProvider, crit: Any) -> None:
    header = {"alg": "HS256", "crit": crit, "b64": False, "exp": 1}
    assert await denial(provider, by_hand(header, {"sub": "admin"}, SECRET)) in {"invalid", "malformed"}


async def test_an_unknown_critical_extension_is_denied_and_neither_floods_nor_forges_the_log(
    provider: TokenProvider,
) -> None:
    """PyJWT quotes the extension that it does not know; in a log that must not look like an entry of its own."""
    for extension in ("x\nlevel=info event=forged", "x\x1b[2J\u202e", "x" * 10_000):
        forged = by_hand({"alg": "HS256", "crit": [extension], extension: 1}, {"sub": "admin"}, None)
        assert await denial(provider, forged) == "invalid"


@pytest.mark.parametrize(("algorithm", "other"), [("ES256", "secp384r1"), ("ES384", "secp256r1")])
async def test_a_curve_that_does_not_fit(
    with_public_key: Callable[..., TokenProvider], algorithm: str, other: str
) -> None:
    signed = token(ec_key(CURVES[algorithm]), algorithm)
    assert await denial(with_public_key(ec_key(other)), signed) == "bad_algorithm"


async def test_a_secret_too_short_for_its_algorithm(key_file: KeyFile) -> None:
    """RFC 7518, section 3.2; Pulsar's own provider (jjwt) refuses it as well."""
    provider = TokenProvider(TokenAuthentication(secret_key=key_file(SECRET[:32])))
    assert await provider.identify(token(SECRET[:32]), CLIENT) == ALICE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InsecureKeyLengthWarning)
        assert await denial(provider, token(SECRET[:32], "HS512"))


# ---- times


async def test_a_token_with_an_end(provider: TokenProvider) -> None:
    end = int(time.time()) + 100
    assert await provider.identify(token(exp=end), CLIENT) == Identity("alice", end * 1000)
    text = by_hand({"alg": "HS256"}, {"sub": "alice", "exp": str(end)}, SECRET)
    assert await provider.identify(text, CLIENT) == Identity("alice", end * 1000)
    exact = by_hand({"alg": "HS256"}, {"sub": "alice", "exp": end + 0.5}, SECRET)
    assert (await provider.identify(exact, CLIENT)).expires_at_unix_ms in {end * 1000, end * 1000 + 500}


@pytest.mark.parametrize("ago_s", [1, 3600, 10**9])
async def test_an_expired_token(provider: TokenProvider, ago_s: int) -> None:
    assert await denial(provider, token(exp=int(time.time()) - ago_s)) == "expired"


@pytest.mark.parametrize("end", [0, -1, True, False])
async def test_an_end_before_all_times(provider: TokenProvider, end: Any) -> None:
    assert await denial(provider, by_hand({"alg": "HS256"}, {"sub": "alice", "exp": end}, SECRET)) == "expired"


@pytest.mark.parametrize("end", ["", "soon", [], {}, [2**40], None, "1e30", float("inf"), float("nan")])
async def test_an_end_that_is_no_number(provider: TokenProvider, end: Any) -> None:
    assert await denial(provider, by_hand({"alg": "HS256"}, {"sub": "alice", "exp": end}, SECRET)) == "malformed"


@pytest.mark.parametrize("end", [2**53, 2**63 - 1, 2**64, 1e30, 1e300, 1e308, 10**400], ids=lambda end: f"{end}"[:24])
async def test_an_end_beyond_all_times(provider: TokenProvider, end: float) -> None:
    """Issuers write Long.MAX_VALUE for "never". Whatever is made of it must fit the field that carries it."""
    try:
        found = await provider.identify(by_hand({"alg": "HS256"}, {"sub": "alice", "exp": end}, SECRET), CLIENT)
    except AuthenticationDenied:
        return
    assert found.expires_at_unix_ms is None or 0 < found.expires_at_unix_ms < 2**64


async def test_a_token_that_begins_later(provider: TokenProvider) -> None:
    assert await denial(provider, token(nbf=int(time.time()) + 100)) == "not_yet_valid"
    assert await provider.identify(token(nbf=int(time.time()) - 100), CLIENT) == ALICE


async def test_clock_skew(make: Callable[..., TokenProvider]) -> None:
    now = int(time.time())
    provider = make(allowed_clock_skew_ms=60_000)
    assert (await provider.identify(token(exp=now - 30), CLIENT)).role == "alice"
    assert (await provider.identify(token(nbf=now + 30), CLIENT)).role == "alice"
    assert await denial(provider, token(exp=now - 90)) == "expired"
    assert await denial(provider, token(nbf=now + 90)) == "not_yet_valid"


async def test_no_clock_skew_unless_allowed(provider: TokenProvider) -> None:
    assert await denial(provider, token(exp=int(time.time()) - 2)) == "expired"
    assert await denial(provider, token(nbf=int(time.time()) + 5)) == "not_yet_valid"


async def test_an_end_within_the_skew_is_not_over_yet(make: Callable[..., TokenProvider]) -> None:
    """What the provider lets in must not count as expired a moment later, under the seal."""
    now_ms = time.time() * 1000
    identity = await make(allowed_clock_skew_ms=60_000).identify(token(exp=int(now_ms / 1000) - 30), CLIENT)
    assert identity.expires_at_unix_ms is not None
    assert now_ms < identity.expires_at_unix_ms <= now_ms + 60_000


# ---- audiences


@pytest.mark.parametrize("audience", ["proxy", ["proxy"], ["other", "proxy"], ["proxy", 5, None]])
async def test_a_token_meant_for_us(make: Callable[..., TokenProvider], audience: Any) -> None:
    data = by_hand({"alg": "HS256"}, {"sub": "alice", "aud": audience}, SECRET)
    assert await make(audience="proxy").identify(data, CLIENT) == ALICE


@pytest.mark.parametrize(
    "audience",
    [
        ...,
        None,
        "",
        "other",
        "proxy2",
        "prox",
        "Proxy",
        "*",
        "other proxy",
        [],
        ["other"],
        [["proxy"]],
        {"proxy": 1},
        5,
    ],
)
async def test_a_token_meant_for_others(make: Callable[..., TokenProvider], audience: Any) -> None:
    claims = {"sub": "alice"} if audience is ... else {"sub": "alice", "aud": audience}
    assert await denial(make(audience="proxy"), by_hand({"alg": "HS256"}, claims, SECRET)) == "bad_audience"


async def test_the_audience_in_another_claim(make: Callable[..., TokenProvider]) -> None:
    provider = make(audience="proxy", audience_claim="cluster")
    assert await provider.identify(token(cluster="proxy", aud="other"), CLIENT) == ALICE
    assert await denial(provider, token(aud="proxy")) == "bad_audience"


async def test_the_audience_with_a_public_key(with_public_key: Callable[..., TokenProvider]) -> None:
    provider = with_public_key(rsa_key(), audience="proxy")
    assert await provider.identify(token(rsa_key(), "RS256", aud="proxy"), CLIENT) == ALICE
    assert await denial(provider, token(rsa_key(), "RS256", aud="other")) == "bad_audience"


# ---- roles


@pytest.mark.parametrize(
    ("claim", "role"),
    [
        ("alice", "alice"),
        (["alice"], "alice"),
        (["alice", "bob"], "alice"),
        (["alice", 5], "alice"),
        ("Ünïcödé 角色", "Ünïcödé 角色"),
    ],
)
async def test_roles(provider: TokenProvider, claim: Any, role: str) -> None:
    data = by_hand({"alg": "HS256"}, {"sub": claim}, SECRET)
    assert (await provider.identify(data, CLIENT)).role == role


@pytest.mark.parametrize(
    "claim",
    ["", " ", "\t\n", "\u3000", None, 5, 1.5, True, {}, {"a": 1}, [], [""], [5], [None], [["alice"]], ["", "a"]],
)
async def test_a_token_without_a_role(provider: TokenProvider, claim: Any) -> None:
    assert await denial(provider, by_hand({"alg": "HS256"}, {"sub": claim}, SECRET)) == "no_role"


async def test_a_token_without_the_claim(provider: TokenProvider) -> None:
    assert await denial(provider, token(sub=..., name="alice")) == "no_role"


async def test_the_role_in_another_claim(make: Callable[..., TokenProvider]) -> None:
    provider = make(role_claim="groups")
    assert (await provider.identify(token(groups=["bob"]), CLIENT)).role == "bob"
    assert await denial(provider, token()) == "no_role"


# ---- rubbish


@pytest.mark.parametrize(
    "data",
    [
        b".",
        b"..",
        b"...",
        b"a.b.c",
        b"\xff\xfe\x00",
        b"\xff.\xff.\xff",
        b"token:" + b"x" * 40,
        segment(b'{"alg":"HS256"}'),
        segment(b'{"alg":"HS256"}') + b"..",
        segment(b"\xff\xfe") + b".e30.AA",
        segment(b"[" * 100_000)[:60_000] + b".e30.AA",
        b"A" * TOKEN_BYTES_MAX,
        bytes(1000),
    ],
    ids=lambda data: repr(data[:20]),
)
async def test_bytes_that_are_no_token(provider: TokenProvider, data: bytes) -> None:
    assert await denial(provider, data) in {"malformed", "bad_signature"}


@pytest.mark.parametrize("claims", [[], "alice", 5, None, ["alice"]])
async def test_signed_claims_that_are_none(provider: TokenProvider, claims: Any) -> None:
    assert await denial(provider, by_hand({"alg": "HS256"}, claims, SECRET)) == "malformed"


async def test_no_data_at_all(provider: TokenProvider) -> None:
    assert await denial(provider, b"") == "missing"


async def test_the_largest_token(provider: TokenProvider) -> None:
    large = token(padding="x" * 40_000)
    assert len(large) < TOKEN_BYTES_MAX == 65_536
    assert await provider.identify(large, CLIENT) == ALICE
    huge = token(padding="x" * 50_000)
    assert len(huge) > TOKEN_BYTES_MAX
    assert await denial(provider, huge) == "malformed"


@pytest.mark.conforms("pip-30.47")
async def test_a_huge_token_is_not_looked_at(provider: TokenProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(jwt, "decode", never)
    assert await denial(provider, b"x" * (TOKEN_BYTES_MAX + 1)) == "malformed"


@pytest.mark.parametrize("error", [ValueError, RecursionError, OverflowError, TypeError, jwt.PyJWTError])
@pytest.mark.parametrize("keys", ["provider", "with_two_keys"])
async def test_whatever_breaks_in_a_parser_denies(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, keys: str, error: type[Exception]
) -> None:
    def broken(data: bytes, *_: Any, **__: Any) -> None:
        raise error(data)

    monkeypatch.setattr(jwt, "decode", broken)
    with pytest.raises(AuthenticationDenied) as denied:
        await request.getfixturevalue(keys).identify(token(), CLIENT)
    assert denied.value.reason == ("invalid" if error is jwt.PyJWTError else "malformed")
    if error is not jwt.PyJWTError:  # whose texts are its own, and hold no more than a header
        assert str(denied.value) == error.__name__


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


TIMES = st.integers(0, 10**25) | st.floats(0, 1e308) | JSON


@given(st.fixed_dictionaries({}, optional={"sub": JSON, "exp": TIMES, "nbf": TIMES, "iat": TIMES, "aud": JSON}))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_whatever_an_issuer_signs_there_is_a_verdict(provider: TokenProvider, claims: dict[str, Any]) -> None:
    try:
        identity = await provider.identify(by_hand({"alg": "HS256"}, {"sub": "alice", **claims}, SECRET), CLIENT)
    except AuthenticationDenied:
        return
    assert identity.role.strip()
    assert identity.expires_at_unix_ms is None or 0 < identity.expires_at_unix_ms < 2**64


@given(st.binary(max_size=200), JSON)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_whatever_a_stranger_sends_is_denied(provider: TokenProvider, garbage: bytes, header: Any) -> None:
    for data in (garbage, by_hand(header, {"sub": "admin"}, None)):
        with pytest.raises(AuthenticationDenied):
            await provider.identify(data, CLIENT)


# ---- two keys


@pytest.fixture
def with_two_keys(secret_file: str, key_file: KeyFile) -> TokenProvider:
    """Believes SECRET and the RSA key."""
    public = key_file(public_pem(rsa_key()))
    return TokenProvider(TokenAuthentication(secret_key=secret_file, public_key=public))


async def test_either_of_two_keys(with_two_keys: TokenProvider) -> None:
    assert await with_two_keys.identify(token(), CLIENT) == ALICE
    assert await with_two_keys.identify(token(rsa_key(), "RS256"), CLIENT) == ALICE


async def test_with_two_keys_the_one_that_fits_says_why_not(with_two_keys: TokenProvider) -> None:
    ago = int(time.time()) - 100
    assert await denial(with_two_keys, token(exp=ago)) == "expired"
    assert await denial(with_two_keys, token(rsa_key(), "RS256", exp=ago)) == "expired"
    assert await denial(with_two_keys, token(OTHER_SECRET)) == "bad_signature"
    assert await denial(with_two_keys, token(rsa_key(1), "RS256")) == "bad_signature"
    assert await denial(with_two_keys, token(ec_key(), "ES256")) == "bad_algorithm"
    assert await denial(with_two_keys, b"rubbish") == "malformed"


async def test_without_a_key_every_token_is_denied() -> None:
    assert await denial(TokenProvider(TokenAuthentication()), token()) == "malformed"


# ---- key files


def config_error(**keys: str) -> str:
    with pytest.raises(ConfigError) as caught:
        TokenProvider(TokenAuthentication(**keys))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@pytest.mark.parametrize("key", ["secret_key", "public_key"])
def test_a_key_file_that_cannot_be_read(key: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    expected = f"authentication.token.{key}: {missing} cannot be read: No such file or directory"
    assert config_error(**{key: str(missing)}) == expected
    assert config_error(**{key: str(tmp_path)}).endswith("cannot be read: Is a directory")


def test_an_empty_secret(key_file: KeyFile) -> None:
    file = key_file(b"")
    assert config_error(secret_key=file) == f"authentication.token.secret_key: {file} is empty"


@pytest.mark.parametrize("size", [1, 16, 31])
def test_a_secret_that_can_be_guessed(key_file: KeyFile, size: int) -> None:
    """RFC 7518, section 3.2: at least the 256 bits of HS256. Pulsar's brokers do not start with less."""
    text = config_error(secret_key=key_file(SECRET[:size]))
    assert text.startswith("authentication.token.secret_key: ")
    assert "not-to-be" not in text


def public_key_error(file: str) -> str:
    text = config_error(public_key=file)
    assert text.startswith(f"authentication.token.public_key: {file} ")
    assert len(text) < 500
    return text


@pytest.mark.parametrize(
    "content",
    [b"", b"rubbish", b"-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n", b"-----", SECRET],
    ids=["empty", "rubbish", "bad pem", "dashes", "a secret"],
)
def test_a_file_that_holds_no_public_key(key_file: KeyFile, content: bytes) -> None:
    text = public_key_error(key_file(content))
    assert "holds no public key" in text
    assert "not-to-be-seen" not in text


@pytest.mark.parametrize("encode", [public_pem, public_der])
def test_a_public_key_cut_short(key_file: KeyFile, encode: Callable[[PrivateKey], bytes]) -> None:
    assert "holds no public key" in public_key_error(key_file(encode(rsa_key())[:100]))


def test_a_private_key_in_place_of_the_public_one(key_file: KeyFile) -> None:
    private = private_pem(rsa_key())
    text = public_key_error(key_file(private))
    assert "holds a private key; the public key is wanted" in text
    assert not any(line.decode() in text for line in private.splitlines())


PAIR_AS_SECRET = [
    (public_pem, "a public key"),
    (public_der, "a public key"),
    (private_pem, "a private key"),
    (private_der, "a private key"),
    (lambda key: b"\n" + public_pem(key), "a public key"),
    (lambda _key: b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "a certificate"),
    (lambda _key: b"-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----\n", "a private key"),
    (lambda _key: b"-----BEGIN SOMETHING-----\nMIIB\n-----END SOMETHING-----\n", "a PEM file"),
]


@pytest.mark.parametrize(("encode", "kind"), PAIR_AS_SECRET)
@pytest.mark.parametrize("key", [rsa_key, ec_key])
def test_a_key_of_a_pair_is_no_shared_secret(
    key_file: KeyFile, key: Callable[[], PrivateKey], encode: Callable[[PrivateKey], bytes], kind: str
) -> None:
    """Security: a public key is known to all, and any of them could then sign tokens."""
    for table in ({"secret_key": key_file(encode(key()))}, {"further_secret_keys": (key_file(encode(key())),)}):
        with pytest.raises(ConfigError, match=f"holds {kind}; a shared secret is wanted here"):
            TokenProvider(TokenAuthentication(**table))  # type: ignore[arg-type]


def test_a_secret_that_begins_as_der_is_one(key_file: KeyFile) -> None:
    assert TokenProvider(TokenAuthentication(secret_key=key_file(b"\x30" + b"x" * 40))).method == "token"


@pytest.mark.parametrize("encode", [public_pem, public_der])
def test_a_key_of_an_unusable_kind(key_file: KeyFile, encode: Callable[[PrivateKey], bytes]) -> None:
    assert public_key_error(key_file(encode(ed25519_key()))).endswith(
        "is neither an RSA key nor an EC key on P-256, P-384 or P-521"
    )


def test_an_rsa_key_that_can_be_factored(key_file: KeyFile) -> None:
    """RFC 7518, section 3.3: at least 2048 bits."""
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    assert "1024 bits; 2048 are needed" in public_key_error(key_file(public_pem(weak)))


def test_a_curve_without_an_algorithm(key_file: KeyFile) -> None:
    """It would load, and then deny every token."""
    key = ec.generate_private_key(ec.SECP256K1())
    assert public_key_error(key_file(public_pem(key))).endswith("P-256, P-384 or P-521")
