"""Authentication of HTTP requests by auth workers (PIP-30's methods of one round), and the proxy's own authorization.

A request is authenticated by what it brings: an ``Authorization`` header (a token or a password), ``?token=`` below
/ws, the certificate of its connection, or nothing, where there is a role for such clients. Clients may say which method
they mean (X-Pulsar-Auth-Method-Name). Whatever goes on to a server must have been verified here: a request with two
credentials, or with one that was not looked at, is refused. Otherwise clients could guess credentials at the servers
past the auth workers, which bound that.

A client's own credentials go on to the brokers as they are: these compare them with the original principal
(apache/pulsar#26748). Where the client has none that can be passed on, the proxy shows its own, together with the
client's role, and only to servers that know of proxies: at others (/ws, further routes) the client would act with the
proxy's role.
"""

import base64
import binascii
import hashlib
import secrets
import time
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl

import trio

from proto.connect_rules import AUTHENTICATION_FAILED, AUTHENTICATION_UNAVAILABLE, INVALID_ROLES, is_client_fault
from proto.http_rules import RequestHead, RequestRefused, header
from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, Method, Principal
from proxy.common.deny_list import KEY, read_deny_list
from proxy.common.eager import enter_task
from proxy.common.reloading_file import ReloadingFile
from proxy.config.methods import ANONYMOUS, one_round_methods
from proxy.config.types import Config
from proxy.config.upstreams import http_upstreams
from proxy.http.client import HttpClient, HttpIdentity
from proxy.runtime.fairness.members_by_owner import MembersByOwner
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.pool import RpcPool

VERDICT_LIFETIME_S = 1.0
"""How long a verdict holds for further requests with the same credentials: as long as a forwarder's for a target."""

VERDICTS_MAX = 4_096

OWN_LIFETIME_S = 30.0
"""How long the proxy's own credentials are kept: after that auth workers may have others."""

OWN_MARGIN_S = 10.0
"""How long before their end they are not kept any more."""

_AUTHENTICATE = int(Method.AUTHENTICATE)
_METHOD_NAME = b"x-pulsar-auth-method-name"
_ORIGINAL_PRINCIPAL = b"x-original-principal"
_SEVERAL_ROUNDS = {b"sasl", b"SCRAM-SHA-256", b"SCRAM-SHA-512"}
_METHOD_BY_SCHEME = {b"bearer": "token", b"basic": "basic"}
_TAKEN = {
    "token": "a token (Authorization: Bearer)",
    "basic": "a user and a password (Authorization: Basic)",
    "tls": "a client certificate",
}


@dataclass(frozen=True, slots=True)
class _Presented:
    """What a request brings to be authenticated by.

    ``passes_on``: the server gets it, too. ``claim``: the original principal that the client names.
    """

    method: str
    data: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    claim: str
    passes_on: bool


@dataclass(frozen=True, slots=True)
class _Denial:
    """Why a client was denied: a short stable name."""

    reason: str


_Verdict = HttpIdentity | _Denial
_NOBODY = HttpIdentity(Principal())
_UNAVAILABLE = _Denial("authentication_unavailable")


@dataclass(slots=True, eq=False)
class _Asked:
    """A question to an auth worker. ``verdict``: None as long as there is none, also where the client has left."""

    over: trio.Event = field(default_factory=trio.Event)
    verdict: _Verdict | None = None


