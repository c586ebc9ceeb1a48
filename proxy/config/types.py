"""The configuration's types. Field comments in docstrings become the operators' reference (docs/configuration.md).

Every type is frozen and forbids unknown fields, so a misspelt key is an error that names it. Units stand last in a
name. Only what is built has a key: a key that does nothing would be a lie.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Meta(ge=1, le=256)]
NonEmpty = Annotated[str, Meta(min_length=1)]
CongestionControl = Annotated[str, Meta(min_length=1, max_length=15, pattern="^[a-z][a-z0-9_-]*$")]

MIB = 1024 * 1024
PULSAR_FRAME_BYTES_MAX = 5 * MIB + 10 * 1024
"""Pulsar's largest frame: its default maxMessageSize and 10 KiB."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all tables have in common."""


class Cluster(Strict, frozen=True):
    """The cluster of processes as a whole.

    name: value of the label `cluster` of every metric; Pulsar's own name for the cluster behind the proxy fits well
    runtime_dir: folder of the Unix sockets, made with mode 0700; at most 80 bytes long, and of this cluster alone
    forwarders: forwarding worker processes; 0 means one for each CPU
    lookup_workers: lookup worker processes
    auth_workers: auth worker processes
    """

    name: NonEmpty = "pulsar"
    runtime_dir: NonEmpty = "/run/pulsar-trio-proxy"
    forwarders: Annotated[int, Meta(ge=0, le=256)] = 0
    lookup_workers: Workers = 1
    auth_workers: Workers = 1


class Listener(Strict, frozen=True):
    """Where clients connect; one table `[[listener]]` for each.

    bind: `address:port`; an IPv6 address stands in brackets
    """

    bind: NonEmpty = "0.0.0.0:6650"


class BrokerCredentials(Strict, frozen=True):
    """Who the proxy is at the brokers. Its role must be among the brokers' `proxyRoles`.

    method: how the proxy authenticates itself
    file: file that holds the token; it is read again when it changes, so it may be rotated at any time
    """

    method: Literal["token"]
    file: NonEmpty


class Brokers(Strict, frozen=True):
    """The brokers behind the proxy.

    service_url: `pulsar://host:port`, or several hosts with commas between them
    allowed_hosts: patterns (`*`, `?`) of broker hosts that a client may be relayed to
    allowed_addresses: networks (`10.0.0.0/8`) or addresses that a broker host may resolve to; `*` allows all
    allowed_ports: ports that a client may be relayed to
    credentials: who the proxy is at the brokers; absent: the proxy does not authenticate itself
    connect_timeout_ms: longest time for one TCP connection to a broker
    handshake_timeout_ms: longest time for connection and handshake with a broker together;
        shorter than `limits.handshake_timeout_ms`, so that a client still learns of it
    probe_interval_ms: time between two looks whether the brokers of `service_url` answer (`/readyz` depends on it)
    pooled_connections_max: connections for lookups that one lookup worker may hold; there is one for each pair of
        broker and principal
    idle_connection_timeout_ms: a connection for lookups that was not used for this long is closed
    """

    service_url: NonEmpty = "pulsar://localhost:6650"
    allowed_hosts: tuple[NonEmpty, ...] = ("*",)
    allowed_addresses: tuple[NonEmpty, ...] = ("*",)
    allowed_ports: tuple[Port, ...] = (6650, 6651)
    credentials: BrokerCredentials | None = None
    connect_timeout_ms: Positive = 5_000
    handshake_timeout_ms: Positive = 8_000
    probe_interval_ms: Positive = 5_000
    pooled_connections_max: Positive = 1_000
    idle_connection_timeout_ms: Positive = 60_000


class TokenAuthentication(Strict, frozen=True):
    """Clients bring a JSON Web Token (method `token`). At least one of the two keys is needed.

    secret_key: file with the shared secret, its raw bytes as `pulsar tokens create-secret-key` writes them
        (HS256, HS384, HS512)
    public_key: file with the public key, PEM or DER as `pulsar tokens create-key-pair` writes it
        (RSA: RS and PS, EC: ES, each with 256, 384 and 512)
    role_claim: the claim that is the client's role; of a list the first entry counts
    audience_claim: the claim that names for whom a token is meant
    audience: what that claim must hold; empty: it is not looked at
    allowed_clock_skew_ms: how far the clocks of issuer and proxy may differ
    """

    secret_key: str = ""
    public_key: str = ""
    role_claim: NonEmpty = "sub"
    audience_claim: NonEmpty = "aud"
    audience: str = ""
    allowed_clock_skew_ms: NonNegative = 0


