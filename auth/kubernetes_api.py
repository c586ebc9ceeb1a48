"""Kubernetes' API server as a source of what OpenID Connect needs: the issuer of service accounts, and its keys.

The pod's own token opens it. That token goes to the API server alone: over TLS with the cluster's authority, through no
HTTP proxy, after no redirect, and to no address that an answer names.
"""

import os
import re
from collections.abc import Mapping

import httpx

from auth.http import DISCOVERY_PATH, AnswerT, IssuerClient
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.common.reloading_file import ReloadingFile
from proxy.config.types import KubernetesIssuer

KEY = "authentication.oidc.kubernetes"
KEYS_PATH = "/openid/v1/jwks"
TOKEN_BYTES_MAX = 64 * 1024

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1: nothing that could end the header


class KubernetesApi:
    """Client of the API server that the configuration names, or the pod's environment. Raises ConfigError.

    ``transport`` replaces the network in tests.
    """

    def __init__(
        self, config: KubernetesIssuer, timeout_ms: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = api_server_url(config.api_server, os.environ)
        self._client = IssuerClient(
            f"{KEY}.trust", trust=config.trust, timeout_ms=timeout_ms, plain_http="nowhere", transport=transport
        )
        # Kubernetes replaces the token about every hour.
        self._token = ReloadingFile(f"{KEY}.token_file", [config.token_file], lambda: _read_token(config.token_file))

    async def get_discovery(self, kind: type[AnswerT]) -> AnswerT:
        """Ask for the description of the issuer; raises HttpFailed."""
        return await self._get(DISCOVERY_PATH, kind)

    async def get_keys(self, kind: type[AnswerT]) -> AnswerT:
        """Ask for the keys of the API server itself; raises HttpFailed."""
        return await self._get(KEYS_PATH, kind)

    async def _get(self, path: str, kind: type[AnswerT]) -> AnswerT:
        return await self._client.get_json(self.url + path, kind, bearer=await self._token.current_value())


def api_server_url(configured: str, environment: Mapping[str, str]) -> str:
    """Return the API server's URL without a slash at its end: the configured one, or the pod's. Raises ConfigError."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not configured and not host:
        raise ConfigError(f"{KEY}.api_server: is needed outside of a pod, where KUBERNETES_SERVICE_HOST is not set")
    port = environment.get("KUBERNETES_SERVICE_PORT") or "443"
    return (configured or f"https://{f'[{host}]' if ':' in host else host}:{port}").removesuffix("/")


def _read_token(file: str) -> str:
    token = read_file(file, TOKEN_BYTES_MAX + 1).strip()
    if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ConfigError(f"{KEY}.token_file: {file} holds no token of a service account")
    return token.decode()
