"""An OpenID Connect issuer on loopback: it describes itself, shows its keys, gives tokens for client credentials."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from local.ports import free_port

from .cluster import HOST

DISCOVERY = "/.well-known/openid-configuration"


class Issuer:
    """Starts and stops at one port, with the same keys. Clients' tokens and the accounts' have keys of their own, so
    that the first may be rotated while a broker knows the second from a file.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://localhost:{self.port}"
        self.accounts: dict[str, str] = {}
        """Secrets by client_id, which is the token's role, too."""
        self.requests: Counter[str] = Counter()
        """How often each path was asked for."""
        self.forms: list[dict[str, str]] = []
        """What came to the endpoint for tokens."""
        self.token_lifetime_s = 3600
        self._tls = tls
        self._rotations = 0
        self._client_key = _new_key()
        self._account_key = _new_key()
        self._server: ThreadingHTTPServer | None = None

    @property
    def account_public_key(self) -> bytes:
        """The key of the accounts' tokens, as Pulsar's `tokenPublicKey` wants it."""
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        return self._account_key.public_key().public_bytes(*form)

    # ---- tokens

    def rotate(self) -> None:
        """A new key for clients' tokens; the old one is dropped."""
        self._rotations += 1
        self._client_key = _new_key()

    def token(self, role: str, audience: str, lifetime_s: float = 600, **claims: object) -> str:
        """A client's token."""
        times = {"iat": int(time.time()), "exp": int(time.time() + lifetime_s)}
        written = {"iss": self.url, "sub": role, "aud": audience, **times, **claims}
        return jwt.encode(written, self._client_key, "RS256", headers={"kid": f"clients-{self._rotations}"})

    def account_token(self, role: str, lifetime_s: float | None = None, **claims: object) -> str:
        """An account's token, as the endpoint gives it; without a lifetime it has no end."""
        end = {} if lifetime_s is None else {"exp": int(time.time() + lifetime_s)}
        written = {"iss": self.url, "sub": role, **end, **claims}
        return jwt.encode(written, self._account_key, "RS256", headers={"kid": "accounts"})

    # ---- life

    def start(self) -> None:
        """Listen."""
        server = ThreadingHTTPServer((HOST, self.port), _handler(self))
        if self._tls is not None:
            # Not in accept(): a client that makes no handshake would hold up all others.
            server.socket = self._tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Be gone: connections are refused."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- answers

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON for a request."""
        self.requests[path] += 1
        if path == DISCOVERY:
            return 200, {"issuer": self.url, "jwks_uri": f"{self.url}/keys", "token_endpoint": f"{self.url}/token"}
        if path == "/keys":
            return 200, {
                "keys": [_jwk(self._client_key, f"clients-{self._rotations}"), _jwk(self._account_key, "accounts")]
            }
        if path == "/token":
            return self._grant(dict(parse_qsl(body.decode())))
        return 404, {}

    def _grant(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        self.forms.append(form)
        account = form.get("client_id", "")
        if form.get("grant_type") != "client_credentials":
            return 400, {"error": "unsupported_grant_type"}
        if not account or self.accounts.get(account) != form.get("client_secret"):
            return 401, {"error": "invalid_client"}
        token = self.account_token(account, self.token_lifetime_s)
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": self.token_lifetime_s}


def _new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _jwk(key: rsa.RSAPrivateKey, name: str) -> dict[str, Any]:
    return {**jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": name, "use": "sig"}


def _handler(issuer: Issuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            self._respond(b"")

        def do_POST(self) -> None:
            self._respond(self.rfile.read(int(self.headers["content-length"])))

        def _respond(self, body: bytes) -> None:
            status, value = issuer.answer(self.path, body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing: pytest's output is for tests."""

    return Handler
