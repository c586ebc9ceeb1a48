"""Kubernetes' API server and its issuer without a network: what they answer, and what they were asked.

As the real one, it answers 401 to a token that it does not know, and 403 to nobody and to accounts without the right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio
import trustme
from fake_issuer import jwk
from tokens import rsa_key

API = "https://10.96.0.1:6443"
CLUSTER_ISSUER = "https://kubernetes.default.svc.cluster.local"
DISCOVERY = "/.well-known/openid-configuration"
JWKS = "/openid/v1/jwks"


@dataclass
class FakeKubernetes:
    """``accounts``: tokens, and whether each has the right. ``elsewhere``: answers of other hosts, by URL."""

    directory: Path
    issuer: str = CLUSTER_ISSUER
    keys: list[Any] = field(default_factory=lambda: [jwk(rsa_key(), "first")])
    accounts: dict[str, bool] = field(default_factory=lambda: {"pod-token-1": True})
    elsewhere: dict[str, Any] = field(default_factory=dict)
    redirect: str = ""
    down: bool = False
    requests: list[httpx.Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        trustme.CA().cert_pem.write_to_path(self.trust)
        self.token.write_text("pod-token-1\n")

    @property
    def token(self) -> Path:
        """The file with the pod's token."""
        return self.directory / "token"

    @property
    def trust(self) -> Path:
        """The file with the cluster's authority."""
        return self.directory / "ca.crt"

    @property
    def transport(self) -> httpx.MockTransport:
        """In place of the network."""
        return httpx.MockTransport(self._answer)

    @property
    def asked(self) -> list[str]:
        """The URLs that were asked for."""
        return [str(request.url) for request in self.requests]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        await trio.lowlevel.checkpoint()
        url = str(request.url)
        if request.url.host != "10.96.0.1":
            return httpx.Response(200, json=self.elsewhere[url]) if url in self.elsewhere else httpx.Response(404)
        if self.down:
            raise httpx.ConnectError("nobody there")
        if refusal := self._refusal(request.headers.get("authorization", "")):
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": refusal}
            return httpx.Response(refusal, json=status)
        if self.redirect:
            return httpx.Response(302, headers={"location": self.redirect})
        if request.url.path == DISCOVERY:
            return httpx.Response(200, json={"issuer": self.issuer, "jwks_uri": f"https://10.0.0.9:6443{JWKS}"})
        return httpx.Response(200, json={"keys": self.keys}) if request.url.path == JWKS else httpx.Response(404)

    def _refusal(self, authorization: str) -> int:
        scheme, _, token = authorization.partition(" ")
        if not authorization:
            return 403
        if scheme != "Bearer" or token not in self.accounts:
            return 401
        return 0 if self.accounts[token] else 403
