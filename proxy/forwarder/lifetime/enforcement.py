"""The configuration's decision whether a session's end closes its connection (`session.enforcement`)."""

from proxy.config.session_lifetime import observed_listeners
from proxy.config.types import Config

UNKNOWN_LISTENER = "unknown"


class Enforcement:
    """Enforcement settings of the listeners, for all sessions of a forwarder.

    The key of a listener is its bind address: its number may be another listener's after an upgrade. Ends are enforced
    without a configuration, for sessions with an unknown listener, and where one of two listeners with the same bind
    address (with port 0) enforces them.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._observes: dict[str, bool] = {}
        if config is not None:
            self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply new settings, to existing sessions too."""
        self._observes = {}
        for listener, observes in zip(config.listener, observed_listeners(config), strict=True):
            self._observes[listener.bind] = self._observes.get(listener.bind, True) and observes

    def observes_ends(self, listener: str) -> bool:
        """Return whether ends of sessions are only counted for the listener with this bind address."""
        return self._observes.get(listener, False)

    def listener_name(self, listener: str) -> str:
        """Return the listener's bind address for logs and metrics; UNKNOWN_LISTENER if it is not configured."""
        return listener if listener in self._observes else UNKNOWN_LISTENER
