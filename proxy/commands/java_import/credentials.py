"""The proxy's own credentials at brokers: ``brokerClientAuthenticationPlugin`` and its parameters."""

import json
from collections.abc import Mapping

from proxy.commands.java_import import values as v
from proxy.commands.java_import.java import Java, simple_name
from proxy.commands.java_import.result import Result
from proxy.common.suggestions import quote_name

PLUGIN = "brokerClientAuthenticationPlugin"
PARAMETERS = "brokerClientAuthenticationParameters"
_TABLE = "brokers.credentials"
_FILE = f"{_TABLE}.file"
_DISABLED = frozenset({"", "AuthenticationDisabled"})


def put_credentials(java: Java, result: Result) -> None:
    """Convert the plugin and its parameters, of which a secret goes to a file."""
    name, parameters = simple_name(java.given(PLUGIN)), java.given(PARAMETERS)
    result.handled |= {PLUGIN, PARAMETERS}
    if name in _DISABLED:
        if parameters:
            result.skip(PARAMETERS, f"{PLUGIN} names no plugin")
        return
    plugins = {
        "AuthenticationToken": _token,
        "AuthenticationBasic": _basic,
        "AuthenticationTls": _tls,
        "AuthenticationOAuth2": _oauth2,
        "AuthenticationSasl": _sasl,
    }
    convert = plugins.get(name)
    if convert is None:
        result.lose(PLUGIN, f"there is no method here for {quote_name(java.given(PLUGIN))}: see brokers.credentials")
        return
    convert(java, parameters, result)
    if not java.flag("authenticationEnabled"):
        result.note(PLUGIN, "clients do not authenticate (authenticationEnabled), and have the proxy's role at brokers")


def _parameters(text: str) -> Mapping[str, str]:
    """Parse parameters as Java does: a JSON object, or `key:value,key:value`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        pairs = (part.partition(":") for part in text.split(","))
        return {key.strip(): value.strip() for key, _, value in pairs}
    if not isinstance(found, dict):
        return {}
    texts = {key: value for key, value in found.items() if isinstance(value, str)}
    return {key: value.encode(errors="replace").decode() for key, value in texts.items()}  # JSON has half characters


def _token(_java: Java, text: str, result: Result) -> None:
    result.put(f"{_TABLE}.method", "token", PLUGIN)
    if text.startswith("file:"):
        result.put_converted(_FILE, v.path(text), PARAMETERS)
        return
    token = text.removeprefix("token:")
    if text.lstrip().startswith("{"):
        token = _parameters(text).get("token", "")
    if not token.strip():
        result.lose(PARAMETERS, f"it has no token: write {_FILE}")
        return
    _put_secret(result, "proxy.jwt", token.strip().encode() + b"\n", "the token")


def _put_secret(result: Result, file: str, content: bytes, what: str) -> None:
    result.put(_FILE, result.secret(PARAMETERS, file, content, what), PARAMETERS)


def _basic(_java: Java, text: str, result: Result) -> None:
    result.put(f"{_TABLE}.method", "basic", PLUGIN)
    found = _parameters(text)
    if found.get("userId") and found.get("password"):
        secret = f"{found['userId']}:{found['password']}\n".encode()
        _put_secret(result, "proxy.basic", secret, "user:password")
    else:
        result.lose(PARAMETERS, f"it has no userId and password: write {_FILE}")


def _tls(java: Java, text: str, result: Result) -> None:
    result.put(f"{_TABLE}.method", "tls", PLUGIN)
    if not java.flag("tlsEnabledWithBroker"):
        result.lose(PLUGIN, "certificates need TLS to brokers (brokers.service_url with pulsar+ssl)")
        return
    found = _parameters(text)
    for parameter, key, other in (
        ("tlsCertFile", "certificate", "brokerClientCertificateFilePath"),
        ("tlsKeyFile", "key", "brokerClientKeyFilePath"),
    ):
        if found.get(parameter):
            result.put_converted(f"brokers.tls.{key}", v.path(found[parameter]), PARAMETERS)
            if java.given(other):
                result.skip(other, f"{PARAMETERS} counts")


def _oauth2(_java: Java, text: str, result: Result) -> None:
    result.put(f"{_TABLE}.method", "oauth2", PLUGIN)
    found = _parameters(text)
    private = found.get("privateKey", "")
    if private.startswith("file:"):
        result.put_converted(_FILE, v.path(private), PARAMETERS)
    elif private:
        result.lose(PARAMETERS, f"put the JSON of its privateKey (client_id, client_secret) into a file: {_FILE}")
    for parameter, key in (("issuerUrl", "issuer_url"), ("audience", "audience"), ("scope", "scope")):
        if found.get(parameter):
            result.put(f"{_TABLE}.{key}", found[parameter], PARAMETERS)
    if "issuerUrl" not in found or not private:
        result.lose(PARAMETERS, f"it has no issuerUrl or no privateKey: write {_TABLE}.issuer_url and .file")


def _sasl(_java: Java, _text: str, result: Result) -> None:
    result.put(f"{_TABLE}.method", "sasl", PLUGIN)
    for key in ("principal", "file"):
        result.put(f"{_TABLE}.{key}", None, comment=f"to be written, from the JAAS file's section: {key} of the proxy")
    result.lose(PARAMETERS, f"the JAAS file is not read: write {_TABLE}.principal and .file (its principal, keyTab)")
