"""Tables of the clients' side: listeners and their TLS."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import (
    CongestionControl,
    NonEmpty,
    NonNegative,
    ProxyProtocol,
    Strict,
    TlsCiphers,
    TlsGroups,
    TlsVersion,
)


class ListenerCertificate(Strict, frozen=True):
    """A further certificate of a listener, for clients that ask for one of its DNS names (SNI).

    certificate: PEM file with the certificate, followed by those that lead to its root; of its subject alternative
        names the DNS names count, `*` in place of their first label included
    key: PEM file with its private key, without a passphrase
    """

    certificate: NonEmpty
    key: NonEmpty


class ListenerTls(Strict, frozen=True):
    """TLS towards the clients of one listener. The files are read again when they change.

    certificate: PEM file with the server's certificate, followed by the certificates that lead to its root
    certificates: further certificates; `certificate` is for clients that ask for no name that these have. Of several
        for one name each has a key of another type, as RSA and ECDSA
    ciphers: ciphers for TLS 1.2, in OpenSSL's form: `ECDHE+AESGCM:ECDHE+CHACHA20`; empty: Python's default. Those of
        TLS 1.3 are always OpenSSL's
    groups: groups for the key exchange, also called curves, the preferred one first; empty: OpenSSL's default.
        Several, and those with MLKEM, need Python 3.15, and the latter OpenSSL 3.5
    key: PEM file with the certificate's private key, without a passphrase
    client_ca: PEM file with the authorities that may sign clients' certificates; empty: the proxy requests no
        certificate of clients
    client_crl: PEM file with a CRL of each authority that signs clients' certificates: one that is revoked is refused,
        and all are without a CRL in force of their issuer; empty: nothing is revoked
    require_client_certificate: whether a client without a certificate is refused
    minimum_version: the oldest accepted version of TLS
    session_tickets: whether clients get a ticket, by which they come back without the certificate's costs, at any
        forwarder; needs `minimum_version` `1.3`, and no `client_ca`
    """

    certificate: NonEmpty
    key: NonEmpty
    certificates: Annotated[tuple[ListenerCertificate, ...], Meta(max_length=100)] = ()
    client_ca: str = ""
    client_crl: str = ""
    require_client_certificate: bool = False
    minimum_version: TlsVersion = "1.2"
    ciphers: TlsCiphers = ""
    groups: TlsGroups = ()
    session_tickets: bool = False


class Listener(Strict, frozen=True):
    """Addresses to which clients connect; one table `[[listener]]` for each.

    allowed_networks: networks (CIDR) from which clients may connect; empty: all. The connection's own address counts,
        which behind a load balancer may be the balancer's, unless `proxy_protocol` announces the client's; IPv4-mapped
        IPv6 counts as IPv4
    bind: `address:port`; an IPv6 address is written in brackets
    congestion_control: congestion control of connections to clients, as `brokers.congestion_control`
    connections_max_reauth_ms: the same as in `[session]`, for this listener's clients, with precedence over it; -1: the
        value there applies
    denied_networks: networks (CIDR) from which none may connect, not even from `allowed_networks`
    methods_max_reauth_ms: the same for single authentication methods, with precedence over `connections_max_reauth_ms`
        of this table
    proxy_protocol: whether connections from `proxy_protocol_sources` begin with a PROXY header (version 1 or 2), which
        announces the client's address ([how](security.md#behind-a-load-balancer)); `optional`: those without one,
        and all from elsewhere, are clients' own; `required`: they are refused
    proxy_protocol_sources: networks (CIDR) of the load balancers; needed unless `proxy_protocol` is `off`. All who can
        connect from there can claim any address
    routing: `sni` passes TLS through, unterminated, to the broker whose host the client's TLS names
        ([PIP-60](targets.md#sni-routing)): the broker authenticates the client, the proxy does not; `pulsar`: the proxy
        speaks Pulsar's protocol itself
    session_enforcement: the same as `session.enforcement`, for this listener's clients; `inherit`: the value there
        applies
    tls: certificate and key of a listener for `pulsar+ssl://`; absent: it is one for `pulsar://`
    """

    allowed_networks: tuple[NonEmpty, ...] = ()
    bind: NonEmpty = "0.0.0.0:6650"
    congestion_control: CongestionControl = "system"
    connections_max_reauth_ms: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    denied_networks: tuple[NonEmpty, ...] = ()
    methods_max_reauth_ms: dict[NonEmpty, NonNegative] = {}
    proxy_protocol: ProxyProtocol = "off"
    proxy_protocol_sources: tuple[NonEmpty, ...] = ()
    routing: Literal["pulsar", "sni"] = "pulsar"
    session_enforcement: Literal["inherit", "enforce", "observe"] = "inherit"
    tls: ListenerTls | None = None
