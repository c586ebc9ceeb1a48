"""The configuration's types. Field comments in docstrings become the operators' reference (docs/configuration.md).

Every type is frozen and forbids unknown fields, so a misspelt key is an error that names it. Units stand last in a
name. Only what is built has a key: a key that does nothing would be a lie.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Workers = Annotated[int, Meta(ge=1, le=256)]
NonEmpty = Annotated[str, Meta(min_length=1)]
TlsVersion = Literal["1.2", "1.3"]
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
    forwarders: forwarding worker processes; 0 means one for each CPU that this process may use and that the CPU quota
        of its container (cgroup) has room for, rounded up, and no more than have room in half of the container's memory
    lookup_workers: lookup worker processes
    auth_workers: auth worker processes
    """

    name: NonEmpty = "pulsar"
    runtime_dir: NonEmpty = "/run/pulsar-trio-proxy"
    forwarders: Annotated[int, Meta(ge=0, le=256)] = 0
    lookup_workers: Workers = 1
    auth_workers: Workers = 1


class ListenerTls(Strict, frozen=True):
    """TLS towards the clients of one listener. The files are read again when they change.

    certificate: PEM file with the server's certificate, and behind it those that lead to its root
    key: PEM file with the certificate's private key, without a passphrase
    client_ca: PEM file with the authorities that may sign clients' certificates; empty: clients are not asked for one
    require_client_certificate: whether a client without a certificate is turned away
    minimum_version: the oldest version of TLS that is spoken
    """

    certificate: NonEmpty
    key: NonEmpty
    client_ca: str = ""
    require_client_certificate: bool = False
    minimum_version: TlsVersion = "1.2"


class Listener(Strict, frozen=True):
    """Where clients connect; one table `[[listener]]` for each.

    bind: `address:port`; an IPv6 address stands in brackets
    congestion_control: who decides how fast bytes are sent to clients, as `brokers.congestion_control`
    connections_max_reauth_ms: the same as in `[session]`, for this listener's clients and before all else; -1: what is
        said there counts
    methods_max_reauth_ms: the same for single authentication methods, before `connections_max_reauth_ms` of this table
    session_enforcement: the same as `session.enforcement`, for this listener's clients; `inherit`: what is said there
    tls: certificate and key of a listener for `pulsar+ssl://`; absent: it is one for `pulsar://`
    """

    bind: NonEmpty = "0.0.0.0:6650"
    congestion_control: CongestionControl = "system"
    connections_max_reauth_ms: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    methods_max_reauth_ms: dict[NonEmpty, NonNegative] = {}
    session_enforcement: Literal["inherit", "enforce", "observe"] = "inherit"
    tls: ListenerTls | None = None


class BrokerTls(Strict, frozen=True):
    """TLS towards brokers, where `brokers.service_url` begins with `pulsar+ssl`. Files are read again when they change.

    trust: PEM file with the authorities that sign brokers' certificates; empty: the system's
    certificate: PEM file with the proxy's own certificate; empty: it has none
    key: PEM file with its private key, without a passphrase
    verify_hostname: whether a broker's certificate must be for the name by which it is dialled
    minimum_version: the oldest version of TLS that is spoken
    """

    trust: str = ""
    certificate: str = ""
    key: str = ""
    verify_hostname: bool = True
    minimum_version: TlsVersion = "1.2"


