"""The configuration as a worker gets it: without secrets that its role does not need, encoded for the RPC."""

import msgspec

from proxy.config.methods import forwards_credentials, one_round_methods
from proxy.config.types import (
    Authentication,
    BasicAuthentication,
    BrokerCredentials,
    Config,
    TlsAuthentication,
    TokenAuthentication,
)

_DECODER = msgspec.json.Decoder(Config)
"""Built with the import, which workers share: it takes longer than to decode, while a predecessor's relays wait."""

_WITHHELD = "withheld"
"""In place of a name of a file, where there must be one."""


def without_secrets(config: Config) -> Config:
    """Return the configuration for a worker that is no auth worker: without keys, credentials and their file names."""
    methods = one_round_methods(config.authentication)  # which a forwarder may ask another auth worker about
    told = Authentication(
        enabled=config.authentication.enabled,
        failure_delay_ms=config.authentication.failure_delay_ms,
        proxy_roles=config.authentication.proxy_roles,
        deny_file=config.authentication.deny_file,  # a forwarder ends the connections of what it names
        anonymous_role=config.authentication.anonymous_role,  # its clients share by address
        token=TokenAuthentication() if "token" in methods else None,
        tls=TlsAuthentication() if "tls" in methods else None,
        basic=BasicAuthentication(file=_WITHHELD) if "basic" in methods else None,
    )
    brokers = config.brokers
    if config.authentication.enabled:  # whose methods are known here alone
        forwards = forwards_credentials(config)
        brokers = msgspec.structs.replace(brokers, forward_authorization_credentials=forwards)
    if brokers.credentials is not None:
        credentials = BrokerCredentials(method=brokers.credentials.method)
        brokers = msgspec.structs.replace(brokers, credentials=credentials)
    return msgspec.structs.replace(config, authentication=told, brokers=brokers)


def encode_config(config: Config) -> bytes:
    """Encode a configuration for a worker, as JSON."""
    return msgspec.json.encode(config)


def decode_config(data: bytes) -> Config:
    """Decode what ``encode_config`` has encoded."""
    return _DECODER.decode(data)
