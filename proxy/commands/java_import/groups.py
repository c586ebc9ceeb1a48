"""Keys of a Java proxy that are converted together: where one decides what another means."""

import base64
import binascii
import os
import re
import secrets
import shlex

from proxy.commands.java_import import values as v
from proxy.commands.java_import.credentials import put_credentials
from proxy.commands.java_import.http import LISTENERS, convert_http, put_proxy_protocol
from proxy.commands.java_import.java import PROVIDER_PREFIX, TLS_PORT, Java, Lost, simple_name
from proxy.commands.java_import.result import Result
from proxy.common.suggestions import quote_name

STORES = (
    *("metadataStoreUrl", "configurationMetadataStoreUrl"),
    *("zookeeperServers", "configurationStoreServers", "globalZookeeperServers"),
)
HMAC_KEY_BYTES_MIN = 16
_STORES_TO_PEM = "files of PEM take the place of keystores and truststores"
_SCHEME = re.compile(r"([a-z+]+)://")
_URLS = {False: "brokerServiceURL", True: "brokerServiceURLTLS"}


def convert_groups(java: Java, result: Result) -> None:
    """Convert all groups of keys."""
    for convert in (_listeners, _brokers, _http, _targets, put_credentials, _authentication, _admin):
        convert(java, result)


# ---- brokers


def _brokers(java: Java, result: Result) -> None:
    """Choose the URL of brokers as Java does: by ``tlsEnabledWithBroker``. Never by a metadata store."""
    tls = java.flag("tlsEnabledWithBroker")
    name, other = _URLS[tls], _URLS[not tls]
    url = _service_url(java.given(name), tls=tls)
    stores = _stores(java)
    result.handled.add("tlsEnabledWithBroker")
    if java.given(other):
        result.skip(other, f"tlsEnabledWithBroker is {str(tls).lower()}, so {name} counts")
    for store in stores:
        if java.given(name):
            result.skip(store, "the proxy needs no metadata store: it finds brokers by brokers.service_url")
        else:
            result.lose(
                store,
                "brokers are not looked up in a metadata store, which Pulsar's maintainers advise against: name them "
                "in brokers.service_url",
            )
    if isinstance(url, Lost):
        result.lose(name, url.reason)
    if isinstance(url, Lost) or not url:
        result.put("brokers.service_url", None, comment=f"to be written: the brokers' URL, as {name} had to have it")
        if not java.given(name) and not stores:
            result.lose(name, "it is empty, and nothing else names the brokers: write brokers.service_url")
    else:
        names = (name, "tlsEnabledWithBroker") if tls else (name,)
        result.put("brokers.service_url", url, *names)
        if tls:
            _broker_tls(java, result)


def _stores(java: Java) -> list[str]:
    return [store for store in STORES if java.given(store)]


def _service_url(url: str, *, tls: bool) -> str | Lost:
    """Return a URL with the scheme that says whether TLS is used, which in Java another key says."""
    found = _SCHEME.match(url)
    if found and found[1] not in {"pulsar", "pulsar+ssl"}:
        return Lost("its scheme is neither pulsar nor pulsar+ssl")
    rest = url[found.end() :] if found else url
    return f"{'pulsar+ssl' if tls else 'pulsar'}://{rest}" if rest else ""


def _broker_tls(java: Java, result: Result) -> None:
    verify = java.flag("tlsHostnameVerificationEnabled")
    off = "" if verify else "off as in Java: any certificate of the authority passes for any broker"
    result.put("brokers.tls.verify_hostname", verify, "tlsHostnameVerificationEnabled", comment=off)
    if not verify:
        result.note(
            "tlsHostnameVerificationEnabled",
            "brokers' certificates are not checked against their names, as in Java's release 4: set "
            "brokers.tls.verify_hostname = true once brokers have certificates for their names",
        )
    if not java.flag("brokerClientTlsEnabledWithKeyStore"):
        for name in ("brokerClientTlsKeyStore", "brokerClientTlsTrustStore"):
            _skip_given(java, result, name, "brokerClientTlsEnabledWithKeyStore is false")
        return
    result.skip("brokerClientTlsEnabledWithKeyStore", _STORES_TO_PEM)
    _convert_store(java, result, "brokerClientTlsKeyStore", "brokers.tls.certificate", "brokers.tls.key")
    _convert_store(java, result, "brokerClientTlsTrustStore", "brokers.tls.trust")


