"""A real kube-apiserver on loopback, with its etcd and nothing else: it issues tokens of service accounts.

The programs are those of `make e2e-kubernetes`.
"""

from __future__ import annotations

import ssl
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import jwt
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from local.kubernetes import Lab
from local.ports import free_port
from local.process import OwnedProcess

from .waiting import eventually

READY_S = 180.0
ADMIN = "the-admins-token"
_RBAC = "rbac.authorization.k8s.io"


def missing_programs() -> list[str]:
    """Return the names of the programs that are not built on this machine."""
    return [name for name in ("etcd", "kube-apiserver") if name in Lab().missing()]


class KubeApiserver:
    """Runs within the block. `trust` is the file of its authority."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"https://localhost:{self.port}"
        self.trust = directory / "ca.crt"
        self._directory = directory
        self._processes = ExitStack()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.trust)
        certificate = authority.issue_cert("localhost")
        certificate.cert_chain_pems[0].write_to_path(directory / "api.crt")
        certificate.private_key_pem.write_to_path(directory / "api.key")
        (directory / "tokens.csv").write_text(f"{ADMIN},admin,1,system:masters\n")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (directory / "sa.key").write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (directory / "sa.pub").write_bytes(public)

    def __enter__(self) -> Self:
        programs, at = Lab().directory / "bin", self._directory
        etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        with ExitStack() as undo:
            store = [programs / "etcd", f"--data-dir={at}/etcd", "--unsafe-no-fsync"]
            store += [f"--listen-{kind}-urls={url}" for kind, url in (("client", etcd), ("peer", peers))]
            store += [f"--advertise-client-urls={etcd}"]
            undo.callback(OwnedProcess(store, log=at / "etcd.log").kill)
            server = [
                programs / "kube-apiserver",
                *(f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={self.port}"),
                *("--advertise-address=127.0.0.1", "--service-cluster-ip-range=10.79.0.0/24"),
                *(f"--tls-cert-file={at}/api.crt", f"--tls-private-key-file={at}/api.key"),
                *(f"--token-auth-file={at}/tokens.csv", "--authorization-mode=RBAC"),
                *(f"--service-account-issuer={self.url}", f"--service-account-key-file={at}/sa.pub"),
                f"--service-account-signing-key-file={at}/sa.key",
                f"--service-account-jwks-uri={self.url}/openid/v1/jwks",
                *("--endpoint-reconciler-type=none", f"--cert-dir={at}/certificates"),
            ]
            undo.callback(OwnedProcess(server, log=at / "kube-apiserver.log").kill)
            eventually(self._is_ready, what="kube-apiserver is ready", within_s=READY_S)
            self._processes = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()

    def status_of(self, path: str, token: str = "") -> int:
        """Return the status of an answer to this token; empty: to nobody."""
        return self._send("GET", path, token).status_code

    def create_account(self, namespace: str, name: str) -> None:
        """Create a service account, and its namespace where it is missing."""
        self._create("/api/v1/namespaces", {"metadata": {"name": namespace}}, exists_ok=True)
        self._create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})

    def delete_account(self, namespace: str, name: str) -> None:
        """Delete a service account."""
        self._send("DELETE", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}", ADMIN).raise_for_status()

    def token(self, namespace: str, name: str, *audiences: str, lifetime_s: int = 600) -> str:
        """Return a new token of a service account, as kubelets get it; without audiences, for the API server."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        spec = {"audiences": list(audiences), "expirationSeconds": lifetime_s}
        answer = self._create(path, {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec})
        return str(answer["status"]["token"])

    def with_claims(self, token: str, **claims: object) -> str:
        """Return a token with other claims, signed by the API server's own key: as it was at another time, perhaps."""
        read: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
        key = (self._directory / "sa.key").read_bytes()
        return jwt.encode({**read, **claims}, key, "RS256", headers={"kid": jwt.get_unverified_header(token)["kid"]})

    def open_discovery_to_anyone(self) -> None:
        """Let those without an account read the issuer's description and keys, as an issuer on the internet does."""
        role = "system:service-account-issuer-discovery"
        body = {
            "metadata": {"name": "discovery-for-anyone"},
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": _RBAC, "kind": "Group", "name": "system:unauthenticated"}],
        }
        self._create(f"/apis/{_RBAC}/v1/clusterrolebindings", body, exists_ok=True)

    def _create(self, path: str, body: dict[str, Any], *, exists_ok: bool = False) -> dict[str, Any]:
        answer = self._send("POST", path, ADMIN, body)
        if not (exists_ok and answer.status_code == httpx.codes.CONFLICT):
            assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def _send(self, method: str, path: str, token: str, body: dict[str, Any] | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        tls = ssl.create_default_context(cafile=str(self.trust))
        with httpx.Client(verify=tls, trust_env=False, timeout=60) as client:
            return client.request(method, self.url + path, headers=headers, json=body)

    def _is_ready(self) -> bool:
        try:
            return self.status_of("/readyz", ADMIN) == httpx.codes.OK
        except httpx.HTTPError:
            return False
