"""Every key of a Java proxy's configuration, of releases 4.0 to 5.0, a line each: what becomes of it here.

A key whose value is Java's default needs nothing, except where a default of this proxy differs and it matters: those
are of a group (see ``groups``).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from proxy.commands.java_import import values as v
from proxy.commands.java_import.java import HTTP_PORT, TLS_PORT


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


def _lost(default: str, reason: str, needs: str = "") -> Key:
    return Key(default=default, reason=reason, needs=needs, lost=True)


def _http(default: str, target: str, convert: v.Convert) -> Key:
    return _same(default, f"http.{target}", convert, HTTP_PORT)


_ALWAYS_LIMITED = "there is always a limit here"
_HTTP_THREADS = "it is about threads; here processes count: cluster.http_workers"
_JAVA = "it is about Java"
_STORE = "brokers.service_url"
_THREADS = "it counts threads; here processes count, one forwarder for each CPU"
_PLUGIN_KEY = "Java classes cannot be used here"
_PLUGIN = "org.apache.pulsar.common.util.DefaultPulsarSslFactory"
_KEEP_ALIVE_OFF = "pings cannot be turned off here"
_TOPIC_LISTS = "limits.max_topic_lists_bytes is the one bound, and limits.lookup_timeout_ms the longest wait"
_DISCOVERY_ONLY = "it is about the metadata store, which the proxy does not use"


def _of_both(*keys: str) -> tuple[str, ...]:
    """Return keys of the TLS of listeners for Pulsar's protocol and for HTTP: Java has one certificate for both."""
    return tuple(f"{table}.tls.{key}" for table in ("listener", "http_listener") for key in keys)


