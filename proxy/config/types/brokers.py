"""Tables of the brokers' side: addresses, targets, TLS, credentials, ejection."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import (
    CongestionControl,
    NonEmpty,
    NonNegative,
    Port,
    PortPair,
    Positive,
    Strict,
    TlsCiphers,
    TlsGroups,
    TlsVersion,
)


class BrokerTls(Strict, frozen=True):
    """TLS towards brokers, if `brokers.service_url` begins with `pulsar+ssl`, or `brokers.web_service_url` with
    `https`. Files are read again when they change, and take effect once a broker accepts the proxy with them.

    trust: PEM file with the authorities that sign brokers' certificates; empty: the system's
    certificate: PEM file with the proxy's own certificate; empty: it has none
    key: PEM file with its private key, without a passphrase
    verify_hostname: whether a broker's certificate must be valid for the name by which it is dialled
    minimum_version: the oldest accepted version of TLS
    ciphers: ciphers for TLS 1.2, as `ciphers` of listeners
    groups: groups for the key exchange, as `groups` of listeners. With TLS 1.2 a broker's ECDSA certificate must be of
        one of them, too
    """

    trust: str = ""
    certificate: str = ""
    key: str = ""
    verify_hostname: bool = True
    minimum_version: TlsVersion = "1.2"
    ciphers: TlsCiphers = ""
    groups: TlsGroups = ()


class BrokerCredentials(Strict, frozen=True):
    """The proxy's own identity at the brokers. Its role must be among the brokers' `proxyRoles`.

    method: authentication method of the proxy; `tls` uses `brokers.tls.certificate`
    file: the secret, read again when it changes, so it may be rotated at any time: it takes effect once a broker
        accepts it (of `sasl` in any case). `token`: the token; `basic`: `user:password`; `sasl`: the keytab;
        `oauth2`: JSON with `client_id` and `client_secret`
    token: the token itself, for method `token` in place of a file (from the environment, for example)
    principal: for `sasl`, the proxy's Kerberos principal, such as `proxy/host@REALM`
    broker_service: for `sasl`, the first part of the brokers' principals: `broker` for `broker/<host>@REALM`
    issuer_url: for `oauth2`, the URL with `/.well-known/openid-configuration`, which names the endpoint for tokens
    audience: for `oauth2`, the requested audience of the token
    scope: for `oauth2`, the requested scope
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

    service_url: `pulsar://host:port`, or several hosts separated by commas; each address of a host is a broker (but an
        IPv4 and an IPv6 address alone belong to one broker). `pulsar+srv://name` finds hosts and ports in the SRV
        records of `_pulsar._tcp.name`, or else of the name itself, by priority and weight. With `pulsar+ssl://` and
        `pulsar+ssl+srv://` (`_pulsar-ssl._tcp.name`) connections to all brokers use TLS
    dns_ttl_max_ms: longest time until names are resolved again; they are resolved earlier if the TTL of the answer is
        over (a TTL counts as at least 1 s). While DNS fails, brokers' last addresses stay in use. For the target of a
        relay an answer stays valid for the same time again, 10 s at most, while the name is resolved in the background
    allowed_hosts: patterns (`*`, `?`) of additional hosts to which clients may be relayed. Brokers of `service_url`
        need no entry: its hosts, names below one of them (if it has three labels or more, search domains included), and
        every target at an address to which they resolve
    allowed_addresses: networks (`10.0.0.0/8`) or addresses of additional targets. If `allowed_hosts` is set, too, a
        target must be in both. Loopback addresses must be named (`127.0.0.0/8`) unless a broker of `service_url` is at
        one. Link-local, metadata service, multicast and reserved addresses are never allowed. All hosts (`*`) at all
        addresses are refused if the proxy has credentials to lose (`credentials`, a certificate,
        `forward_authorization_credentials`): any client could make the proxy send them to a host of its own
    allowed_ports: ports to which clients may be relayed, beside those of brokers of `service_url`; empty: for these
        brokers no others, for additional targets 6650 and 6651
    port_pairs: the ports of one broker without TLS and with it, for all brokers; several pairs if brokers share
        machines. A client of Pulsar 5 may ask for the other port than the proxy uses (transaction coordinators): a
        target at the first port of a pair is then dialled at the second one if `service_url` has TLS, or the reverse.
        Ports of `service_url` itself are dialled as they are. Not used with `through_proxy`
    through_proxy: whether `service_url` is the URL of another proxy in front of the brokers: relays then go there, too,
        and that proxy resolves and checks their targets (here, `allowed_hosts`, if set, and `allowed_ports` apply); the
        role of this proxy must be among its `authentication.proxy_roles`
    proxy_protocol: whether each connection to a broker begins with a PROXY header (version 2), which announces the
        relay's client, so that topics' statistics show its address ([how](security.md#clients-addresses-at-brokers)).
        `within_tls`: with TLS the header is the first that TLS carries, as Pulsar's brokers expect it
        (`haProxyProtocolEnabled=true` in broker.conf, which they must have); `before_tls`: it precedes TLS, as other
        receivers expect it, among them this proxy (`through_proxy`) and load balancers
    web_service_url: the brokers' web port: `http://host:port`, or several hosts separated by commas; with `https://`
        connections use TLS, by `tls`. For `[[http_listener]]`, which needs it
    tls: TLS settings of connections to brokers
    credentials: the proxy's own identity at the brokers; absent: the proxy does not authenticate
    forward_authorization_credentials: whether a client's own credentials are forwarded behind the proxy's, as brokers
        with `authenticateOriginalAuthData = true` (the default of Pulsar 5) want them; other brokers ignore them. A
        certificate, a SCRAM exchange and a Kerberos ticket cannot be forwarded: for clients with these the brokers need
        `authenticateOriginalAuthData = false`. Without `authentication.enabled` nothing is forwarded
    congestion_control: congestion control of connections to brokers (TCP_CONGESTION): `system` (sysctl
        net.ipv4.tcp_congestion_control), the name of an algorithm, or `unpaced`: the system's unless that is BBR, then
        `reno`: BBR's timer for each packet costs most of a relay's CPU time if brokers are near
    connect_timeout_ms: longest time for one TCP connection to a broker, its TLS handshake included
    handshake_timeout_ms: longest time for connection and handshake with a broker together; shorter than
        `limits.handshake_timeout_ms`, so that a client still gets the error
    probe_interval_ms: time between two probes of the brokers of `service_url` (`/readyz` depends on them)
    login_interval_ms: if there are `credentials`: time between two logins of each lookup worker at each broker of
        `service_url`, which check that the broker accepts them; an accepted connection for lookups replaces a login.
        After a failed login 15 s; at least 1 s. If all brokers refuse them (one that accepted them before: three times
        in succession), `/readyz` reports it. The logins also show which brokers check clients' own credentials
        (`forward_authorization_credentials`): such a broker logs a failed authentication for each lookup worker every
        10 minutes and after its own restart, and three in the first half minute. 0: no logins
    ejection_failures: a broker of `service_url` with this number of failures and no answer in between is ejected:
        lookups use the others first. A broker that does not answer a probe is ejected, too; if all are ejected, none is
    ejection_time_ms: duration of an ejection, unless a probe shows that the broker is back; it doubles each time until
        the broker answers a lookup again
    ejection_time_max_ms: longest duration of an ejection
    ejection_by_relays: whether a broker of `service_url` is ejected, too, if relays to it fail
        ([how, and what clients can do with it](security.md#brokers-ejected-by-relays-failures)); not with
        `through_proxy`
    pooled_connections_max: connections for lookups that one lookup worker may hold; there is one for each pair of
        broker and principal, or credentials where a client's own are forwarded. Beside them there may be a quarter as
        many for requests that have lost a connection: these are sent again apart from all others; and for each of them
        one that takes no more requests, but still answers some
    pooled_connections_per_principal_max: how many of these there may be at one broker for clients of one principal with
        different credentials; above it, lookups wait until one is unused, or for half a second, and replace it
    idle_connection_timeout_ms: a connection for lookups that was unused for this time is closed
    """

    service_url: NonEmpty = "pulsar://localhost:6650"
    dns_ttl_max_ms: Annotated[int, Meta(ge=1_000, le=2**31 - 1)] = 30_000
    allowed_hosts: tuple[NonEmpty, ...] = ()
    allowed_addresses: tuple[NonEmpty, ...] = ()
    allowed_ports: tuple[Port, ...] = ()
    port_pairs: tuple[PortPair, ...] = ((6650, 6651),)
    through_proxy: bool = False
    proxy_protocol: Literal["off", "within_tls", "before_tls"] = "off"
    web_service_url: str = ""
    tls: BrokerTls = BrokerTls()
    credentials: BrokerCredentials | None = None
    forward_authorization_credentials: bool = True
    congestion_control: CongestionControl = "unpaced"
    connect_timeout_ms: Positive = 5_000
    handshake_timeout_ms: Positive = 8_000
    probe_interval_ms: Positive = 5_000
    login_interval_ms: NonNegative = 60_000
    ejection_failures: Positive = 3
    ejection_time_ms: Positive = 5_000
    ejection_time_max_ms: Positive = 60_000
    ejection_by_relays: bool = False
    pooled_connections_max: Annotated[int, Meta(ge=1, le=10_000)] = 1_000
    pooled_connections_per_principal_max: Positive = 64
    idle_connection_timeout_ms: Positive = 60_000
