"""Converters of single values: each takes a Java proxy's text, and returns this proxy's value, Lost or Needless."""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from proxy.commands.java_import.java import Lost, Needless, split_list

Converted = str | int | bool | list[str] | list[int] | Lost | Needless
Convert = Callable[[str], Converted]

INTEGER_MAX = 2**31 - 1
_JAVA_CIPHER = re.compile(r"TLS_(ECDHE|DHE)_(RSA|ECDSA)_WITH_(?:AES_(128|256)_GCM|(CHACHA20_POLY1305))_(SHA\d+)\Z")
_OPENSSL_CIPHER = re.compile(r"(?!TLS_)[A-Z0-9]+(?:-[A-Z0-9]+)+\Z")
_TLS13_CIPHER = re.compile(r"TLS_(AES|CHACHA20)_\w+\Z")
_NEW_TLS = frozenset({"TLSv1.2", "TLSv1.3"})


def text(value: str) -> Converted:
    """Return the text as it is."""
    return value


def entries(value: str) -> Converted:
    """Return a list that Java separates by commas."""
    return split_list(value)


def boolean(value: str) -> Converted:
    """Return true or false."""
    return value.lower() == "true" if value.lower() in {"true", "false"} else Lost("it is neither true nor false")


def at_least(minimum: int, factor: int = 1, off: str = "", most: int = INTEGER_MAX) -> Convert:
    """Return a converter of integers, times a factor; ``off``: why a value below the minimum cannot be had here."""

    def convert(value: str) -> Converted:
        if not re.fullmatch(r"[+-]?[0-9]+", value):
            return Lost("it is no integer")
        number = int(value) if len(value) < 20 else INTEGER_MAX + 1  # noqa: PLR2004 -- as digits of a long
        if number < minimum and off:
            return Lost(off)
        if not minimum <= number <= most // factor:
            return Lost(f"it is not within {minimum} to {most // factor}")
        return number * factor

    return convert


def path(value: str) -> Converted:
    """Return the path of a file, of which Java also takes a URL (``file:///etc/key.der``)."""
    if value.startswith("data:"):
        return Lost("its content stands in the file itself (data:); here it is the path of a file")
    if not value.startswith("file:"):
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return Lost("it is no URL of a file")
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        return Lost("it is no URL of a file on this machine")
    return unquote(parts.path)


def kubernetes_discovery(value: str) -> Converted:
    """Return where the keys of Kubernetes' issuer are."""
    modes = {"KUBERNETES_DISCOVER_TRUSTED_ISSUER": "trusted_issuer", "KUBERNETES_DISCOVER_PUBLIC_KEYS": "public_keys"}
    return modes.get(value) or Lost("it is none of Java's modes")


def tls_version(value: str) -> Converted:
    """Return the oldest version of a list of TLS's versions."""
    versions = set(split_list(value))
    if not versions <= _NEW_TLS:
        return Lost("versions older than TLS 1.2 are never accepted here, and other names are unknown")
    return "1.2" if "TLSv1.2" in versions else "1.3"


def ciphers(value: str) -> Converted:
    """Return Java's names of ciphers as OpenSSL's."""
    names = [_cipher(name) for name in split_list(value)]
    if None in names:
        return Lost("it has ciphers without forward secrecy and authenticated encryption, or with unknown names")
    return ":".join(name for name in names if name) or Needless("the ciphers of TLS 1.3 are always OpenSSL's")


def _cipher(name: str) -> str | None:
    """Return OpenSSL's name of one cipher; empty for those of TLS 1.3, which are not chosen; None: there is none."""
    if _TLS13_CIPHER.match(name):
        return ""
    found = _JAVA_CIPHER.match(name)
    if found is None:
        return name if _OPENSSL_CIPHER.match(name) else None
    exchange, signature, bits, chacha, digest = found.groups()
    return f"{exchange}-{signature}-CHACHA20-POLY1305" if chacha else f"{exchange}-{signature}-AES{bits}-GCM-{digest}"


def networks(value: str) -> Converted:
    """Return addresses and networks, also with netmasks (``10.0.0.0/255.0.0.0``)."""
    try:
        return [str(ipaddress.ip_network(entry, strict=False)) for entry in split_list(value)]
    except ValueError:
        return Lost("it has an entry that is no address or network in CIDR form")


def ports(value: str) -> Converted:
    """Return a list of ports."""
    found = split_list(value)
    if "*" in found:
        return Lost("* is all ports; here ports of brokers are named, beside those of brokers.service_url")
    if not all(re.fullmatch(r"\d{1,5}", port) and 1 <= int(port) <= 65535 for port in found):  # noqa: PLR2004
        return Lost("it has an entry that is no port")
    return [int(port) for port in found]


def expiry_check(value: str) -> Converted:
    """Return how an expired session is treated: Java looks for expired credentials at times, or never."""
    return "observe" if value == "0" else Needless("a session ends when its credential does, not at intervals")
