"""A broker of some release and a cluster before it: TLS on both sides, three methods, roles that may do little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.broker_jars import source_of
from local.distribution import pulsar_home
from local.ports import free_port
from local.standalone import ROLES, Standalone

from .certificates import Authority
from .cluster import NO_PINGS_S
from .issuer import Issuer
from .listeners import ManyListenersCluster
from .security import NAMESPACE, grant

AUDIENCE = "urn:pulsar:clients"
TEAM = "secured/team"
"""Role `team` may use it."""
ALICES = "secured/alices"
"""Alice may use it, the proxy may not."""
TRANSACTIONS = "pulsar/system"
"""The classic Java client looks up topics in it for transactions."""
CHECK_INTERVAL_S = 5
_AUTHENTICATION = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
_SEVERAL_ROLES = "org.apache.pulsar.broker.authorization.MultiRolesTokenAuthorizationProvider"


@dataclass(frozen=True)
class Deployment:
    """What clients need to know of it. `checked`: the brokers' `authenticateOriginalAuthData`."""

    version: str
    checked: bool
    broker: Standalone
    broker_tls_port: int
    cluster: ManyListenersCluster
    issuer: Issuer
    authority: Authority

    @property
    def tls_url(self) -> str:
        """The listener with TLS."""
        return f"pulsar+ssl://localhost:{self.cluster.ports[0]}"

    @property
    def trust(self) -> dict[str, object]:
        """The option of clients that use TLS."""
        return {"trust": self.authority.file}

    @property
    def certificate(self) -> dict[str, object]:
        """The options of a client with alice's certificate."""
        pair = self.authority.client("alice")
        return {**self.trust, "certificate": pair.certificate, "key": pair.key}

    def token(self, role: str, lifetime_s: float | None = None) -> str:
        """A token with one role."""
        return self.issuer.account_token(role, lifetime_s, roles=[role])

    def oidc_token(self, *roles: str) -> str:
        """A token of OpenID Connect with several roles."""
        return self.issuer.account_token(roles[0], 3600, roles=roles, aud=AUDIENCE)


def _conf(data: Path, tls_port: int, authority: Authority, issuer: Issuer, *, checked: bool) -> dict[str, str]:
    server = authority.server("broker")
    key = data / "issuer.der"
    key.write_bytes(issuer.account_public_key)
    conf = {
        "brokerServicePortTls": str(tls_port),
        "tlsCertificateFilePath": server.certificate,
        "tlsKeyFilePath": server.key,
        "tlsTrustCertsFilePath": authority.file,
        "authenticationProviders": f"{_AUTHENTICATION}Token,{_AUTHENTICATION}Tls",
        "tokenSecretKey": "",
        "tokenPublicKey": f"file://{key}",
        "tokenAuthClaim": "roles",
        "superUserRoles": "admin",
        "authenticateOriginalAuthData": str(checked).lower(),
        "authenticationRefreshCheckSeconds": str(CHECK_INTERVAL_S),
        "transactionCoordinatorEnabled": "true",
        "keepAliveIntervalSeconds": str(NO_PINGS_S),
    }
    if checked:  # unchecked, it would take the proxy's roles for the clients'
        conf["authorizationProvider"] = _SEVERAL_ROLES
    return conf


def _grant(broker: Standalone) -> None:
    grant(broker)
    admin = broker.admin()
    for namespace, roles in {NAMESPACE: ["proxy"], TEAM: ["team", "proxy"], ALICES: ["alice"]}.items():
        if namespace != NAMESPACE:
            admin.create_namespace(namespace)
        for role in roles:
            admin.grant_namespace(namespace, role)
    for role in ("alice", "team", "proxy"):
        admin.grant_namespace(TRANSACTIONS, role)


def _cluster(broker: Standalone, broker_tls_port: int, authority: Authority, issuer: Issuer) -> ManyListenersCluster:
    server = authority.server("proxy")
    tables = {
        "cluster": {"forwarders": 1},
        "brokers": {
            "service_url": f"pulsar+ssl://localhost:{broker_tls_port}",
            "tls": {"trust": authority.file},
            "credentials": {"method": "token", "file": str(broker.token_file("proxy"))},
            "forward_authorization_credentials": True,
        },
        "authentication": {"enabled": True, "failure_delay_ms": 0},
        "authentication.token": {"public_key": str(broker.data / "issuer.der")},
        "authentication.oidc": {
            "allowed_issuers": [issuer.url],
            "allowed_audiences": [AUDIENCE],
            "role_claim": "roles",
            "require_https": False,
        },
        "authentication.tls": {},
    }
    tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
    return ManyListenersCluster(tables, {"tls": tls})


@contextmanager
def deployment(version: str, directory: Path, *, checked: bool) -> Iterator[Deployment]:
    """Start the broker and prepare its cluster, which the caller starts."""
    authority, data, tls_port = Authority(directory, "ours"), directory / "broker", free_port()
    data.mkdir()
    with Issuer() as issuer:
        conf = _conf(data, tls_port, authority, issuer, checked=checked)
        broker = Standalone(pulsar_home(source=source_of(version)), data, secured=True, conf=conf)
        for role in ROLES:  # in place of those that it would sign itself
            broker.token_file(role).parent.mkdir(mode=0o700, exist_ok=True)
            broker.token_file(role).write_text(issuer.account_token(role, roles=[role]))
        with broker:
            _grant(broker)
            cluster = _cluster(broker, tls_port, authority, issuer)
            try:
                yield Deployment(version, checked, broker, tls_port, cluster, issuer, authority)
            finally:
                broker.kill()  # its data is not needed, and Pulsar 5 took 20 s to end