def _skip_given(java: Java, result: Result, name: str, reason: str) -> None:
    if java.given(name):
        result.skip(name, reason)


def _convert_store(java: Java, result: Result, name: str, certificate: str, key: str = "") -> None:
    """Name the files of PEM that replace a keystore, with the commands that make them; without ``key`` it is a
    truststore. No password is shown.
    """
    store, kind = java.given(name), "keystore" if key else "truststore"
    if not store:
        return
    made, commands = _pkcs12(store, java.get(f"{name}Type"))
    commands += (f"openssl pkcs12 -in {made} -nokeys -out {shlex.quote(f'{store}.crt')}",)
    targets = {certificate: f"{store}.crt"}
    if key:
        commands += (f"(umask 077; openssl pkcs12 -in {made} -nocerts -nodes -out {shlex.quote(f'{store}.key')})",)
        targets[key] = f"{store}.key"
    result.lose(name, f"{kind}s are not read, only PEM; convert it: {'; '.join(commands)}")
    for target, file in targets.items():
        result.put(target, file, comment=f"from the {kind} of {name}, once it is converted")


def _pkcs12(store: str, kind: str) -> tuple[str, tuple[str, ...]]:
    """Return a store's name as PKCS12, quoted for a shell, and the command that makes it of JKS."""
    if kind.upper() == "PKCS12":
        return shlex.quote(store), ()
    made = shlex.quote(f"{store}.p12")
    source = shlex.quote(store)
    return made, (f"keytool -importkeystore -srckeystore {source} -destkeystore {made} -deststoretype PKCS12",)


def _targets(java: Java, result: Result) -> None:
    """Carry over which brokers clients may reach. `*`, Java's default, is everything: here it is the brokers'.

    If one of two rules is not understood, neither is written: without both, only brokers of service_url are reached.
    """
    hosts, addresses = "brokerProxyAllowedHostNames", "brokerProxyAllowedIPAddresses"
    found = {
        hosts: ("brokers.allowed_hosts", java.items(hosts), v.entries(java.get(hosts))),
        addresses: ("brokers.allowed_addresses", java.items(addresses), []),
    }
    if "*" not in java.items(addresses):
        found[addresses] = ("brokers.allowed_addresses", java.items(addresses), v.networks(java.get(addresses)))
    broken = isinstance(found[addresses][2], Lost)
    for name, (target, entries, value) in found.items():
        result.handled.add(name)
        if "*" in entries:
            if len(entries) > 1:
                result.skip(name, "with * its other entries say nothing")
            continue
        if isinstance(value, Lost):
            result.lose(name, value.reason)
        elif broken:
            result.lose(name, f"{target} alone would allow more, and {addresses} is not understood")
        else:
            result.put(target, value, name)
    if all("*" in entries for _, entries, _ in found.values()):
        result.note(
            hosts,
            "Java's proxy lets clients go to any host; here they reach the brokers of brokers.service_url and names "
            "below it. Name other brokers in brokers.allowed_hosts or brokers.allowed_addresses",
        )


# ---- listeners


def _listeners(java: Java, result: Result) -> None:
    plain, tls = java.port("servicePort"), java.port("servicePortTls")
    result.handled |= {"bindAddress", "servicePort", "servicePortTls"}
    if plain:
        result.put("plain listener.bind", java.bind(plain), "bindAddress", "servicePort")
        put_proxy_protocol(java, result, "plain listener", "haProxyProtocolEnabled")
    if tls:
        result.put("TLS listener.bind", java.bind(tls), "bindAddress", "servicePortTls")
        put_proxy_protocol(java, result, "TLS listener", "haProxyProtocolEnabled")
        _listener_tls(java, result, "listener.tls")
    if java.flag("haProxyProtocolEnabled"):  # Java's proxy sends brokers a header, too, within TLS
        result.put("brokers.proxy_protocol", "within_tls", "haProxyProtocolEnabled")
    if not plain and not tls:
        result.lose("servicePort", "neither it nor servicePortTls has a port: the default listener is on 6650")


def _http(java: Java, result: Result) -> None:
    convert_http(java, result, _stores(java), _listener_tls)
    if java.missing(TLS_PORT) or any(table in result.tables for table in ("TLS listener", "TLS http_listener")):
        return
    for name in (*_TLS_FILES, "tlsEnabledWithKeyStore", "tlsKeyStore", "tlsTrustStore", _REQUIRED):
        if not java.is_default(name):
            result.skip(name, "webServicePortTls, which alone needs it, is not carried over")


