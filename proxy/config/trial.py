"""Trials of changes by which brokers are reached: what they concern, and what comes of one."""

from collections.abc import Iterator

import msgspec

from proxy.config.http import uses_broker_tls
from proxy.config.types import Config

TRIAL_TIMEOUT_S = 20.0
"""Longest time for a trial; an operator's command waits for it."""


class BrokerTrial(msgspec.Struct, frozen=True):
    """Result of a trial. ``reason``: why no broker accepts the proxy, for an operator."""

    accepted: bool
    reason: str = ""


def reaches_brokers_alike(old: Config, new: Config) -> bool:
    """Return True if the proxy reaches brokers in the same way under both configurations, and as the same client."""
    keys = ("service_url", "through_proxy", "proxy_protocol", "tls", "credentials")
    return all(getattr(old.brokers, key) == getattr(new.brokers, key) for key in keys)


def broker_files(config: Config, *, with_credentials: bool = True) -> tuple[str, ...]:
    """Return the files whose content workers hold until a broker accepts another (proxy.common.reloading_file).

    ``with_credentials``: those, too, whose names are for auth workers alone. Kerberos' library reads the keytab itself.
    """
    return tuple(_broker_files(config, with_credentials=with_credentials))


def _broker_files(config: Config, *, with_credentials: bool) -> Iterator[str]:
    tls, credentials = config.brokers.tls, config.brokers.credentials
    if uses_broker_tls(config):
        yield from (file for file in (tls.trust, tls.certificate, tls.key) if file)
    if with_credentials and credentials is not None and credentials.method != "sasl" and credentials.file:
        yield credentials.file