class BrokerCredentials(Strict, frozen=True):
    """Who the proxy is at the brokers. Its role must be among the brokers' `proxyRoles`.

    method: how the proxy authenticates itself; `tls` is by `brokers.tls.certificate`
    file: the secret, read again when it changes, so it may be rotated at any time. `token`: the token; `basic`:
        `user:password`; `sasl`: the keytab; `oauth2`: JSON with `client_id` and `client_secret`
    token: the token itself, for method `token` in place of a file (from the environment, say)
    principal: for `sasl`, the proxy's Kerberos principal, such as `proxy/host@REALM`
    broker_service: for `sasl`, the first part of the brokers' principals: `broker` for `broker/<host>@REALM`
    issuer_url: for `oauth2`, where `/.well-known/openid-configuration` names the endpoint for tokens
    audience: for `oauth2`, for whom the token is wanted
    scope: for `oauth2`, which rights are wanted
    trust: for `oauth2`, PEM file with the authorities that sign the issuer's certificate; empty: the system's
    """

    method: Literal["token", "basic", "tls", "sasl", "oauth2"]
    file: str = ""
    token: str = ""
    principal: str = ""
    broker_service: NonEmpty = "broker"
    issuer_url: str = ""
    audience: str = ""
    scope: str = ""
    trust: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.method!r})"  # the rest may be a secret


class Brokers(Strict, frozen=True):
    """The brokers behind the proxy.

    service_url: `pulsar://host:port`, or several hosts with commas between them; each address of a host is a broker
        (but an IPv4 and an IPv6 address alone are one broker's). `pulsar+srv://name` finds hosts and ports in the SRV
        records of `_pulsar._tcp.name`, or else of the name itself, by priority and weight. With `pulsar+ssl://` and
        `pulsar+ssl+srv://` (`_pulsar-ssl._tcp.name`) TLS is spoken to all brokers
    dns_ttl_max_ms: names are asked for again when the TTL of the answer is over (which counts as at least 1 s), at the
        latest after this long; while DNS fails, brokers' last addresses go on counting. For the target of a relay an
        answer serves for as long again, 10 s at most, while the name is asked for in the background
    allowed_hosts: patterns (`*`, `?`) of further hosts that a client may be relayed to. Brokers of `service_url` need
        no entry: its hosts, names below one of them (where it has three labels or more, search domains included), and
        whatever is at an address that they resolve to
    allowed_addresses: networks (`10.0.0.0/8`) or addresses of further targets. Where `allowed_hosts` is set, too, a
        target must be in both. Loopback addresses must be named (`127.0.0.0/8`) unless a broker of `service_url` is at
        one. Link-local, metadata service, multicast and reserved addresses are never allowed. All hosts (`*`) at all
        addresses are refused where the proxy has credentials to lose (`credentials`, a certificate,
        `forward_authorization_credentials`): anybody could have them sent to a host of their own
    allowed_ports: ports that a client may be relayed to, beside those of brokers of `service_url`; empty: of these no
        others, of further targets 6650 and 6651
    through_proxy: whether `service_url` is another proxy's, behind which the brokers are: relays then go there, too,
        and that proxy resolves and checks their targets (here, `allowed_hosts`, if set, and `allowed_ports` count); the
        role of this proxy must be among its `authentication.proxy_roles`
    tls: how TLS is spoken to brokers
    credentials: who the proxy is at the brokers; absent: the proxy does not authenticate itself
    forward_authorization_credentials: whether a client's own credentials (of methods with one round, as tokens) are
        passed on behind the proxy's, for brokers with `authenticateOriginalAuthData`
    congestion_control: who decides how fast bytes are sent to brokers (TCP_CONGESTION): `system` (sysctl
        net.ipv4.tcp_congestion_control), the name of one, or `unpaced`: the system's unless that is BBR, whose timer
        for each packet costs most of a relay's CPU time where brokers are near; then `reno`
    connect_timeout_ms: longest time for one TCP connection to a broker, its TLS handshake included
    handshake_timeout_ms: longest time for connection and handshake with a broker together;
        shorter than `limits.handshake_timeout_ms`, so that a client still learns of it
    probe_interval_ms: time between two looks whether the brokers of `service_url` answer (`/readyz` depends on it)
    login_interval_ms: where there are `credentials`: how often each lookup worker logs in at each broker of
        `service_url` to see whether they are still taken; a lookup's connection that was taken saves it. After a login
        that failed 15 s; at least 1 s. Where all brokers refuse them (one that took them before: three times in
        succession), `/readyz` says so. 0: nobody asks
    ejection_failures: a broker of `service_url` that failed so often, with no answer in between, is set aside: lookups
        ask the others first. So is one that does not answer a look; where all are set aside, none is
    ejection_time_ms: for how long, unless a look shows that it is back; twice as long each time until it answers a
        lookup again
    ejection_time_max_ms: the longest such time
    pooled_connections_max: connections for lookups that one lookup worker may hold; there is one for each pair of
        broker and principal. Beside them there may be a quarter as many for requests upon which a connection was lost:
        these are asked again apart from all others
    idle_connection_timeout_ms: a connection for lookups that was not used for this long is closed
    """

    service_url: NonEmpty = "pulsar://localhost:6650"
    dns_ttl_max_ms: Annotated[int, Meta(ge=1_000, le=2**31 - 1)] = 30_000
    allowed_hosts: tuple[NonEmpty, ...] = ()
    allowed_addresses: tuple[NonEmpty, ...] = ()
    allowed_ports: tuple[Port, ...] = ()
    through_proxy: bool = False
    tls: BrokerTls = BrokerTls()
    credentials: BrokerCredentials | None = None
    forward_authorization_credentials: bool = False
    congestion_control: CongestionControl = "unpaced"
    connect_timeout_ms: Positive = 5_000
    handshake_timeout_ms: Positive = 8_000
    probe_interval_ms: Positive = 5_000
    login_interval_ms: NonNegative = 60_000
    ejection_failures: Positive = 3
    ejection_time_ms: Positive = 5_000
    ejection_time_max_ms: Positive = 60_000
    pooled_connections_max: Positive = 1_000
    idle_connection_timeout_ms: Positive = 60_000