KEYS: dict[str, Key] = {
    # brokers
    "brokerServiceURL": _group("", "brokers.service_url"),
    "brokerServiceURLTLS": _group("", "brokers.service_url"),
    "tlsEnabledWithBroker": _group("false", "brokers.service_url"),
    "brokerWebServiceURL": _group("", "brokers.web_service_url", needs=HTTP_PORT),
    "brokerWebServiceURLTLS": _group("", "brokers.web_service_url", needs=HTTP_PORT),
    "functionWorkerWebServiceURL": _group("", "http.function_worker_url", needs=HTTP_PORT),
    "functionWorkerWebServiceURLTLS": _group("", "http.function_worker_url", needs=HTTP_PORT),
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
    "bindAddress": _group("0.0.0.0", "listener.bind", "http_listener.bind", "admin.bind"),  # noqa: S104 -- as in Java
    "servicePort": _group("6650", "listener.bind"),
    "servicePortTls": _group("", "listener.bind"),
    "webServicePort": _group("8080", "http_listener.bind", "admin.bind"),
    "webServicePortTls": _group("", "http_listener.bind"),
    "advertisedAddress": _needless("", "no client and no broker is told the proxy's own name"),
    "clusterName": _same("", "cluster.name"),
    "keepAliveIntervalSeconds": _same(
        "30", "limits.keep_alive_interval_ms", v.at_least(1, factor=1000, off=_KEEP_ALIVE_OFF)
    ),
    "haProxyProtocolEnabled": _group(
        "false", "listener.proxy_protocol", "listener.proxy_protocol_sources", "brokers.proxy_protocol"
    ),
    "webServiceHaProxyProtocolEnabled": _group(
        "false", "http_listener.proxy_protocol", "http_listener.proxy_protocol_sources", needs=HTTP_PORT
    ),
    "webServiceTrustXForwardedFor": _lost(
        "false", "X-Forwarded-For of a client is not believed: a connection's own address counts", HTTP_PORT
    ),
    "webServiceLogDetailedAddresses": _needless("", "http.access_log names the client's address and the upstream"),
    "proxyZeroCopyModeEnabled": _needless("true", "bytes are spliced wherever both sides are plain"),
    "proxyLogLevel": _lost("0", "commands of clients are not logged; metrics.count_messages counts messages"),
    "statusFilePath": _lost("", "no file takes the proxy out of rotation: `drain` does, and /readyz tells"),
    "numIOThreads": _needless("", _THREADS),
    "numAcceptorThreads": _needless("1", _THREADS),
    "maxMessageSize": _needless("5242880", "a relay has no bound on messages"),
    "narExtractionDirectory": _needless("", _JAVA),
    "authenticationRoleLoggingAnonymizer": _lost("NONE", "roles are logged as they are"),
    # limits
    "maxConcurrentInboundConnections": _same("10000", "limits.max_connections", v.at_least(1, off=_ALWAYS_LIMITED)),
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
    "saslJaasServerRoleTokenSignerSecretPath": _lost(
        "", "clients cannot authenticate by Kerberos over HTTP, as they can at the other listeners", "Sasl"
    ),
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
    "openIDFallbackDiscoveryMode": _same(
        "DISABLED", "authentication.oidc.kubernetes.discovery", v.kubernetes_discovery, "OpenID"
    ),
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
    "tlsCertificateFilePath": _group("", *_of_both("certificate"), needs=TLS_PORT),
    "tlsKeyFilePath": _group("", *_of_both("key"), needs=TLS_PORT),
    "tlsTrustCertsFilePath": _group("", *_of_both("client_ca"), needs=TLS_PORT),
    "tlsRequireTrustedClientCertOnConnect": _group("false", *_of_both("require_client_certificate"), needs=TLS_PORT),
    "tlsAllowInsecureConnection": _lost(
        "false", "certificates of clients and brokers that cannot be verified are refused"
    ),
    "tlsCertRefreshCheckDurationSec": _needless("300", "changed files are read at once"),
    "tlsProtocols": _same("", "listener.tls.minimum_version", v.tls_version, "servicePortTls"),
    "tlsCiphers": _same("", "listener.tls.ciphers", v.ciphers, "servicePortTls"),
    "tlsEnabledWithKeyStore": _group("false", *_of_both("certificate"), needs=TLS_PORT),
    "tlsKeyStore": _group("", *_of_both("certificate", "key"), needs=TLS_PORT),
    "tlsKeyStoreType": _needless("JKS", "a file of PEM replaces it"),
    "tlsKeyStorePassword": _needless("", "a file of PEM has no password"),
    "tlsTrustStore": _group("", *_of_both("client_ca"), needs=TLS_PORT),
    "tlsTrustStoreType": _needless("JKS", "a file of PEM replaces it"),
    "tlsTrustStorePassword": _needless("", "a file of PEM has no password"),
    "tlsProvider": _needless("", _JAVA),
    "jsseProvider": _needless("", _JAVA),
    "sslFactoryPlugin": _lost(_PLUGIN, _PLUGIN_KEY),
    "sslFactoryPluginParams": _lost("", _PLUGIN_KEY),
    "tlsFactoryClassName": _lost("default", _PLUGIN_KEY),
    "tlsFactoryConfig": _lost("", _PLUGIN_KEY),
    "webServiceTlsProvider": _needless("Conscrypt", _JAVA, default_5=""),
    "webServiceTlsProtocols": _group("", "http_listener.tls.minimum_version", needs="webServicePortTls"),
    "webServiceTlsCiphers": _group("", "http_listener.tls.ciphers", needs="webServicePortTls"),
    # HTTP, WebSocket, extensions
    "httpReverseProxyConfigs": _lost(
        "", "Java itself reads only httpReverseProxy.<name>.path and .proxyTo; here they are http.routes", HTTP_PORT
    ),
    "httpReverseProxy.*": _group("", "http.routes", needs=HTTP_PORT),
    "httpOutputBufferSize": _needless("32768", "bodies are passed on as they come"),
    "httpInputMaxReplayBufferSize": _http("5242880", "max_replay_bytes", v.at_least(0)),
    "httpMaxRequestHeaderSize": _http("8192", "max_head_bytes", v.at_least(1024, most=1024**2)),
    "httpMaxResponseHeaderSize": _needless("8192", "heads of responses have a fixed bound"),
    "httpProxyTimeout": _http("300000", "response_timeout_ms", v.at_least(1)),
    "httpProxyIdleTimeout": _http("30000", "body_timeout_ms", v.at_least(1, off=_ALWAYS_LIMITED)),
    "httpServerIdleTimeout": _http("30000", "idle_timeout_ms", v.at_least(1, off=_ALWAYS_LIMITED)),
    "httpNumThreads": _needless("", _HTTP_THREADS),
    "httpServerThreadPoolQueueSize": _needless("8192", _HTTP_THREADS),
    "httpServerAcceptQueueSize": _needless("8192", "clients wait in the kernel's queue, as at all listeners"),
    "maxHttpServerConnections": _http("2048", "max_connections", v.at_least(1, off=_ALWAYS_LIMITED, most=10_000)),
    "maxConcurrentHttpRequests": _http("1024", "max_requests", v.at_least(1, off=_ALWAYS_LIMITED, most=10_000)),
    "httpRequestsLimitEnabled": _lost(
        "false", "no rate of requests is limited, but how many are under way: http.max_requests", HTTP_PORT
    ),
    "httpRequestsMaxPerSecond": _needless("100.0", "httpRequestsLimitEnabled decides whether it counts"),
    "proxyHttpResponseHeadersJson": _group("", "http.response_headers", needs=HTTP_PORT),
    "webSocketServiceEnabled": _lost(
        "false",
        "WebSocket (/ws) is passed on: the brokers need webSocketServiceEnabled=true, or http.websocket_url names "
        "Pulsar's WebSocket service",
        HTTP_PORT,
    ),
    "webSocketPingDurationSeconds": _needless("-1", "webSocketServiceEnabled decides whether it counts"),
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
