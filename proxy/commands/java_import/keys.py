"""Every key of a Java proxy's configuration, of releases 4.0 to 5.0, a line each: what becomes of it here.

A key whose value is Java's default needs nothing, except where a default of this proxy differs and it matters: those
are of a group (see ``groups``).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from proxy.commands.java_import import values as v


@dataclass(frozen=True, kw_only=True)
class Key:
    """A Java proxy's key.

    default: its value in Java where it is not set, of release 4
    default_5: the same of release 5, where it differs
    targets: this proxy's keys that it becomes
    convert: makes the value of the only target; None: a group of keys is converted together
    needs: what must be set in Java for it to have an effect
    reason: why it is lost, or needs nothing
    lost: whether it cannot be carried over, rather than needing nothing
    """

    default: str = ""
    default_5: str | None = None
    targets: tuple[str, ...] = ()
    convert: v.Convert | None = None
    needs: str = ""
    reason: str = ""
    lost: bool = False


def _same(default: str, target: str, convert: v.Convert = v.text, needs: str = "") -> Key:
    return Key(default=default, targets=(target,), convert=convert, needs=needs)


def _group(default: str, *targets: str, default_5: str | None = None, needs: str = "") -> Key:
    return Key(default=default, targets=targets, default_5=default_5, needs=needs)


def _needless(default: str, reason: str, default_5: str | None = None) -> Key:
    return Key(default=default, reason=reason, default_5=default_5)


def _lost(default: str, reason: str) -> Key:
    return Key(default=default, reason=reason, lost=True)


_HTTP = "the proxy passes on no HTTP (/admin, /lookup, WebSocket)"
_LATER_HTTP = "it is about HTTP, which the proxy does not pass on"
_JAVA = "it is about Java"
_STORE = "brokers.service_url"
_THREADS = "it counts threads; here processes count, one forwarder for each CPU"
_PLUGIN_KEY = "Java classes cannot be used here"
_PLUGIN = "org.apache.pulsar.common.util.DefaultPulsarSslFactory"
_KEEP_ALIVE_OFF = "pings cannot be turned off here"
_TOPIC_LISTS = "limits.max_topic_lists_bytes is the one bound, and limits.lookup_timeout_ms the longest wait"
_DISCOVERY_ONLY = "it is about the metadata store, which the proxy does not use"

KEYS: dict[str, Key] = {
    # brokers
    "brokerServiceURL": _group("", "brokers.service_url"),
    "brokerServiceURLTLS": _group("", "brokers.service_url"),
    "tlsEnabledWithBroker": _group("false", "brokers.service_url"),
    "brokerWebServiceURL": _lost("", _HTTP),
    "brokerWebServiceURLTLS": _lost("", _HTTP),
    "functionWorkerWebServiceURL": _lost("", _HTTP),
    "functionWorkerWebServiceURLTLS": _lost("", _HTTP),
    "metadataStoreUrl": _group("", _STORE),
    "configurationMetadataStoreUrl": _group("", _STORE),
    "zookeeperServers": _group("", _STORE),
    "configurationStoreServers": _group("", _STORE),
    "globalZookeeperServers": _group("", _STORE),
    "metadataStoreSessionTimeoutMillis": _needless("30000", _DISCOVERY_ONLY),
    "metadataStoreCacheExpirySeconds": _needless("300", _DISCOVERY_ONLY),
    "metadataStoreAllowReadOnlyOperations": _needless("false", _DISCOVERY_ONLY),
    "zookeeperSessionTimeoutMs": _needless("-1", _DISCOVERY_ONLY),
    "zooKeeperCacheExpirySeconds": _needless("-1", _DISCOVERY_ONLY),
    "zooKeeperAllowReadOnlyOperations": _needless("false", _DISCOVERY_ONLY),
    # where relays go
    "checkActiveBrokers": _lost("false", "brokers are not looked up in a metadata store; see brokers.allowed_hosts"),
    "brokerProxyAllowedHostNames": _group("*", "brokers.allowed_hosts"),
    "brokerProxyAllowedIPAddresses": _group("*", "brokers.allowed_addresses"),
    "brokerProxyAllowedTargetPorts": _same("6650,6651", "brokers.allowed_ports", v.ports),
    "brokerProxyConnectTimeoutMs": _same(
        "10000", "brokers.connect_timeout_ms", v.at_least(1, off="a connection without a time limit cannot be had here")
    ),
    "brokerProxyReadTimeoutMs": _lost(
        "75000", "relays end by TCP's keep-alive (relay.keep_alive_idle_ms), not by a broker's silence"
    ),
    # listeners
    "bindAddress": _group("0.0.0.0", "listener.bind", "admin.bind"),  # noqa: S104 -- as in Java
    "servicePort": _group("6650", "listener.bind"),
    "servicePortTls": _group("", "listener.bind"),
    "webServicePort": _group("8080", "admin.bind"),
    "webServicePortTls": _lost("", "the admin port has no TLS, and the proxy passes on no HTTP"),
    "advertisedAddress": _needless("", "no client and no broker is told the proxy's own name"),
    "clusterName": _same("", "cluster.name"),
    "keepAliveIntervalSeconds": _same(
        "30", "limits.keep_alive_interval_ms", v.at_least(1, factor=1000, off=_KEEP_ALIVE_OFF)
    ),
    "haProxyProtocolEnabled": _lost(
        "false", "the PROXY protocol is not spoken yet: let the load balancer send no PROXY header"
    ),
    "webServiceHaProxyProtocolEnabled": _needless("false", _LATER_HTTP),
    "webServiceTrustXForwardedFor": _needless("false", _LATER_HTTP),
    "webServiceLogDetailedAddresses": _needless("", _LATER_HTTP),
    "proxyZeroCopyModeEnabled": _needless("true", "bytes are spliced wherever both sides are plain"),
    "proxyLogLevel": _lost("0", "commands of clients are not logged; metrics.count_messages counts messages"),
    "statusFilePath": _lost("", "no file takes the proxy out of rotation: `drain` does, and /readyz tells"),
    "numIOThreads": _needless("", _THREADS),
    "numAcceptorThreads": _needless("1", _THREADS),
    "maxMessageSize": _needless("5242880", "a relay has no bound on messages"),
    "narExtractionDirectory": _needless("", _JAVA),
    "authenticationRoleLoggingAnonymizer": _lost("NONE", "roles are logged as they are"),
    # limits
    "maxConcurrentInboundConnections": _same(
        "10000", "limits.max_connections", v.at_least(1, off="there is always a limit here")
    ),
    "maxConcurrentInboundConnectionsPerIp": _same("0", "limits.max_connections_per_address", v.at_least(0)),
    "maxConcurrentLookupRequests": _same("50000", "limits.max_concurrent_lookups", v.at_least(1)),
    "maxTopicListInFlightHeapMemSizeMB": _same("100", "limits.max_topic_lists_bytes", v.at_least(1, factor=1024**2)),
    "maxTopicListInFlightDirectMemSizeMB": _needless("100", _TOPIC_LISTS),
    "maxTopicListInFlightHeapMemSizePermitsAcquireTimeoutMillis": _needless("25000", _TOPIC_LISTS),
    "maxTopicListInFlightHeapMemSizePermitsAcquireQueueSize": _needless("10000", _TOPIC_LISTS),
    "maxTopicListInFlightDirectMemSizePermitsAcquireTimeoutMillis": _needless("25000", _TOPIC_LISTS),
    "maxTopicListInFlightDirectMemSizePermitsAcquireQueueSize": _needless("10000", _TOPIC_LISTS),
    # clients' authentication
    "authenticationEnabled": _group("false", "authentication.enabled"),
    "authenticationProviders": _group(
        "",
        *("authentication.token", "authentication.tls", "authentication.basic"),
        *("authentication.sasl", "authentication.oidc"),
        needs="authenticationEnabled",
    ),
    "anonymousUserRole": _same("", "authentication.anonymous_role", needs="authenticationEnabled"),
    "authenticationRefreshCheckSeconds": _same(
        "60", "session.enforcement", v.expiry_check, needs="authenticationEnabled"
    ),
    "forwardAuthorizationCredentials": _group(
        "false", "brokers.forward_authorization_credentials", default_5="true", needs="authenticationEnabled"
    ),
    "tokenSecretKey": _group("", "authentication.token.secret_key", needs="Token"),
    "tokenPublicKey": _group("", "authentication.token.public_key", needs="Token"),
    "tokenPublicAlg": _needless("", "the key itself says which algorithms it is for"),
    "tokenAuthClaim": _same("", "authentication.token.role_claim", needs="Token"),
    "tokenAudienceClaim": _group("", "authentication.token.audience_claim", needs="Token"),
    "tokenAudience": _group("", "authentication.token.audience", needs="Token"),
    "tokenAllowedClockSkewSeconds": _same(
        "0", "authentication.token.allowed_clock_skew_ms", v.at_least(0, factor=1000), "Token"
    ),
    "tokenSettingPrefix": _lost("", "keys with a prefix are not read: rename them in the file"),
    "basicAuthConf": _group("", "authentication.basic.file", needs="Basic"),
    "saslJaasClientAllowedIds": _group(".*pulsar.*", "authentication.sasl.allowed_principals", needs="Sasl"),
    "saslJaasServerSectionName": _group(
        "PulsarProxy", "authentication.sasl.principal", "authentication.sasl.keytab", needs="Sasl"
    ),
    "saslJaasServerRoleTokenSignerSecretPath": _needless("", _LATER_HTTP),
    "kinitCommand": _needless("/usr/bin/kinit", _JAVA),
    "openIDAllowedTokenIssuers": _group("", "authentication.oidc.allowed_issuers", needs="OpenID"),
    "openIDAllowedAudiences": _same("", "authentication.oidc.allowed_audiences", v.entries, "OpenID"),
    "openIDRoleClaim": _same("sub", "authentication.oidc.role_claim", needs="OpenID"),
    "openIDTokenIssuerTrustCertsFilePath": _same("", "authentication.oidc.trust", v.path, "OpenID"),
    "openIDAcceptedTimeLeewaySeconds": _same(
        "0", "authentication.oidc.allowed_clock_skew_ms", v.at_least(0, factor=1000), "OpenID"
    ),
    "openIDRequireIssuersUseHttps": _same("true", "authentication.oidc.require_https", v.boolean, "OpenID"),
    "openIDCacheRefreshAfterWriteSeconds": _same(
        "64800", "authentication.oidc.keys_lifetime_ms", v.at_least(1, factor=1000), "OpenID"
    ),
    "openIDCacheExpirationSeconds": _needless("86400", "keys are valid for twice authentication.oidc.keys_lifetime_ms"),
    "openIDKeyIdCacheMissRefreshSeconds": _same(
        "300", "authentication.oidc.keys_retry_interval_ms", v.at_least(1, factor=1000), "OpenID"
    ),
    "openIDHttpReadTimeoutMillis": _same("10000", "authentication.oidc.request_timeout_ms", v.at_least(1), "OpenID"),
    "openIDHttpConnectionTimeoutMillis": _needless(
        "10000", "authentication.oidc.request_timeout_ms, from openIDHttpReadTimeoutMillis, includes the connection"
    ),
    "openIDCacheSize": _needless("5", "keys of all authentication.oidc.allowed_issuers are kept"),
    "openIDFallbackDiscoveryMode": _lost("DISABLED", "Kubernetes' API server is not asked for keys of tokens"),
    # authorization
    "authorizationEnabled": _lost(
        "false", "brokers authorize, with the client's role: they must have authorizationEnabled=true"
    ),
    "authorizationProvider": _needless(
        "org.apache.pulsar.broker.authorization.PulsarAuthorizationProvider", "brokers authorize"
    ),
    "superUserRoles": _needless("", "brokers authorize: their superUserRoles count"),
    # the proxy at the brokers
    "brokerClientAuthenticationPlugin": _group("", "brokers.credentials.method"),
    "brokerClientAuthenticationParameters": _group("", "brokers.credentials.file"),
    "brokerClientTrustCertsFilePath": _same("", "brokers.tls.trust", v.path, "tlsEnabledWithBroker"),
    "brokerClientCertificateFilePath": _same("", "brokers.tls.certificate", v.path, "tlsEnabledWithBroker"),
    "brokerClientKeyFilePath": _same("", "brokers.tls.key", v.path, "tlsEnabledWithBroker"),
    "tlsHostnameVerificationEnabled": _group(
        "false", "brokers.tls.verify_hostname", default_5="true", needs="tlsEnabledWithBroker"
    ),
    "brokerClientTlsProtocols": _same("", "brokers.tls.minimum_version", v.tls_version, "tlsEnabledWithBroker"),
    "brokerClientTlsCiphers": _same("", "brokers.tls.ciphers", v.ciphers, "tlsEnabledWithBroker"),
    "brokerClientTlsEnabledWithKeyStore": _group("false", "brokers.tls.trust", needs="tlsEnabledWithBroker"),
    "brokerClientTlsKeyStore": _group("", "brokers.tls.certificate", "brokers.tls.key", needs="tlsEnabledWithBroker"),
    "brokerClientTlsKeyStoreType": _needless("JKS", "a file of PEM replaces it"),
    "brokerClientTlsKeyStorePassword": _needless("", "a file of PEM has no password"),
    "brokerClientTlsTrustStore": _group("", "brokers.tls.trust", needs="tlsEnabledWithBroker"),
    "brokerClientTlsTrustStoreType": _needless("JKS", "a file of PEM replaces it"),
    "brokerClientTlsTrustStorePassword": _needless("", "a file of PEM has no password"),
    "brokerClientSslProvider": _needless("", _JAVA),
    "brokerClientJsseProvider": _needless("", _JAVA),
    "brokerClientSslFactoryPlugin": _lost(_PLUGIN, _PLUGIN_KEY),
    "brokerClientSslFactoryPluginParams": _lost("", _PLUGIN_KEY),
    "brokerClientTlsFactoryClassName": _lost("default", _PLUGIN_KEY),
    "brokerClientTlsFactoryConfig": _lost("", _PLUGIN_KEY),
    "brokerClient_*": _lost("", "settings of Java's client are not read"),
    # TLS of listeners
    "tlsEnabledInProxy": _needless("false", "servicePortTls decides, as in Java"),
    "tlsCertificateFilePath": _group("", "listener.tls.certificate", needs="servicePortTls"),
    "tlsKeyFilePath": _group("", "listener.tls.key", needs="servicePortTls"),
    "tlsTrustCertsFilePath": _group("", "listener.tls.client_ca", needs="servicePortTls"),
    "tlsRequireTrustedClientCertOnConnect": _same(
        "false", "listener.tls.require_client_certificate", v.boolean, "servicePortTls"
    ),
    "tlsAllowInsecureConnection": _lost(
        "false", "certificates of clients and brokers that cannot be verified are refused"
    ),
    "tlsCertRefreshCheckDurationSec": _needless("300", "changed files are read at once"),
    "tlsProtocols": _same("", "listener.tls.minimum_version", v.tls_version, "servicePortTls"),
    "tlsCiphers": _same("", "listener.tls.ciphers", v.ciphers, "servicePortTls"),
    "tlsEnabledWithKeyStore": _group("false", "listener.tls.certificate", needs="servicePortTls"),
    "tlsKeyStore": _group("", "listener.tls.certificate", "listener.tls.key", needs="servicePortTls"),
    "tlsKeyStoreType": _needless("JKS", "a file of PEM replaces it"),
    "tlsKeyStorePassword": _needless("", "a file of PEM has no password"),
    "tlsTrustStore": _group("", "listener.tls.client_ca", needs="servicePortTls"),
    "tlsTrustStoreType": _needless("JKS", "a file of PEM replaces it"),
    "tlsTrustStorePassword": _needless("", "a file of PEM has no password"),
    "tlsProvider": _needless("", _JAVA),
    "jsseProvider": _needless("", _JAVA),
    "sslFactoryPlugin": _lost(_PLUGIN, _PLUGIN_KEY),
    "sslFactoryPluginParams": _lost("", _PLUGIN_KEY),
    "tlsFactoryClassName": _lost("default", _PLUGIN_KEY),
    "tlsFactoryConfig": _lost("", _PLUGIN_KEY),
    "webServiceTlsProvider": _needless("Conscrypt", _LATER_HTTP, default_5=""),
    "webServiceTlsProtocols": _needless("", _LATER_HTTP),
    "webServiceTlsCiphers": _needless("", _LATER_HTTP),
    # HTTP, WebSocket, extensions
    "httpReverseProxyConfigs": _lost("", _HTTP),
    "httpReverseProxy.*": _lost("", _HTTP),
    "httpOutputBufferSize": _needless("32768", _LATER_HTTP),
    "httpInputMaxReplayBufferSize": _needless("5242880", _LATER_HTTP),
    "httpMaxRequestHeaderSize": _needless("8192", _LATER_HTTP),
    "httpMaxResponseHeaderSize": _needless("8192", _LATER_HTTP),
    "httpProxyTimeout": _needless("300000", _LATER_HTTP),
    "httpProxyIdleTimeout": _needless("30000", _LATER_HTTP),
    "httpServerIdleTimeout": _needless("30000", _LATER_HTTP),
    "httpNumThreads": _needless("", _LATER_HTTP),
    "httpServerThreadPoolQueueSize": _needless("8192", _LATER_HTTP),
    "httpServerAcceptQueueSize": _needless("8192", _LATER_HTTP),
    "maxHttpServerConnections": _needless("2048", _LATER_HTTP),
    "maxConcurrentHttpRequests": _needless("1024", _LATER_HTTP),
    "httpRequestsLimitEnabled": _needless("false", _LATER_HTTP),
    "httpRequestsMaxPerSecond": _needless("100.0", _LATER_HTTP),
    "proxyHttpResponseHeadersJson": _needless("", _LATER_HTTP),
    "webSocketServiceEnabled": _lost("false", _HTTP),
    "webSocketPingDurationSeconds": _needless("-1", _LATER_HTTP),
    "proxyExtensions": _lost("", "protocols of other systems (KoP, MoP) are not served"),
    "proxyExtensionsDirectory": _needless("./proxyextensions", _JAVA),
    "useSeparateThreadPoolForProxyExtensions": _needless("true", _JAVA),
    "additionalServlets": _lost("", _PLUGIN_KEY),
    "additionalServletDirectory": _needless("./proxyAdditionalServlet", _JAVA),
    "proxyAdditionalServlets": _lost("", _PLUGIN_KEY),
    "proxyAdditionalServletDirectory": _needless("./proxyAdditionalServlet", _JAVA),
    # metrics
    "enableProxyStatsEndpoints": _lost("true", "metrics are always served; admin.bind says to whom"),
    "authenticateMetricsEndpoint": _group("true", "admin.token_file", needs="authenticationEnabled"),
    "metricsServletTimeoutMs": _needless("30000", "a scrape of this proxy needs no such time"),
    "metricsBufferResponse": _needless("false", "a scrape of this proxy needs no buffer"),
}

_PATTERNS = tuple(name for name in KEYS if "*" in name)


def find_key(name: str) -> Key | None:
    """Return what becomes of a key; None where Java's proxy has no such key."""
    pattern = next((pattern for pattern in _PATTERNS if fnmatchcase(name, pattern)), None)
    return KEYS.get(name if pattern is None else pattern)


def defaults(release: str) -> dict[str, str]:
    """Return Java's defaults in release ``4`` or ``5``."""
    newer = {name: key.default_5 for name, key in KEYS.items() if key.default_5 is not None and release == "5"}
    return {name: key.default for name, key in KEYS.items()} | newer