_REQUIRED = "tlsRequireTrustedClientCertOnConnect"
_TLS_FILES = {
    "tlsCertificateFilePath": "certificate",
    "tlsKeyFilePath": "key",
    "tlsTrustCertsFilePath": "client_ca",
}


def _listener_tls(java: Java, result: Result, table: str) -> None:
    """Put the TLS of one of Java's ports, which all have the same certificate."""
    with_stores = java.flag("tlsEnabledWithKeyStore")
    for name, key in _TLS_FILES.items():
        if with_stores:
            _skip_given(java, result, name, "tlsEnabledWithKeyStore is true")
        elif java.given(name):
            result.put_converted(f"{table}.{key}", v.path(java.given(name)), name)
        elif key != "client_ca":
            result.lose(name, f"a port for TLS is set, but not this: write {table}.{key}")
    for name in ("tlsKeyStore", "tlsTrustStore"):
        if not with_stores:
            _skip_given(java, result, name, "tlsEnabledWithKeyStore is false")
    if with_stores:
        result.skip("tlsEnabledWithKeyStore", _STORES_TO_PEM)
        _convert_store(java, result, "tlsKeyStore", f"{table}.certificate", f"{table}.key")
        _convert_store(java, result, "tlsTrustStore", f"{table}.client_ca")
    if not java.is_default(_REQUIRED):
        result.put_converted(f"{table}.require_client_certificate", v.boolean(java.given(_REQUIRED)), _REQUIRED)
    result.require_table(table)


def _admin(java: Java, result: Result) -> None:
    """Open the admin port where Java's was open to all; where Java asked for credentials, only with a token.

    It is at Java's web port, unless HTTP is served there.
    """
    name, port = "authenticateMetricsEndpoint", java.port("webServicePort")
    result.handled |= {name, "webServicePort"}
    sources: tuple[str, ...] = ("bindAddress", "webServicePort")
    has_port = bool(port)
    if any(table in result.tables for table in LISTENERS):
        port, sources = _free_port(java), ("bindAddress",)
        result.note("webServicePort", f"it serves HTTP; /metrics and /status are at the admin port, {port}")
    if not port:
        return
    closed = java.flag(name) and java.flag("authenticationEnabled")
    opens = java.flag("enableProxyStatsEndpoints") and has_port
    if opens and closed and result.secrets_directory is not None:
        token = result.secret(name, "admin-token", secrets.token_hex(32).encode() + b"\n", "a token")
        result.put("admin.bind", java.bind(port), *sources)
        result.put("admin.token_file", token, name, comment="a new token, which Prometheus needs now")
        result.note(name, f"/metrics and /status now require the new token in {token}")
    elif opens and not closed:
        names = (*sources, *([name] if java.flag("authenticationEnabled") else []))
        result.put("admin.bind", java.bind(port), *names, comment="open to all, as in Java")
        result.note("webServicePort", "/metrics and /status are open to all who reach the port: see admin.token_file")
    else:
        result.put("admin.bind", f"127.0.0.1:{port}", *sources[1:], comment="on this machine only")
        result.note(
            "webServicePort",
            "the admin port (metrics, probes) is on this machine only, since Java's was not open to all: to open it, "
            "set admin.token_file and admin.bind",
        )


def _free_port(java: Java) -> str:
    """Return a port for the admin port that no listener has: Java's own default, if it is free."""
    ports = ("servicePort", "servicePortTls", "webServicePort", "webServicePortTls")
    used = {java.port(name) for name in ports}
    return next(port for port in map(str, range(8080, 8085)) if port not in used)


# ---- authentication of clients


def _authentication(java: Java, result: Result) -> None:
    result.handled |= {"authenticationEnabled", "authenticationProviders"}
    if not java.flag("authenticationEnabled"):
        return
    names = ("authenticationEnabled", "authenticationProviders")
    result.put("authentication.enabled", True, *names)
    providers = {"Token": _token, "Tls": _certificates, "Basic": _basic, "Sasl": _sasl, "OpenID": _oidc}
    for java_class in java.providers():
        convert = providers.get(simple_name(java_class).removeprefix(PROVIDER_PREFIX))
        if convert is None:
            result.lose("authenticationProviders", f"there is no provider here for {quote_name(java_class)}")
        else:
            convert(java, result)
    if not java.providers():
        result.lose("authenticationProviders", "authenticationEnabled is true, but no provider is named")
    result.put(
        "brokers.forward_authorization_credentials",
        java.flag("forwardAuthorizationCredentials"),
        "forwardAuthorizationCredentials",
    )


