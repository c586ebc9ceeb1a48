"""Tables of clients' authentication: one for each provider, and the table that holds them."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from proxy.config.types.base import NonEmpty, NonNegative, Positive, Strict, Workers

IdentitySource = Literal["CN", "DN", "SAN:URI", "SAN:DNS", "SAN:EMAIL"]
PrincipalRuleText = Annotated[str, Meta(min_length=1, max_length=1024)]


class TokenAuthentication(Strict, frozen=True):
    """Clients authenticate with a JSON Web Token (method `token`). At least one key is needed. Keys are read again when
    their files change.

    secret_key: file with the shared secret, its raw bytes as `pulsar tokens create-secret-key` writes them (HS256,
        HS384, HS512)
    public_key: file with the public key, PEM or DER as `pulsar tokens create-key-pair` writes it (RSA: RS and PS, EC:
        ES, each with 256, 384 and 512)
    further_secret_keys: additional shared secrets; any of the keys may have signed a token (for example during a key
        rotation)
    further_public_keys: additional public keys
    role_claim: the claim with the client's role; if it is a list, its first entry
    audience_claim: the claim with the audience of a token
    audience: the required value of that claim; empty: the claim is not checked
    allowed_clock_skew_ms: the allowed difference between the clocks of issuer and proxy
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
    """Clients authenticate with a TLS certificate (method `tls`); a name in it is their role. The listener's
    `tls.client_ca` determines which certificates are valid.

    identity_source: the name that is taken: the common name of the subject (`CN`), the whole subject as in RFC 4514
        (`DN`), or a subject alternative name: a SPIFFE ID (`SAN:URI`), a host (`SAN:DNS`), an email address
        (`SAN:EMAIL`). A certificate must have exactly one
    principal_mapping_rules: rules that make the role from that name, the first that fits: `RULE:pattern/replacement/`,
        with `L` (lower case) or `U` (upper case) at its end if wanted, and `DEFAULT`, the name as it is. A pattern must
        match the whole name. If no rule fits, the client is denied. Empty: the name is the role
    """

    identity_source: IdentitySource = "CN"
    principal_mapping_rules: Annotated[tuple[PrincipalRuleText, ...], Meta(max_length=64)] = ()


class BasicAuthentication(Strict, frozen=True):
    """Clients authenticate with `user:password` (method `basic`); the user is their role.

    file: users, as `htpasswd` writes them: bcrypt (`htpasswd -B`), and the older forms that Pulsar accepts: apr1, crypt
        with SHA-256, SHA-512, MD5 and DES. Read again when it changes
    threads_max: number of passwords that one auth worker checks at a time; 127 times as many may wait, in turn by
        client address
    """

    file: NonEmpty
    threads_max: Workers = 2


class ScramAuthentication(Strict, frozen=True):
    """Clients prove that they know a password without sending it (methods `SCRAM-SHA-256`, `SCRAM-SHA-512`; RFC 5802,
    RFC 7677); the user is their role.

    file: one line for each user and mechanism, as `pulsar-trio-proxy scram-credential` writes it. Read again when it
        changes
    """

    file: NonEmpty


class SaslAuthentication(Strict, frozen=True):
    """Clients authenticate with Kerberos (method `sasl`, mechanism GSSAPI; RFC 4752); their principal is their role.

    principal: the proxy's own principal, `<service>/<host that clients connect to>@REALM`
    keytab: file with its key
    allowed_principals: regular expression that a client's whole principal must match
    threads_max: number of exchanges that one auth worker processes at a time
    """

    principal: NonEmpty
    keytab: NonEmpty
    allowed_principals: NonEmpty = ".*"
    threads_max: Workers = 16


class KubernetesIssuer(Strict, frozen=True):
    """Tokens of Kubernetes' service accounts are accepted from the issuer that the API server of the cluster names. A
    token's subject, `system:serviceaccount:<namespace>:<name>`, is the client's role.

    discovery: where the issuer's keys are: at the API server (`public_keys`), or at the issuer itself
        (`trusted_issuer`), where the API server names one that others can reach, as EKS does
    api_server: URL of the API server; empty: that of the pod's environment (`KUBERNETES_SERVICE_HOST`)
    token_file: file with the service-account token by which the proxy asks the API server, and nobody else. Read again
        when it changes
    trust: PEM file with the authorities that sign the API server's certificate
    allowed_roles: the roles that clients may have, as in `oidc.allowed_roles`; none but service accounts
    """

    discovery: Literal["public_keys", "trusted_issuer"] = "public_keys"
    api_server: str = ""
    token_file: NonEmpty = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 -- a path
    trust: NonEmpty = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    allowed_roles: Annotated[tuple[NonEmpty, ...], Meta(min_length=1)] = ("system:serviceaccount:*",)


