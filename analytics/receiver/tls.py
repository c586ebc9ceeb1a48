"""The TLS context of the senders' listener."""

import ssl

from analytics.receiver.config import Tls
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import ReloadingFile

KEY = "listen.tls"

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def reloading_tls_context(config: Tls | None) -> ReloadingFile[ssl.SSLContext] | None:
    """Return the TLS context for new connections, reloaded when its files change; None for plain HTTP.

    Raises ConfigError.
    """
    if config is None:
        return None
    files = [file for file in (config.certificate, config.key, config.client_ca) if file]
    return ReloadingFile(KEY, files, lambda: _context(config))


def _context(config: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.minimum_version]
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_passphrase)
        if config.client_ca:
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ConfigError(f"{KEY}: {error.reason or error}: do certificate, key and client_ca fit?") from None
    return context


def _no_passphrase() -> str:
    raise ConfigError(f"{KEY}.key: needs a passphrase, which cannot be entered here")