class TokenAuthentication(Strict, frozen=True):
    """Clients bring a JSON Web Token (method `token`). At least one key is needed. Keys are read again when their
    files change.

    secret_key: file with the shared secret, its raw bytes as `pulsar tokens create-secret-key` writes them
        (HS256, HS384, HS512)
    public_key: file with the public key, PEM or DER as `pulsar tokens create-key-pair` writes it
        (RSA: RS and PS, EC: ES, each with 256, 384 and 512)
    further_secret_keys: more of them, any of which may have signed a token (while keys are being exchanged, say)
    further_public_keys: more of them
    role_claim: the claim that is the client's role; of a list the first entry counts
    audience_claim: the claim that names for whom a token is meant
    audience: what that claim must hold; empty: it is not looked at
    allowed_clock_skew_ms: how far the clocks of issuer and proxy may differ
    """

    secret_key: str = ""
    public_key: str = ""
    further_secret_keys: tuple[NonEmpty, ...] = ()
    further_public_keys: tuple[NonEmpty, ...] = ()
    role_claim: NonEmpty = "sub"
    audience_claim: NonEmpty = "aud"
    audience: str = ""
    allowed_clock_skew_ms: NonNegative = 0


class TlsAuthentication(Strict, frozen=True):
    """Clients bring a certificate in TLS (method `tls`); the common name (CN) of its subject is their role. The
    listener's `tls.client_ca` says which certificates count.
    """


class BasicAuthentication(Strict, frozen=True):
    """Clients bring `user:password` (method `basic`); the user is their role.

    file: users, as `htpasswd` writes them: bcrypt (`htpasswd -B`), and the older forms that Pulsar takes: apr1, crypt
        with SHA-256, SHA-512, MD5 and DES. Read again when it changes
    threads_max: passwords that one auth worker checks at a time; 127 times as many may wait, in turn by client address
    """

    file: NonEmpty
    threads_max: Workers = 2


class ScramAuthentication(Strict, frozen=True):
    """Clients prove that they know a password without saying it (methods `SCRAM-SHA-256`, `SCRAM-SHA-512`; RFC 5802,
    RFC 7677); the user is their role.

    file: one line a user and mechanism, as `pulsar-trio-proxy scram-credential` writes it. Read again when it changes
    """

    file: NonEmpty


