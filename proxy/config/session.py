"""Which of the configured lifetimes counts for a session (KIP-368)."""

from proxy.config.types import Config


def max_reauth_ms(config: Config, listener: int, method: str) -> int:
    """Within how many milliseconds a client of this listener (by number) and method must authenticate again; 0: none.

    The nearest that is said counts: the listener's, else the method's, else the one for all.
    """
    own = config.listener[listener].connections_max_reauth_ms
    session = config.session
    return own if own >= 0 else session.methods_max_reauth_ms.get(method, session.connections_max_reauth_ms)
