"""Method ``token`` with the tokens of OpenID Connect issuers, as Pulsar's AuthenticationProviderOpenID takes them.

A client's token names its issuer and its key, and until the signature is checked anyone may have written that. So the
name is only looked up among the issuers of the configuration, and no other issuer is contacted; and an unknown key
causes a request to its issuer no more often than ``keys_retry_interval_ms`` (in each auth worker), however many keys
unauthenticated clients invent.
"""

from dataclasses import dataclass
from typing import Any

import httpx
import jwt
import msgspec

from auth.http import HttpFailed, IssuerClient, discovery_url
from auth.jwt_rules import (
    ASYMMETRIC,
    Key,
    check_token_size,
    expires_at_unix_ms,
    parse_unverified,
    public_key_algorithms,
    role_in,
    verify_token,
)
from auth.refreshing_cache import Fetched, NotAvailable, RefreshingCache
from auth.state import AuthenticationDenied, AuthenticationProvider, ClientContext, Identity
from proxy.common.eager import eager
from proxy.common.logs import get_logger
from proxy.config.issuer_roles import fits_entry
from proxy.config.types import OidcAuthentication
from proxy.runtime.loop.tasks import seconds

KEYS_MAX = 100
"""Issuers have two or three."""

USABLE_LIFETIMES = 2
"""For how many ``keys_lifetime_ms`` keys are used where their issuer cannot be asked. An issuer that is down for a
moment is to lock no user out; but an attacker between us and the issuer is not to keep a revoked key alive for ever.
"""


class OidcProvider(AuthenticationProvider):
    """Provider that checks a token's issuer, signature, audience, expiry and roles, and takes the role from a claim.

    ``transport`` replaces the network in tests. Raises ConfigError.
    """

    method = "token"

    def __init__(self, config: OidcAuthentication, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        client = IssuerClient(
            "authentication.oidc.trust",
            trust=config.trust,
            timeout_ms=config.request_timeout_ms,
            plain_http="nowhere" if config.require_https else "anywhere",
            transport=transport,
        )
        self._issuers = {issuer: _Issuer(issuer, client, config) for issuer in config.allowed_issuers}

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- the interface's
        """Judge a token."""
        check_token_size(data)
        config = self._config
        header, claimed = parse_unverified(data)
        issuer = self._issuer(claimed.get("iss"))
        if header.get("alg") not in _NAMES_OF_ALGORITHMS:  # before an issuer is asked because of it
            raise AuthenticationDenied("bad_algorithm", "the token's algorithm is none of public keys")
        claims = verify_token(
            data,
            await issuer.keys(header.get("kid")),
            audience_claim="aud",
            audiences=config.allowed_audiences,
            allowed_clock_skew_ms=config.allowed_clock_skew_ms,
            required=("exp",),
        )
        role = role_in(claims, config.role_claim)
        self._check_roles(issuer.name, claims[config.role_claim])
        return Identity(role, expires_at_unix_ms(claims, config.allowed_clock_skew_ms))

    def _check_roles(self, issuer: str, claim: str | list[Any]) -> None:
        """Deny roles that the issuer may not sign. Of a list all count: brokers that take several roles read the same
        token. Raises AuthenticationDenied.
        """
        allowed = self._config.allowed_roles.get(issuer)
        for role in claim if isinstance(claim, list) else [claim]:
            if allowed is not None and not (isinstance(role, str) and fits_entry(role, allowed)):
                text = f"{role!r:.200} is none of authentication.oidc.allowed_roles of {issuer}"
                raise AuthenticationDenied("role_not_allowed", text)

    def _issuer(self, name: object) -> "_Issuer":
        found = self._issuers.get(name) if isinstance(name, str) else None
        if found is None:
            raise AuthenticationDenied("unknown_issuer", f"{str(name)[:200]!r} is none of allowed_issuers")
        return found


_NAMES_OF_ALGORITHMS = tuple(ASYMMETRIC)
"""A tuple, since a stranger's header may hold what no set can look for."""


class _Metadata(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[Any]


@dataclass(frozen=True, slots=True)
class _NamedKey:
    name: str | None
    key: Key


class _Issuer:
    """One issuer's keys."""

    def __init__(self, name: str, client: IssuerClient, config: OidcAuthentication) -> None:
        self.name = name
        self._client = client
        self._lifetime_s = seconds(config.keys_lifetime_ms)
        self._keys = RefreshingCache(
            f"keys of {name}", self._fetch, retry_interval_s=seconds(config.keys_retry_interval_ms)
        )

    async def keys(self, name: str | None) -> list[Key]:
        """Return the keys of a name (RFC 7517 allows several kinds under one); without a name, the only key there is.

        Raises AuthenticationDenied where there is none, after a request to the issuer, if that is due.
        """
        try:
            found = _named(await self._keys.current_value(), name)
            if not found and name is not None:
                found = _named(await self._keys.refreshed_value(), name)
        except NotAvailable as error:
            raise AuthenticationDenied("issuer_unavailable", str(error)) from None
        if not found and self._keys.failure:
            raise AuthenticationDenied("issuer_unavailable", self._keys.failure)
        if not found:
            raise AuthenticationDenied("unknown_key", f"{self.name} has no usable key {str(name)[:100]!r}")
        return found

    async def _fetch(self) -> Fetched[tuple[_NamedKey, ...]]:
        url = discovery_url(self.name)
        metadata = await self._client.get_json(url, _Metadata)
        if metadata.issuer != self.name:
            raise HttpFailed(f"{url}: is another issuer's")
        entries = (await self._client.get_json(metadata.jwks_uri, _KeySet)).keys
        if len(entries) > KEYS_MAX:
            raise HttpFailed(f"{self.name} has {len(entries)} keys; {KEYS_MAX} are allowed")
        keys = tuple(key for key in map(_usable_key, entries) if key is not None)
        if not keys:
            get_logger().warning("an issuer has no usable key", issuer=self.name, keys=len(entries))
        return Fetched(keys, self._lifetime_s, self._lifetime_s * USABLE_LIFETIMES)


def _named(keys: tuple[_NamedKey, ...], name: str | None) -> list[Key]:
    if name is None:  # OpenID Connect Core 1.0, section 10.1: only a sole key needs no name
        return [one.key for one in keys] if len(keys) == 1 else []
    return [one.key for one in keys if one.name == name]


def _usable_key(entry: Any) -> _NamedKey | None:
    """Return a key for checking signatures; None for an issuer's other keys."""
    try:
        if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ["verify"]):
            return None
        key = jwt.PyJWK(entry).key
        algorithms = public_key_algorithms(key)
        named = entry.get("alg")
        if named is not None:
            algorithms = tuple(algorithm for algorithm in algorithms if algorithm == named)
    except Exception:  # noqa: BLE001 -- one entry that cannot be read is not to lose the others
        return None
    name = entry.get("kid")
    return _NamedKey(name if isinstance(name, str) else None, (key, algorithms)) if algorithms else None
