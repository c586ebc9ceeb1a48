"""Which of the configured lifetimes counts for a session (KIP-368), and whether its end closes the connection."""

from proxy.config.types import Config


def max_reauth_ms(config: Config, listener: int, method: str) -> int:
    """Return the ms within which a client of this listener (by index) and method must re-authenticate; 0: none.

    The nearest that is said counts: the listener's for the method, the listener's, the method's, the one for all.
    """
    session, own = config.session, config.listener[listener]
    if method in own.methods_max_reauth_ms:
        return own.methods_max_reauth_ms[method]
    if own.connections_max_reauth_ms >= 0:
        return own.connections_max_reauth_ms
    return session.methods_max_reauth_ms.get(method, session.connections_max_reauth_ms)


def observed_listeners(config: Config) -> tuple[bool, ...]:
    """Return, for each listener, whether its sessions' ends are only observed."""
    return tuple(
        (config.session.enforcement if own.session_enforcement == "inherit" else own.session_enforcement) == "observe"
        for own in config.listener
    )