class HttpAuthenticator:
    """Authenticator of HTTP requests. Tasks of its own run in ``nursery``; ``authentication.deny_file`` is read here,
    too, which may raise ConfigError.
    """

    def __init__(self, config: Config, auth: RpcPool, nursery: trio.Nursery) -> None:
        authentication = config.authentication
        file = authentication.deny_file
        self._enabled = authentication.enabled
        self._know_proxies = {name for name, one in http_upstreams(config).items() if one.knows_proxies}
        self._methods = one_round_methods(authentication)
        self._timeout_s = seconds(config.limits.handshake_timeout_ms)
        self._failure_delay_s = seconds(authentication.failure_delay_ms)
        self._auth = auth
        self._own = _OwnAuthorization(config, auth, nursery)
        self._key = secrets.token_bytes(32)
        self._verdicts = _Verdicts(authentication.anonymous_role)
        self._under_way: dict[bytes, _Asked] = {}
        self.denied = ReloadingFile(KEY, [file], lambda: read_deny_list(file))

    async def authenticate(self, head: RequestHead, route: str, client: HttpClient) -> HttpIdentity:
        """Return who the client of a request for an upstream, ``route``, is. Raises RequestRefused: 400, 401, 503."""
        if not self._enabled:
            return _NOBODY
        presented = self._presented(head, client)
        key = self._digest(presented, client)
        found: _Verdict | None = self._verdicts.find(key)
        if found is None:
            await enter_task()
            try:
                with trio.fail_after(self._timeout_s):
                    found = await self._verdict(key, presented, client)
            except trio.TooSlowError:
                found = _UNAVAILABLE
        if isinstance(found, HttpIdentity) and (await self.denied.current_value()).matching_kind(found.credentials):
            found = _Denial("denied_credential")
        if isinstance(found, _Denial):
            raise await self._refusal(found)
        if presented.passes_on or route not in self._know_proxies:
            return found
        return replace(found, authorization=await self._own.value())

    # ---- what a request brings

    def _presented(self, head: RequestHead, client: HttpClient) -> _Presented:
        """Return what a request is authenticated by. Raises RequestRefused."""
        named = header(head.headers, _METHOD_NAME)
        authorization = header(head.headers, b"authorization")
        ws_token = _query_token(head)
        if named in _SEVERAL_ROUNDS:
            raise self._unauthorized(
                f"{named.decode()} needs several rounds, for which HTTP has no place", "several_rounds"
            )
        if authorization is not None and ws_token is not None:
            raise self._unauthorized("two credentials: a header and a token in the query", "several_credentials")
        if authorization is not None:
            method, data = self._from_header(authorization)
        elif ws_token is not None:
            method, data = "token", ws_token
        elif client.certificate and "tls" in self._methods and named != ANONYMOUS.encode():
            method, data = "tls", b""
        else:
            method, data = ANONYMOUS, b""
        if method not in self._methods:
            why = "no credentials" if method == ANONYMOUS else f"no clients come by {method} here"
            raise self._unauthorized(why, "no_credentials" if method == ANONYMOUS else "unknown_method")
        if named is not None and named.decode("latin-1") in self._methods and named != method.encode():
            what = "the credentials are not those of the method in X-Pulsar-Auth-Method-Name"
            raise self._unauthorized(what, "other_method")
        claim = header(head.headers, _ORIGINAL_PRINCIPAL) or b""
        try:
            original = claim.decode()
        except UnicodeDecodeError:
            raise RequestRefused(400, "X-Original-Principal is not UTF-8", INVALID_ROLES) from None
        return _Presented(method, data, client.certificate, original, passes_on=method in {"token", "basic"})

    def _from_header(self, authorization: bytes) -> tuple[str, bytes]:
        scheme, _, text = authorization.partition(b" ")
        method, data = _METHOD_BY_SCHEME.get(scheme.lower(), ""), text.strip()
        if not method:
            raise self._unauthorized("a scheme of Authorization that is not known here", "unknown_scheme")
        if method == "basic":
            try:
                data = base64.b64decode(data, validate=True)
            except binascii.Error:
                data = b""
        if not data:
            raise self._unauthorized("an Authorization that cannot be read", "malformed")
        return method, data

    def _unauthorized(self, why: str, reason: str) -> RequestRefused:
        taken = [text for method, text in _TAKEN.items() if method in self._methods]
        return RequestRefused(401, f"{why}; clients are known by {' or '.join(taken) or 'no credentials'}", reason)

    # ---- the verdict

    async def _verdict(self, key: bytes, presented: _Presented, client: HttpClient) -> _Verdict:
        """Return what an auth worker says of credentials now.

        Of several requests with the same credentials at a time one asks, and its verdict is that of the others, too. If
        its client leaves before, the next one asks.
        """
        while (asked := self._under_way.get(key)) is not None:
            await asked.over.wait()
            if asked.verdict is not None:
                return asked.verdict
        asked = self._under_way[key] = _Asked()
        try:
            asked.verdict = await self._call(presented, client)
        finally:
            del self._under_way[key]
            asked.over.set()
        if isinstance(asked.verdict, HttpIdentity):
            self._verdicts.keep(key, asked.verdict, client.address)
        return asked.verdict

    async def _call(self, presented: _Presented, client: HttpClient) -> _Verdict:
        worker = self._auth.pick_client()
        number = worker.new_id()
        request = AuthenticateRequest(
            authentication_id=number,
            first_round=True,
            method=presented.method,
            data=presented.data,
            client_address=client.address,
            client_certificate=presented.certificate,
            original_principal=presented.claim,
            http=True,
        )
        try:
            response = await worker.call(
                _AUTHENTICATE, request, AuthenticateResponse, timeout_s=self._timeout_s, retry=True
            )
        except RpcError:
            return _UNAVAILABLE
        outcome = response.WhichOneof("outcome")
        if outcome == "authenticated":
            found = response.authenticated
            return HttpIdentity(found.principal, found.sealed_principal, tuple(found.credentials))
        if outcome == "challenge":
            over = AuthenticateRequest(authentication_id=number, over=True)
            worker.send_notification(_AUTHENTICATE, over, timeout_s=self._timeout_s)
        return _Denial(str(response.denied.reason) or "no_verdict")

    async def _refusal(self, denial: _Denial) -> RequestRefused:
        """Return what a client is told of a denial, after the delay that failed authentications have."""
        if denial is _UNAVAILABLE or not is_client_fault(denial.reason):
            return RequestRefused(503, AUTHENTICATION_UNAVAILABLE, denial.reason)
        await enter_task()
        await trio.sleep(self._failure_delay_s)
        return RequestRefused(401, AUTHENTICATION_FAILED, denial.reason)

    def _digest(self, presented: _Presented, client: HttpClient) -> bytes:
        """Return what a verdict is known by: without this process's key it does not tell what was presented.

        The client's address is part of it, since a plugin may judge by it.
        """
        parts = (
            presented.method.encode(),
            presented.data,
            presented.certificate,
            presented.claim.encode(),
            client.ip.encode(),
        )
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(4) + part)  # the lengths: no part can reach into the next
        return digest.digest()


