"""The names of the brokers: those of ``brokers.service_url``, those below them, and those that brokers have said.

All of them are bounded in number, and the operator's own name servers answer for them. Any other name of a relay's
target may be the invention of a client: it may be slow to resolve, and there may be many of them.
"""

from collections import OrderedDict

from proto.addresses import AddressInvalid, BrokerUrl, parse_service_url
from proxy.runtime.dns.resolver import is_address

LEARNED_MAX = 1024


class BrokerNames:
    """Brokers' names. ``before``: the names of the configuration before; those that brokers have said carry over."""

    def __init__(self, url: BrokerUrl, before: "BrokerNames | None" = None) -> None:
        hosts = {_normalized(host.host) for host in url.hosts if not is_address(host.host)}
        # Of _pulsar._tcp.name and name the latter: brokers have names below it.
        domains = hosts | {_normalized(name) for name in url.srv_names[-1:]}
        self._configured = frozenset(hosts)
        self._suffixes = tuple(f".{domain}" for domain in domains)
        self._learned: OrderedDict[str, None] = OrderedDict()
        if before is not None:
            self._learned = before._learned  # noqa: SLF001 -- another of this class

    def learn_name(self, host: str) -> None:
        """Remember a name that a broker, or an SRV record, has said; of more than LEARNED_MAX the last ones."""
        if is_address(host):
            return
        self._learned[_normalized(host)] = None
        self._learned.move_to_end(_normalized(host))
        if len(self._learned) > LEARNED_MAX:
            self._learned.popitem(last=False)

    def learn_url(self, url: str) -> None:
        """Remember the names in a broker's own URL; a text that is no URL is ignored."""
        try:
            for broker in parse_service_url(url):
                self.learn_name(broker.host)
        except AddressInvalid:
            return

    def is_configured(self, host: str) -> bool:
        """Return True for a name of ``brokers.service_url``."""
        return _normalized(host) in self._configured

    def is_known(self, host: str) -> bool:
        """Return True for a name below one of these, or one that a broker has said."""
        plain = _normalized(host)
        return plain in self._learned or plain.endswith(self._suffixes)


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")