class OidcAuthentication(Strict, frozen=True):
    """Clients authenticate with a token of an OpenID Connect issuer (method `token`, as for `authentication.token`,
    which may be configured, too).

    allowed_audiences: the claim `aud` of a token must hold one of these
    allowed_issuers: URLs of issuers, as in the claim `iss` of their tokens; each has
        `/.well-known/openid-configuration` below it. At least one is needed, unless there is `kubernetes`
    allowed_roles: for each issuer, the roles that its tokens may name: `{ "https://issuer" = ["admin", "app-*"] }`. `*`
        is allowed at the end, and stands for any text. If the claim is a list, all its entries must fit. Several
        issuers need a list each, and no role may fit those of two. Without it, the only issuer may sign any role
    role_claim: the claim with the client's role; if it is a list, its first entry
    allowed_clock_skew_ms: the allowed difference between the clocks of issuer and proxy
    trust: PEM file with the authorities that sign the issuers' certificates; empty: the system's
    require_https: whether an issuer without TLS is a configuration error
    keys_lifetime_ms: time after which an issuer's keys are requested again; if the issuer is unreachable, they are
        valid for twice this time (here and below: in each auth worker)
    keys_retry_interval_ms: shortest time between two requests to an issuer for an unknown key, or after a failed
        request
    request_timeout_ms: longest time for each of an issuer's two answers (its description, its keys)
    kubernetes: issuer of the service accounts of Kubernetes, for tokens of an issuer that `allowed_issuers` does not
        name
    """

    allowed_audiences: tuple[NonEmpty, ...]
    allowed_issuers: tuple[NonEmpty, ...] = ()
    allowed_roles: dict[NonEmpty, Annotated[tuple[NonEmpty, ...], Meta(min_length=1)]] = {}
    role_claim: NonEmpty = "sub"
    allowed_clock_skew_ms: NonNegative = 0
    trust: str = ""
    require_https: bool = True
    keys_lifetime_ms: Positive = 5 * 60_000
    keys_retry_interval_ms: Positive = 10_000
    request_timeout_ms: Positive = 4_000
    kubernetes: KubernetesIssuer | None = None


class Authentication(Strict, frozen=True):
    """Authentication of clients. If it is enabled, at least one provider (one of the tables below) is needed.

    enabled: whether clients must authenticate; without it, every client that reaches the proxy may use it
    failure_delay_ms: delay before the answer to a failed authentication, for any reason
    anonymous_role: role of clients that name no method; empty: they are denied
    proxy_roles: roles of proxies in front of this one: these, and only these, name the principal behind a connection
        (`original_principal`), as with brokers' `proxyRoles`. `tls:proxy-a` is role `proxy-a` by method `tls` alone,
        `proxy-a` by any method; a role with a colon needs its method, or `*`, before it (`*:system:proxy`). One by
        tokens counts only for the issuer that `oidc.allowed_roles` names it for
    deny_file: file of credentials that are denied at once, also to clients that are connected: certificates and tokens
        that leaked, an entry a line; see docs/authentication.md. It is read again when it changes
    token: the provider for method `token`
    tls: the provider for method `tls`
    basic: the provider for method `basic`
    scram: the provider for methods `SCRAM-SHA-256` and `SCRAM-SHA-512`
    sasl: the provider for method `sasl`
    oidc: the provider for method `token` that requests keys from OpenID Connect issuers
    plugins: options of external providers (values that JSON can represent), one table for each, under the name of its
        entry point in the group `pulsar_trio_proxy.authentication`
    """

    enabled: bool = False
    failure_delay_ms: Annotated[int, Meta(ge=0, le=10_000)] = 100
    anonymous_role: str = ""
    proxy_roles: tuple[NonEmpty, ...] = ()
    deny_file: str = ""
    token: TokenAuthentication | None = None
    tls: TlsAuthentication | None = None
    basic: BasicAuthentication | None = None
    scram: ScramAuthentication | None = None
    sasl: SaslAuthentication | None = None
    oidc: OidcAuthentication | None = None
    plugins: dict[str, dict[str, Any]] = {}