class _Verdicts:
    """Verdicts of the last moment, bounded in number. Where there are too many, the addresses with most lose theirs."""

    def __init__(self, anonymous_role: str) -> None:
        self._anonymous_role = anonymous_role
        self._kept: dict[bytes, tuple[float, HttpIdentity, str]] = {}
        self._by_owner: MembersByOwner[bytes] = MembersByOwner()

    def find(self, key: bytes) -> HttpIdentity | None:
        """Return the identity behind credentials whose verdict still holds."""
        until, identity, _ = self._kept.get(key, (0.0, None, ""))
        if identity is None or until <= trio.current_time() or _has_ended(identity.principal):
            return None
        return identity

    def keep(self, key: bytes, identity: HttpIdentity, client_address: str) -> None:
        """Keep a verdict, for clients at this address, for VERDICT_LIFETIME_S."""
        now = trio.current_time()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest][0] > now:
                break
            self._drop(oldest)
        if key in self._kept:
            self._drop(key)
        if len(self._kept) >= VERDICTS_MAX:
            victim = self._by_owner.oldest(self._by_owner.owner_with_most())
            assert victim is not None  # there are VERDICTS_MAX of them
            self._drop(victim)
        owner = owner_of("", client_address)
        self._kept[key] = now + VERDICT_LIFETIME_S, identity, owner
        self._by_owner.add(owner, key)

    def _drop(self, key: bytes) -> None:
        self._by_owner.remove(self._kept.pop(key)[2], key)


class _OwnAuthorization:
    """The proxy's own ``Authorization`` for brokers, from ``brokers.credentials``."""

    def __init__(self, config: Config, auth: RpcPool, nursery: trio.Nursery) -> None:
        credentials = config.brokers.credentials
        self._fits = credentials is not None and credentials.method in {"token", "oauth2", "basic"}
        self._auth = auth
        self._flight = SingleFlight(self._fetch, nursery)
        self._kept = b""
        self._until = 0.0

    async def value(self) -> bytes:
        """Return the header's value; empty where there are no credentials for one. Raises RequestRefused."""
        if not self._fits:
            return b""
        if trio.current_time() < self._until:
            return self._kept
        await enter_task()
        try:
            return await self._flight.result()
        except RpcError:
            text = "The proxy has no credentials for the brokers at the moment"
            raise RequestRefused(503, text, "no_own_credentials") from None

    async def _fetch(self) -> bytes:
        exchange = credentials_for(self._auth, "", configured=True)
        method, data = await exchange.auth_data_for(None)
        left_s = OWN_LIFETIME_S
        if exchange.expires_at_unix_ms:
            left_s = min(left_s, exchange.expires_at_unix_ms / 1000 - time.time() - OWN_MARGIN_S)
        self._kept = b"Bearer " + data if method == "token" else b"Basic " + base64.b64encode(data)
        self._until = trio.current_time() + left_s
        return self._kept


def _query_token(head: RequestHead) -> bytes | None:
    """Return the token in the query of a request below /ws, where WebSocket clients that can set no header have it.

    Raises RequestRefused for several.
    """
    if head.path != "/ws" and not head.path.startswith("/ws/"):
        return None
    query = head.target.partition(b"?")[2]
    tokens = [value for name, value in parse_qsl(query, keep_blank_values=True) if name == b"token"]
    if len(tokens) > 1:
        raise RequestRefused(400, "several tokens in the query", "several_credentials")
    return tokens[0] if tokens else None


def _has_ended(principal: Principal) -> bool:
    return principal.HasField("expires_at_unix_ms") and principal.expires_at_unix_ms <= time.time() * 1000