class Authentication(Strict, frozen=True):
    """Who may come in.

    enabled: whether clients must authenticate themselves; without it, everybody who reaches the proxy may use it
    failure_delay_ms: how long a failed authentication waits for its answer, whatever the reason was
    token: the provider for method `token`
    """

    enabled: bool = False
    failure_delay_ms: Annotated[int, Meta(ge=0, le=10_000)] = 100
    token: TokenAuthentication | None = None


class Relay(Strict, frozen=True):
    """Connections that have become a relay between a client and a broker.

    broker_congestion_control: who decides how fast bytes are sent to brokers (TCP_CONGESTION): `system` (sysctl
        net.ipv4.tcp_congestion_control), the name of one, or `unpaced`: the system's unless that is BBR, whose timer
        for each packet costs most of a proxy's CPU time where brokers are near; then `reno`
    client_congestion_control: the same towards clients, which may be far away
    crash_safe: whether the supervisor keeps a copy of each relay's sockets, so that a forwarder that dies or is
        replaced leaves its relays to its successor; without it they end with their forwarder
    keep_alive_idle_ms: after this long without a byte the kernel asks a peer whether it is still there (TCP_KEEPIDLE;
        whole seconds, here and below)
    keep_alive_probe_interval_ms: time between two such questions (TCP_KEEPINTVL)
    keep_alive_probes: after so many without an answer the peer is given up (TCP_KEEPCNT)
    half_close_timeout_ms: once one side has ended its direction, the other may go on as long as bytes move at least
        this often
    user_timeout_ms: once a peer has not acknowledged or not taken what was sent to it for this long, its connection is
        given up (TCP_USER_TIMEOUT); 0: only the kernel's own, much longer bounds
    """

    broker_congestion_control: CongestionControl = "unpaced"
    client_congestion_control: CongestionControl = "system"
    crash_safe: bool = True
    keep_alive_idle_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 60_000
    keep_alive_probe_interval_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 10_000
    keep_alive_probes: Annotated[int, Meta(ge=1, le=127)] = 6
    half_close_timeout_ms: Positive = 60_000
    user_timeout_ms: NonNegative = 120_000


class Limits(Strict, frozen=True):
    """Bounds on what strangers can make the cluster do.

    max_connections: clients' connections in the whole cluster
    max_connections_per_address: clients' connections from one IP address to one forwarder; 0: no limit
    max_concurrent_lookups: lookup requests that a lookup worker works on at a time; above it they are answered
        `TooManyRequests`
    max_concurrent_lookups_per_connection: the same for one client's connection
    handshake_timeout_ms: longest time from accepting a client to Connected
    lookup_timeout_ms: longest time for one lookup request, redirects included
    keep_alive_interval_ms: a client in lookup mode that is silent this long is sent a PING, and closed if it says
        nothing within another such time
    max_command_bytes: largest frame that a client may send before it is relayed; a relay has no such limit
    max_broker_frame_bytes: largest frame that a broker may answer a lookup or a handshake with
    drain_timeout_ms: how long a drain waits for clients to leave before it closes their connections
    """

    max_connections: Positive = 10_000
    max_connections_per_address: NonNegative = 0
    max_concurrent_lookups: Positive = 50_000
    max_concurrent_lookups_per_connection: Positive = 5_000
    handshake_timeout_ms: Positive = 10_000
    lookup_timeout_ms: Positive = 10_000
    keep_alive_interval_ms: Positive = 30_000
    max_command_bytes: Annotated[int, Meta(ge=1024, le=16 * MIB)] = 128 * 1024
    max_broker_frame_bytes: Annotated[int, Meta(ge=1024, le=128 * MIB)] = PULSAR_FRAME_BYTES_MAX
    drain_timeout_ms: NonNegative = 30_000


class Admin(Strict, frozen=True):
    """The HTTP port for operators: `/metrics`, `/healthz`, `/readyz`, `/status`. It asks for no password.

    bind: `address:port`; keep it away from clients
    """

    bind: NonEmpty = "127.0.0.1:8080"


class Log(Strict, frozen=True):
    """What is written to standard error.

    level: the least serious entries that are written
    format: `logfmt` (key=value) or `json`, one entry a line
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class Config(Strict, frozen=True):
    """The whole configuration."""

    cluster: Cluster = Cluster()
    listener: tuple[Listener, ...] = (Listener(),)
    brokers: Brokers = Brokers()
    authentication: Authentication = Authentication()
    relay: Relay = Relay()
    limits: Limits = Limits()
    admin: Admin = Admin()
    log: Log = Log()
