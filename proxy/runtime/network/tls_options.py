"""Options of TLS that listeners and the side of the brokers share: versions, ciphers, groups."""

import re
import ssl
from collections.abc import Sequence

from proxy.common.errors import ConfigError
from proxy.config.types import BrokerTls, ListenerTls

CIPHER_BITS_MIN = 128

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_SEPARATORS = re.compile("[:;, ]+")  # openssl-ciphers(1)
_SHORT_NAMES = {"P-256": "prime256v1", "P-384": "secp384r1", "P-521": "secp521r1"}
"""Names of groups for ``SSLContext.set_ecdh_curve``, where they are others."""


def set_options(context: ssl.SSLContext, key: str, config: ListenerTls | BrokerTls) -> None:
    """Set the versions, ciphers and groups of a table ``key``. Raises ConfigError."""
    context.minimum_version = _VERSIONS[config.minimum_version]
    if config.ciphers:
        _set_ciphers(context, f"{key}.ciphers", config.ciphers)
    try:
        set_groups(context, config.groups)
    except (ValueError, ssl.SSLError):
        names = ", ".join(config.groups)
        raise ConfigError(f"{key}.groups: {names}: not known to {ssl.OPENSSL_VERSION}") from None
    except NotImplementedError as error:
        raise ConfigError(f"{key}.groups: {error}") from None


def set_groups(context: ssl.SSLContext, names: Sequence[str]) -> None:
    """Set the groups for the key exchange; none: OpenSSL's default.

    Raises ValueError or ssl.SSLError for names that OpenSSL does not know, NotImplementedError where Python's ssl has
    no way to set them: it then takes one, by a name of a kind that those with MLKEM do not have.
    """
    if not names:
        return
    set_all = getattr(context, "set_groups", None)  # Python 3.15
    if set_all is not None:
        set_all(":".join(names))
    elif len(names) == 1 and "MLKEM" not in names[0]:
        context.set_ecdh_curve(_SHORT_NAMES.get(names[0], names[0]))
    else:
        raise NotImplementedError(
            "several, and those with MLKEM, need Python 3.15; with this one name a single other one"
        )


def _set_ciphers(context: ssl.SSLContext, key: str, ciphers: str) -> None:
    """Set the ciphers for TLS 1.2, if all of them protect a connection, and every name is one. Raises ConfigError."""
    scratch = ssl.SSLContext(context.protocol)
    for name in _SEPARATORS.split(ciphers):
        selection = name.partition("@")[0]  # @STRENGTH and @SECLEVEL select none
        if selection and selection[0] not in "!-+":  # OpenSSL ignores what it does not know
            _select(scratch, key, selection)
    level = context.security_level
    _select(context, key, ciphers)
    if context.security_level < level:
        raise ConfigError(f"{key}: {ciphers!r}: @SECLEVEL must not be below {level}")
    for cipher in context.get_ciphers():
        if cipher["auth"] == "auth-null":
            raise ConfigError(f"{key}: {ciphers!r} selects {cipher['name']}, which does not authenticate the server")
        if cipher["strength_bits"] < CIPHER_BITS_MIN:
            raise ConfigError(f"{key}: {ciphers!r} selects {cipher['name']}, which is weak, or does not encrypt at all")


def _select(context: ssl.SSLContext, key: str, ciphers: str) -> None:
    try:
        context.set_ciphers(ciphers)
    except (ValueError, ssl.SSLError):  # ValueError: a NUL in it
        raise ConfigError(f"{key}: {ciphers!r} selects no cipher for TLS 1.2 of {ssl.OPENSSL_VERSION}") from None
