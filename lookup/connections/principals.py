"""The principals on whose behalf brokers are asked: each has connections of its own."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

from proto.connect_rules import OriginalCredentials


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LookupPrincipal:
    """On whose behalf a broker is asked, as the broker sees it: what its connection's handshake says.

    There is one object for each (see Askers), so that it is found by what it is rather than by what it holds.
    """

    principal: str
    credentials: OriginalCredentials | None = None


class LookupPrincipals:
    """All askers that somebody holds."""

    def __init__(self) -> None:
        self._askers: WeakValueDictionary[tuple[str, OriginalCredentials | None], LookupPrincipal] = (
            WeakValueDictionary()
        )

    def get(self, principal: str, credentials: OriginalCredentials | None = None) -> LookupPrincipal:
        """The one asker with this principal and these credentials."""
        asker = self._askers.get((principal, credentials))
        if asker is None:
            asker = self._askers[principal, credentials] = LookupPrincipal(principal, credentials)
        return asker