class SaslAuthentication(Strict, frozen=True):
    """Clients use Kerberos (method `sasl`, mechanism GSSAPI; RFC 4752); their principal is their role.

    principal: the proxy's own principal, `<service>/<host that clients connect to>@REALM`
    keytab: file with its key
    allowed_principals: regular expression that a client's whole principal must match
    threads_max: exchanges that one auth worker works on at a time
    """

    principal: NonEmpty
    keytab: NonEmpty
    allowed_principals: NonEmpty = ".*"
    threads_max: Workers = 16


class OidcAuthentication(Strict, frozen=True):
    """Clients bring a token of an OpenID Connect issuer (method `token`, as for `authentication.token`, which may be
    there, too).

    allowed_issuers: URLs of issuers, as their tokens' claim `iss` says them; each has
        `/.well-known/openid-configuration` below it
    allowed_audiences: a token's claim `aud` must hold one of these
    role_claim: the claim that is the client's role; of a list the first entry counts
    allowed_clock_skew_ms: how far the clocks of issuer and proxy may differ
    trust: PEM file with the authorities that sign the issuers' certificates; empty: the system's
    require_https: whether an issuer without TLS is a mistake
    keys_lifetime_ms: an issuer's keys are asked for again after this long, and are used for twice as long where it
        cannot be asked (here and below: in each auth worker)
    keys_retry_interval_ms: a key that is not known is looked for at the issuer, and what failed is asked again, no more
        often than this
    request_timeout_ms: longest time for each of an issuer's two answers (its description, its keys)
    """

    allowed_issuers: tuple[NonEmpty, ...]
    allowed_audiences: tuple[NonEmpty, ...]
    role_claim: NonEmpty = "sub"
    allowed_clock_skew_ms: NonNegative = 0
    trust: str = ""
    require_https: bool = True
    keys_lifetime_ms: Positive = 5 * 60_000
    keys_retry_interval_ms: Positive = 10_000
    request_timeout_ms: Positive = 4_000


class Authentication(Strict, frozen=True):
    """Who may come in. At least one provider (one of the tables below) is needed where it is enabled.

    enabled: whether clients must authenticate themselves; without it, everybody who reaches the proxy may use it
    failure_delay_ms: how long a failed authentication waits for its answer, whatever the reason was
    anonymous_role: role of clients that name no method; empty: they are denied
    proxy_roles: roles of proxies before this one: they, and only they, say behind which principal a connection is
        (`original_principal`), as brokers' `proxyRoles`. `tls:proxy-a` is role `proxy-a` by method `tls` alone,
        `proxy-a` by any method; a role with a colon needs its method, or `*`, before it (`*:system:proxy`)
    token: the provider for method `token`
    tls: the provider for method `tls`
    basic: the provider for method `basic`
    scram: the provider for methods `SCRAM-SHA-256` and `SCRAM-SHA-512`
    sasl: the provider for method `sasl`
    oidc: the provider for method `token` that asks OpenID Connect issuers for their keys
    plugins: options of providers from elsewhere (as JSON can say them), a table for each, under the name of its entry
        point in the group `pulsar_trio_proxy.authentication`
    """

    enabled: bool = False
    failure_delay_ms: Annotated[int, Meta(ge=0, le=10_000)] = 100
    anonymous_role: str = ""
    proxy_roles: tuple[NonEmpty, ...] = ()
    token: TokenAuthentication | None = None
    tls: TlsAuthentication | None = None
    basic: BasicAuthentication | None = None
    scram: ScramAuthentication | None = None
    sasl: SaslAuthentication | None = None
    oidc: OidcAuthentication | None = None
    plugins: dict[str, dict[str, Any]] = {}


