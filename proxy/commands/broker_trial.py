"""Trial of settings by which brokers are reached, before running workers get them: a broker must accept the proxy.

The supervisor runs this as a child process, since the supervisor itself reads no secret and talks to no broker. The
configuration comes as JSON on standard input, the result goes out as JSON on standard output. Each broker of
``brokers.service_url`` is logged in at as by a lookup worker; the first that accepts the proxy ends the trial.
"""

import sys

import msgspec
import trio

from auth.broker_credentials import broker_authentication
from auth.state import BrokerAuthentication
from lookup.brokers.discovery import BrokerDiscovery, CredentialVerdict, Endpoint
from proto.addresses import HostPort
from proxy.commands.check import suppress_logs
from proxy.commands.connect import BROKERS_MAX, discovered, login_factory, own_credentials
from proxy.common.errors import ConfigError
from proxy.config.trial import TRIAL_TIMEOUT_S, BrokerTrial
from proxy.config.types import Config
from proxy.config.worker_config import decode_config
from proxy.runtime.network.dialing import Dialer

REASONS_MAX = 3
"""Brokers whose reasons are told; of more, their number."""


async def try_brokers(config: Config) -> BrokerTrial:
    """Log in at every broker until one accepts the proxy, in at most ``TRIAL_TIMEOUT_S``."""
    try:
        dialer, authentication = Dialer(config.brokers), broker_authentication(config.brokers.credentials)
    except ConfigError as error:
        return BrokerTrial(accepted=False, reason=str(error))
    reasons: dict[str, str] = {}
    accepted = False
    with trio.move_on_after(TRIAL_TIMEOUT_S) as limit:
        async with discovered(config) as found:
            reasons |= {name: f"not resolved: {why}" for name, why in found.failures.items()}
            accepted = await _log_in_at_any(config, dialer, authentication, found, reasons)
    if limit.cancelled_caught:
        reasons["within"] = f"no broker accepted the proxy within {TRIAL_TIMEOUT_S:.0f} s"
    return BrokerTrial(accepted=accepted, reason="" if accepted else _in_words(reasons))


async def _log_in_at_any(
    config: Config,
    dialer: Dialer,
    authentication: BrokerAuthentication | None,
    found: BrokerDiscovery,
    reasons: dict[str, str],
) -> bool:
    """Log in at all brokers at once; return True when one accepts the proxy, else add to the reasons."""
    logins = login_factory(config, dialer)
    accepted = False

    async def log_in(broker: Endpoint, everything: trio.CancelScope) -> None:
        nonlocal accepted
        login = await logins.log_in(broker, lambda: own_credentials(authentication, broker))
        if login.verdict is CredentialVerdict.ACCEPTED:
            accepted = True
            everything.cancel()
        else:
            reasons[f"{HostPort(broker.host, broker.port)} at {' and '.join(broker.addresses)}"] = login.detail

    async with trio.open_nursery() as nursery:
        for broker in found.endpoints[:BROKERS_MAX]:
            nursery.start_soon(log_in, broker, nursery.cancel_scope)
    return accepted


def _in_words(reasons: dict[str, str]) -> str:
    """Return the reasons for an operator, of the first brokers by name: the same each time, so they are logged once."""
    told = [f"{where}: {why}" for where, why in sorted(reasons.items())[:REASONS_MAX]]
    left = len(reasons) - len(told)
    return "; ".join(told or ["brokers.service_url names no broker"]) + (f"; and {left} more" if left else "")


def main() -> None:
    """Run one trial, in a process that is hardened (proxy.commands.broker_trial_process)."""
    config = decode_config(sys.stdin.buffer.read())
    with suppress_logs():
        trial = trio.run(try_brokers, config)
    sys.stdout.buffer.write(msgspec.json.encode(trial))
