"""Whether a session's end closes its connection, by the configuration in force (`session.enforcement`)."""

from proxy.config.session import observed_listeners
from proxy.config.types import Config

UNKNOWN_LISTENER = "unknown"


class Enforcement:
    """What the listeners' settings say, for all sessions of a forwarder; ``configure`` takes over other settings.

    Without a configuration, and for sessions whose listener is not known, ends are enforced.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._observed: tuple[bool, ...] = ()
        self._names: tuple[str, ...] = ()
        if config is not None:
            self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings, for sessions that are there, too."""
        self._observed = observed_listeners(config)
        self._names = tuple(listener.bind for listener in config.listener)

    def observes(self, listener: int | None) -> bool:
        """Return whether ends of sessions of this listener, by number, are only counted."""
        return listener is not None and listener < len(self._observed) and self._observed[listener]

    def name_of(self, listener: int | None) -> str:
        """Return where the listener is bound, for logs and metrics."""
        if listener is None or listener >= len(self._names):
            return UNKNOWN_LISTENER
        return self._names[listener]