class Session(Strict, frozen=True):
    """How long a client's authentication lasts (KIP-368). A session ends with the client's credential, or earlier.
    Before that the client is asked for fresh credentials; one that uses its connection after the end is closed with an
    error, one that is idle is left alone.

    connections_max_reauth_ms: a client must authenticate itself again within this time; 0: only its credential's own
        end counts. Credentials that never end, as certificates here, make sessions that end only by this
    methods_max_reauth_ms: the same for single authentication methods, in place of it: `{ token = 3600000 }`
    enforcement: what becomes of a client that uses its connection after the end, or fails to authenticate again.
        `enforce`: it is closed. `observe`: it is counted (`pulsar_proxy_expired_connections_observed_total`) and
        logged, once for each life of its session, and goes on; clients are asked for fresh credentials all the same.
        This is for finding out what `enforce` would close: expired credentials stay good for as long as a connection
        lasts. A reload changes it for connections that are there, too
    relay_reauthentication: which clients are asked within a relay. `by_client_kind`: all that say they can be, but
        clients built on the C++ library (Python's and Node's, too) only as long as they have no producer on the
        connection, since these write the answer into the middle of a large message: their session ends when it is used
        past its end, after which they come back with fresh credentials. `always`: all that say they can be. `never`:
        none; their sessions end in that way. With `brokers.forward_authorization_credentials` it is the brokers who ask
        and end relays, and none of this applies to them
    grace_ms: a relay over which the broker still sends anything but PING and PONG so long after the session's end is
        closed, though its client does not use it: a consumer that took many permits before would be served for ever.
        0: at once. An idle connection is left alone
    """

    connections_max_reauth_ms: NonNegative = 0
    methods_max_reauth_ms: dict[NonEmpty, NonNegative] = {}
    enforcement: Literal["enforce", "observe"] = "enforce"
    relay_reauthentication: Literal["by_client_kind", "always", "never"] = "by_client_kind"
    grace_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 60_000


