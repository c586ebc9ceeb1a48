"""An OpenID Connect issuer without a network: what it answers, how slowly, and what it was asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import jwt
import trio
from tokens import rsa_key

URL = "https://issuer.example"


def jwk(key: Any, name: str | None, **more: Any) -> dict[str, Any]:
    """A private key's public half, as a set of keys has it."""
    kind = jwt.algorithms.ECAlgorithm if hasattr(key, "curve") else jwt.algorithms.RSAAlgorithm
    entry: dict[str, Any] = kind.to_jwk(key.public_key(), as_dict=True)  # type: ignore[attr-defined]
    entry.pop("key_ops", None)
    return {**entry, **({} if name is None else {"kid": name}), **more}


@dataclass
class FakeIssuer:
    """Answers three paths. ``answers`` may replace a path's answer; ``asked`` are the paths that were asked for."""

    url: str = URL
    keys: list[Any] = field(default_factory=lambda: [jwk(rsa_key(), "first")])
    metadata: dict[str, Any] = field(default_factory=dict)
    token: dict[str, Any] = field(default_factory=lambda: {"access_token": "token-1", "expires_in": 1000})
    answers: dict[str, Callable[[], httpx.Response]] = field(default_factory=dict)
    delay_s: float = 0.0
    down: bool = False
    asked: list[str] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    answered: int = 0

    @property
    def transport(self) -> httpx.MockTransport:
        """In place of the network."""
        return httpx.MockTransport(self._answer)

    @property
    def fetches(self) -> int:
        """How often it was asked to describe itself, which every fetch begins with."""
        return sum(path.endswith("/.well-known/openid-configuration") for path in self.asked)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        self.requests.append(request)
        await trio.sleep(self.delay_s)
        self.answered += 1
        if self.down:
            raise httpx.ConnectError("nobody there")
        if path in self.answers:
            return self.answers[path]()
        if path.endswith("/.well-known/openid-configuration"):
            own = {"issuer": self.url, "jwks_uri": f"{URL}/keys", "token_endpoint": f"{URL}/token"}
            return httpx.Response(200, json={**own, **self.metadata})
        if path == "/keys":
            return httpx.Response(200, content=json.dumps({"keys": self.keys}))
        if path == "/token":
            return httpx.Response(200, json=self.token)
        return httpx.Response(404)


def issued(
    key: Any = None, algorithm: str = "RS256", *, name: str | None = "first", issuer: str = URL, **claims: Any
) -> bytes:
    """A token of the issuer for alice, unless the claims say otherwise; a claim of `...` is left out."""
    now = int(time.time())
    claims = {"iss": issuer, "sub": "alice", "aud": "pulsar", "exp": now + 600, **claims}
    written = {name: value for name, value in claims.items() if value is not ...}
    headers = {} if name is None else {"kid": name}
    return jwt.encode(written, key or rsa_key(), algorithm, headers=headers).encode()
