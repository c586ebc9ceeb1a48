"""The two ports of one broker: without TLS and with it.

Clients of Pulsar 5 take the addresses of transaction coordinators from a broker, within a relay, and choose the URL
that fits TLS on their own side. So the target of a relay may be the port of the other kind than
``brokers.service_url`` has. Which port of the same broker has the right kind is known from ``brokers.port_pairs``, for
all hosts, and from brokers' answers to lookups, for one host and port each: two brokers on one machine are told apart.

Nothing here allows a target: lookup.targets.rules checks what is dialled as if the client had named it. So a hostile
broker can lead relays only from one port of a host to another port of that host that clients may name, too; its
answers to lookups can lead clients to any target that is allowed.
"""

from collections import OrderedDict

from proto.addresses import HostPort, parse_service_url, speaks_tls
from proxy.config.types import Brokers

LEARNED_MAX = 2048


class PortPairs:
    """Ports of one broker, configured and learned.

    ``before``: the ports under the configuration before; what brokers have said carries over, unless TLS has changed.
    """

    def __init__(self, config: Brokers, before: "PortPairs | None" = None) -> None:
        self._tls = speaks_tls(config.service_url)
        self._configured = {pair[not self._tls]: pair[self._tls] for pair in config.port_pairs}
        self._learned: OrderedDict[HostPort, int] = OrderedDict()
        """The port to dial, by either port of a broker."""
        if before is not None and before._tls is self._tls:  # noqa: SLF001 -- another of this class
            self._learned = before._learned  # noqa: SLF001

    def learn_urls(self, dialled_url: str, other_url: str) -> None:
        """Learn the ports in the two URLs of a broker; of more than LEARNED_MAX the last ones count.

        A pair is learned only for one host: a broker's word for one machine says nothing about another. There is no
        limit of time: a broker's next answer replaces what is known of its ports, and a pair that is out of date leads
        nowhere else than the rules allow.
        """
        dialled, other = _broker_in(dialled_url, tls=self._tls), _broker_in(other_url, tls=not self._tls)
        if dialled is None:
            return
        self._learn(dialled, dialled.port)
        if other is not None and other.host == dialled.host:
            self._learn(other, dialled.port)

    def _learn(self, broker: HostPort, port: int) -> None:
        self._learned[broker] = port
        self._learned.move_to_end(broker)
        if len(self._learned) > LEARNED_MAX:
            self._learned.popitem(last=False)

    def port_to_dial(self, broker: HostPort) -> int | None:
        """Return the port to dial for a broker, given either of its ports; None where that is not known.

        What was said of this very host and port precedes what is configured for all hosts.
        """
        return self._learned.get(_normalized(broker)) or self._configured.get(broker.port)


def _broker_in(url: str, *, tls: bool) -> HostPort | None:
    """Return the one broker of a URL; None where it is no URL of one broker with or without TLS."""
    if speaks_tls(url) is not tls:
        return None
    try:
        (broker,) = parse_service_url(url)
    except ValueError:
        return None
    return _normalized(broker)


def _normalized(broker: HostPort) -> HostPort:
    return HostPort(broker.host.lower().removesuffix("."), broker.port)
