"""Method ``token`` with the tokens of OpenID Connect issuers, as Pulsar's AuthenticationProviderOpenID takes them.

A client's token names its issuer and its key, and until the signature is checked anyone may have written that. So the
name is only looked up among the issuers of the configuration, and no other issuer is contacted; and an unknown key
causes a request to its issuer no more often than ``keys_retry_interval_ms`` (in each auth worker), however many keys
unauthenticated clients invent.

With ``kubernetes``, the name is also compared with that of the issuer which the API server of Kubernetes names. Only
that answer leads anywhere, never the token: an unknown name causes no request but that to the API server, when its last
answer has grown old.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
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
from auth.kubernetes_api import KubernetesApi
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
        self._issuers = {
            issuer: _Issuer(
                issuer,
                partial(_read_keys, client, issuer),
                config,
                role_claim=config.role_claim,
                allowed_roles=config.allowed_roles.get(issuer),
            )
            for issuer in config.allowed_issuers
        }
        self._fallback: _Issuer | None = None
        if config.kubernetes is not None:
            api = KubernetesApi(config.kubernetes, config.request_timeout_ms, transport)
            read = partial(_read_kubernetes_keys, api, client, config.kubernetes.discovery)
            allowed = config.kubernetes.allowed_roles
            self._fallback = _Issuer("Kubernetes", read, config, role_claim="sub", allowed_roles=allowed)

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- the interface's
        """Judge a token."""
        check_token_size(data)
        config = self._config
        header, claimed = parse_unverified(data)
        name = claimed.get("iss")
        issuer = self._issuer(name)
        if header.get("alg") not in _NAMES_OF_ALGORITHMS:  # before an issuer is asked because of it
            raise AuthenticationDenied("bad_algorithm", "the token's algorithm is none of public keys")
        claims = verify_token(
            data,
            await issuer.keys(name, header.get("kid")),
            audience_claim="aud",
            audiences=config.allowed_audiences,
            allowed_clock_skew_ms=config.allowed_clock_skew_ms,
            required=("exp",),
        )
        role = role_in(claims, issuer.role_claim)
        _check_roles(issuer, claims[issuer.role_claim])
        return Identity(role, expires_at_unix_ms(claims, config.allowed_clock_skew_ms))

    def _issuer(self, name: object) -> "_Issuer":
        found = self._issuers.get(name, self._fallback) if isinstance(name, str) and name else None
        if found is None:
            raise _unknown_issuer(name)
        return found


def _check_roles(issuer: "_Issuer", claim: str | list[Any]) -> None:
    """Deny roles that the issuer may not sign. Of a list all count: brokers that take several roles read the same
    token. Raises AuthenticationDenied.
    """
    allowed = issuer.allowed_roles
    for role in claim if isinstance(claim, list) else [claim]:
        if allowed is not None and not (isinstance(role, str) and fits_entry(role, allowed)):
            raise AuthenticationDenied(
                "role_not_allowed", f"{role!r:.200} is none of the allowed_roles of {issuer.name}"
            )


_NAMES_OF_ALGORITHMS = tuple(ASYMMETRIC)
"""A tuple, since a stranger's header may hold what no set can look for."""


class _Metadata(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KubernetesMetadata(msgspec.Struct):
    issuer: str


class _KeySet(msgspec.Struct):
    keys: list[Any]


@dataclass(frozen=True, slots=True)
class _NamedKey:
    name: str | None
    key: Key


@dataclass(frozen=True, slots=True)
class _IssuerKeys:
    issuer: str
    keys: tuple[_NamedKey, ...]

    def named(self, issuer: object, name: str | None) -> list[Key]:
        """Return the keys of a name, if they are of the issuer that a token names; raise AuthenticationDenied."""
        if issuer != self.issuer:
            raise _unknown_issuer(issuer)
        return _named(self.keys, name)


_ReadKeys = Callable[[], Awaitable[tuple[str, list[Any]]]]
"""Reads an issuer's name, and the entries of its set of keys; raises HttpFailed."""


class _Issuer:
    """One issuer's keys, and the roles that its tokens may name (None: any) in a claim. ``name``: in texts."""

    def __init__(
        self,
        name: str,
        read: _ReadKeys,
        config: OidcAuthentication,
        *,
        role_claim: str,
        allowed_roles: tuple[str, ...] | None,
    ) -> None:
        self.name = name
        self.role_claim = role_claim
        self.allowed_roles = allowed_roles
        self._read = read
        self._lifetime_s = seconds(config.keys_lifetime_ms)
        self._keys = RefreshingCache(
            f"keys of {name}", self._fetch, retry_interval_s=seconds(config.keys_retry_interval_ms)
        )

    async def keys(self, issuer: object, name: str | None) -> list[Key]:
        """Return the keys of a name (RFC 7517 allows several kinds under one); without a name, the only key there is.

        ``issuer``: as the token names it. Raises AuthenticationDenied where it is another one, and where there is no
        such key, after a request to the issuer, if that is due.
        """
        try:
            found = (await self._keys.current_value()).named(issuer, name)
            if not found and name is not None:
                found = (await self._keys.refreshed_value()).named(issuer, name)
        except NotAvailable as error:
            raise AuthenticationDenied("issuer_unavailable", str(error)) from None
        if not found and self._keys.failure:
            raise AuthenticationDenied("issuer_unavailable", self._keys.failure)
        if not found:
            raise AuthenticationDenied("unknown_key", f"{self.name} has no usable key {str(name)[:100]!r}")
        return found

    async def _fetch(self) -> Fetched[_IssuerKeys]:
        issuer, entries = await self._read()
        if len(entries) > KEYS_MAX:
            raise HttpFailed(f"{self.name} has {len(entries)} keys; {KEYS_MAX} are allowed")
        keys = tuple(key for key in map(_usable_key, entries) if key is not None)
        if not keys:
            get_logger().warning("an issuer has no usable key", issuer=self.name, keys=len(entries))
        return Fetched(_IssuerKeys(issuer, keys), self._lifetime_s, self._lifetime_s * USABLE_LIFETIMES)


async def _read_keys(client: IssuerClient, issuer: str) -> tuple[str, list[Any]]:
    """Read the keys of an issuer, by its own description."""
    url = discovery_url(issuer)
    metadata = await client.get_json(url, _Metadata)
    if metadata.issuer != issuer:
        raise HttpFailed(f"{url}: is another issuer's")
    return issuer, (await client.get_json(metadata.jwks_uri, _KeySet)).keys


async def _read_kubernetes_keys(api: KubernetesApi, client: IssuerClient, discovery: str) -> tuple[str, list[Any]]:
    """Read the name of Kubernetes' issuer from the API server, and the keys from there or from that issuer."""
    issuer = (await api.get_discovery(_KubernetesMetadata)).issuer
    if discovery == "trusted_issuer":
        return await _read_keys(client, issuer)
    return issuer, (await api.get_keys(_KeySet)).keys


def _unknown_issuer(name: object) -> AuthenticationDenied:
    return AuthenticationDenied("unknown_issuer", f"{str(name)[:200]!r} is no allowed issuer")


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
