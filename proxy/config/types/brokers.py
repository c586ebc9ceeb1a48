"""Tables of the brokers' side: addresses, targets, TLS, credentials, ejection."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import CongestionControl, NonEmpty, NonNegative, Port, Positive, Strict, TlsVersion


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