def _token(java: Java, result: Result) -> None:
    result.require_table("authentication.token")
    secret, public = "tokenSecretKey", "tokenPublicKey"
    if java.given(secret):
        _key(java, result, secret, "authentication.token.secret_key", "token-secret.key")
        # Two keys here would both be valid; in Java the first one is.
        _skip_given(java, result, public, f"Java uses {secret} alone where both are set")
    elif java.given(public):
        _key(java, result, public, "authentication.token.public_key", "token-public.der")
    else:
        result.lose(secret, f"neither it nor {public} is set: write authentication.token.public_key")
    claim, audience = "tokenAudienceClaim", "tokenAudience"
    if java.given(claim):
        result.put("authentication.token.audience_claim", java.given(claim), claim)
        result.put("authentication.token.audience", java.given(audience), audience)
    else:
        _skip_given(java, result, audience, f"Java checks no audience without {claim}")


def _key(java: Java, result: Result, name: str, target: str, file: str) -> None:
    """Set a key of tokens, which Java takes as a path, a URL of a file, `data:`, or Base64."""
    value = java.given(name)
    content = _embedded(value)
    if content is None and value.startswith(("file:", "/", ".")):
        result.put_converted(target, v.path(value), name)
    elif content is None:
        result.lose(name, f"it is neither the path of a file nor Base64 of a key: write {target}")
    elif value.startswith("/"):
        result.lose(name, "it may be a path or Base64: write file:// in front of a path, data:;base64, of a key")
    else:
        result.put(target, result.secret(name, file, content, "the decoded key"), name)


def _embedded(value: str) -> bytes | None:
    """Decode what stands in a value itself; None where it names a file. As in Java, a file that exists is a file."""
    if value.startswith("data:"):
        media, _, data = value.partition(",")
        return _decoded(data) if media.endswith(";base64") else data.encode()
    if value.startswith(("file:", ".")) or os.path.exists(value):  # noqa: PTH110 -- no path may be too long
        return None
    content = _decoded(value)
    return content if content is not None and len(content) >= HMAC_KEY_BYTES_MIN else None


def _decoded(data: str) -> bytes | None:
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _certificates(_java: Java, result: Result) -> None:
    result.require_table("authentication.tls")


def _basic(java: Java, result: Result) -> None:
    result.require_table("authentication.basic")
    name = "basicAuthConf"
    if java.given(name):
        _key(java, result, name, "authentication.basic.file", "users.htpasswd")
    else:
        result.lose(name, "it is not set: write authentication.basic.file")


def _sasl(java: Java, result: Result) -> None:
    """Set what is known: the proxy's principal and keytab are in a JAAS file, which proxy.conf does not name."""
    name = "saslJaasServerSectionName"
    result.put(
        "authentication.sasl.allowed_principals", java.get("saslJaasClientAllowedIds"), "saslJaasClientAllowedIds"
    )
    for key in ("principal", "keytab"):
        result.put(f"authentication.sasl.{key}", None, comment=f"to be written: {key} of the JAAS file's section")
    result.lose(
        name,
        "the JAAS file is not read: write authentication.sasl.principal and .keytab as its section (principal, keyTab)",
    )


def _oidc(java: Java, result: Result) -> None:
    name = "openIDAllowedTokenIssuers"
    issuers = java.items(name)
    mode = "openIDFallbackDiscoveryMode"
    kubernetes = java.get(mode) != "DISABLED"
    if issuers or not kubernetes:
        result.put("authentication.oidc.allowed_issuers", issuers, name)
    if kubernetes:
        result.note(
            mode,
            "service accounts have their role from `sub`, whatever openIDRoleClaim says, and sign no other roles; the "
            "pod needs the token of its account (this project's chart mounts it)",
        )
    if len(issuers) > 1 or (issuers and kubernetes):
        result.lose(
            name,
            "in Java each issuer may sign any role; here, of several issuers, each needs its roles in "
            "authentication.oidc.allowed_roles",
        )
