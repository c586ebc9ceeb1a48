"""The configuration's types. Docstrings of the tables become the operators' reference (docs/configuration.md).

Every type is frozen and forbids unknown fields, so a misspelt key is an error that names it. The unit is the last part
of a name. A key exists only for a feature that exists: a key without effect would mislead.
"""

# mypy: implicit-reexport
# ruff: noqa: F401 -- the tables of all modules are imported from here

from typing import Annotated

from msgspec import Meta

from proxy.config.types.authentication import (
    Authentication,
    BasicAuthentication,
    KubernetesIssuer,
    OidcAuthentication,
    SaslAuthentication,
    ScramAuthentication,
    TlsAuthentication,
    TokenAuthentication,
)
from proxy.config.types.base import (
    MIB,
    PULSAR_FRAME_BYTES_MAX,
    CongestionControl,
    NonEmpty,
    NonNegative,
    Port,
    PortPair,
    Positive,
    Strict,
    TlsVersion,
    Workers,
)
from proxy.config.types.brokers import BrokerCredentials, Brokers, BrokerTls
from proxy.config.types.connections import Limits, Quota, Relay, Session
from proxy.config.types.http import Http, HttpListener, HttpRoute
from proxy.config.types.listeners import Listener, ListenerCertificate, ListenerTls
from proxy.config.types.operation import Admin, Audit, Cluster, Log, Metrics, Reload, Shutdown

HTTP_LISTENERS_MAX = 32
"""Listeners that a worker gets in one message."""

QUOTAS_MAX = 64
"""Tables `[[quota]]`: each is looked at for each new principal."""


class Config(Strict, frozen=True):
    """The whole configuration."""

    cluster: Cluster = Cluster()
    listener: tuple[Listener, ...] = (Listener(),)
    http_listener: Annotated[tuple[HttpListener, ...], Meta(max_length=HTTP_LISTENERS_MAX)] = ()
    http: Http = Http()
    brokers: Brokers = Brokers()
    authentication: Authentication = Authentication()
    session: Session = Session()
    relay: Relay = Relay()
    limits: Limits = Limits()
    quota: Annotated[tuple[Quota, ...], Meta(max_length=QUOTAS_MAX)] = ()
    shutdown: Shutdown = Shutdown()
    reload: Reload = Reload()
    metrics: Metrics = Metrics()
    admin: Admin = Admin()
    log: Log = Log()
    audit: Audit = Audit()
