"""Whether a session's end closes its connection, by the configuration in force (`session.enforcement`)."""

from proxy.config.session_lifetime import observed_listeners
from proxy.config.types import Config

UNKNOWN_LISTENER = "unknown"


class Enforcement:
    """What the listeners' settings say, for all sessions of a forwarder; ``configure`` takes over other settings.

    A listener is known by where it is bound: its number may be another's after an upgrade. Without a configuration, and
    for sessions whose listener is not known, ends are enforced; also where one of two listeners of the same name (with
    port 0) enforces them.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._observes: dict[str, bool] = {}
        if config is not None:
            self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings, for sessions that are there, too."""
        self._observes = {}
        for listener, observes in zip(config.listener, observed_listeners(config), strict=True):
            self._observes[listener.bind] = self._observes.get(listener.bind, True) and observes

    def observes_ends(self, listener: str) -> bool:
        """Return whether ends of sessions of the listener that is bound there are only counted."""
        return self._observes.get(listener, False)

    def listener_name(self, listener: str) -> str:
        """Return where the listener is bound, for logs and metrics."""
        return listener if listener in self._observes else UNKNOWN_LISTENER