class Relay(Strict, frozen=True):
    """Connections that have become a relay between a client and a broker.

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

    crash_safe: bool = True
    keep_alive_idle_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 60_000
    keep_alive_probe_interval_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 10_000
    keep_alive_probes: Annotated[int, Meta(ge=1, le=127)] = 6
    half_close_timeout_ms: Positive = 60_000
    user_timeout_ms: NonNegative = 120_000


class Limits(Strict, frozen=True):
    """Bounds on what strangers can make the cluster do. In a container with a memory limit (cgroup), those of them that
    are bounds on memory and are not set here are smaller than their default where less fits (docs/installation.md).

    max_connections: clients' connections in the whole cluster; each forwarder takes in an equal part of them. Not set:
        at most the default, and as many as fit into the container's memory
    max_connections_per_address: clients' connections from one IP address (of IPv6, one /64 network) to the whole
        cluster; 0: no limit
    max_unauthenticated_connections: connections whose client has not authenticated yet (without authentication: has not
        been answered `Connected` yet), TLS handshakes included, in the whole cluster; half of them from one address.
        Above it the one that has been silent for longest gives way, of the address with most of them; where none is
        silent, newcomers wait for a second, and then are told to come again. 0: a quarter of `max_connections`, less
        where memory is short: each may hold `max_command_bytes`
    max_concurrent_lookups: lookup requests that a lookup worker works on at a time; above it they are answered
        `TooManyRequests`
    max_concurrent_lookups_per_connection: the same for one client's connection
    max_topic_lists_bytes: memory for answers that may be large (all topics of a namespace, schemas), in each forwarder
        and in each lookup worker. Each under way counts `max_broker_frame_bytes`, once it is there its size, until its
        client has taken it; requests beyond it wait, in turn by principal or, without one, by IP address. Not set: at
        most the default, and as much as fits into the container's memory
    max_lookup_bytes: memory for all other lookup requests under way, in each forwarder and in each lookup worker, and,
        in a forwarder, for what it keeps of unfinished frames and of answers that clients do not take. Half of it is
        whoever's comes first, of the rest nobody gets more than an equal share (a principal or, without one, an IP
        address); what is above it is answered `TooManyRequests`. Not set: as above
    handshake_timeout_ms: longest time from accepting a client to Connected
    lookup_timeout_ms: longest time for one lookup request, redirects included
    keep_alive_interval_ms: a client in lookup mode that is silent this long is sent a PING, and closed if it says
        nothing within another such time
    max_command_bytes: largest frame that a client may send before it is relayed; a relay has no such limit
    max_broker_frame_bytes: largest frame that a broker may answer a lookup or a handshake with
    max_connection_age_ms: a client's connection is ended gently at this age, counted from when it was accepted, so that
        clients come to new instances; 10 % more or less by connection, so that those that came together do not leave
        together. Relays are then followed frame by frame, which costs CPU. For connections that come from then on.
        0: connections may be of any age
    drain_timeout_ms: over how long a drain spreads the ends of relays; what is left after it is closed
    """

    max_connections: Positive = 10_000
    max_connections_per_address: NonNegative = 0
    max_unauthenticated_connections: NonNegative = 0
    max_concurrent_lookups: Positive = 50_000
    max_concurrent_lookups_per_connection: Positive = 5_000
    max_topic_lists_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    max_lookup_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    handshake_timeout_ms: Positive = 10_000
    lookup_timeout_ms: Positive = 10_000
    keep_alive_interval_ms: Positive = 30_000
    max_command_bytes: Annotated[int, Meta(ge=1024, le=16 * MIB)] = 128 * 1024
    max_broker_frame_bytes: Annotated[int, Meta(ge=1024, le=128 * MIB)] = PULSAR_FRAME_BYTES_MAX
    max_connection_age_ms: NonNegative = 0
    drain_timeout_ms: NonNegative = 30_000


class Shutdown(Strict, frozen=True):
    """How the cluster ends upon SIGTERM, SIGINT or `drain`. It takes `delay_ms`, then up to `limits.drain_timeout_ms`,
    then 10 s at most.

    delay_ms: for so long it only says that it is not ready (`/readyz`) and still accepts clients, since load balancers
        and Kubernetes' endpoints need seconds to forget an instance. 0: it accepts no more clients at once
    """

    delay_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0


class Reload(Strict, frozen=True):
    """Which changes are taken over without being asked to.

    watch_interval_ms: how often the configuration file is looked at. A change that was the same at two looks is taken
        over as `reload` would; one that cannot be changes nothing, and is tried again later. 0: only `reload` and
        SIGHUP count
    """

    watch_interval_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 5_000


class Admin(Strict, frozen=True):
    """The HTTP port for operators: `/metrics`, `/healthz`, `/readyz` (and `/status.html`), `/status`.

    bind: `address:port`; keep it away from clients
    token_file: a file with the token that `/metrics` and `/status` ask for (`Authorization: Bearer …`); read again when
        it changes. Empty: they ask for none. `/healthz`, `/readyz` and `/status.html` never do
    """

    bind: NonEmpty = "127.0.0.1:8080"
    token_file: str = ""


class Metrics(Strict, frozen=True):
    """What is counted beside what is always counted.

    count_messages: whether `pulsar_proxy_principal_messages` is counted, for which the beginning of every relayed
        message is looked at. Towards brokers a batch counts as the messages that its producer says are in it; towards
        clients as one, since brokers give out whole batches and do not say how many messages are in one
    principals_max: principals whose use each forwarder counts by name, in the order in which they come; all others are
        counted together as `other`
    """

    count_messages: bool = False
    principals_max: Annotated[int, Meta(ge=0, le=1000)] = 100


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
    session: Session = Session()
    relay: Relay = Relay()
    limits: Limits = Limits()
    shutdown: Shutdown = Shutdown()
    reload: Reload = Reload()
    metrics: Metrics = Metrics()
    admin: Admin = Admin()
    log: Log = Log()
