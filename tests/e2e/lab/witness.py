"""What every misbehaviour must leave behind: a log line with who and why, a metric that moved, no other harmed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proto.pulsar_pb2 import BaseCommand

from .cluster import ProxyCluster
from .metrics import Scrape
from .waiting import NotInTimeError, eventually
from .wire import WireClient


class Witness:
    """Looks at a cluster before and after."""

    def __init__(self, cluster: ProxyCluster) -> None:
        self._cluster = cluster
        self._log_offset = len(cluster.log_text())
        self._before = self._last = cluster.metrics()

    def logged(self, *words: str) -> str:
        """A log line since the beginning has all these words."""
        return self._cluster.wait_for_log(*words, since=self._log_offset)

    def counted(self, name: str, *, times: int | None = None, **labels: str) -> None:
        """The metric has risen since the beginning, by exactly so much if that is said."""

        def is_counted() -> bool:
            rise = self._last.total(name, **labels) - self._before.total(name, **labels)
            return rise > 0 if times is None else rise == times

        def comes_to_be_counted() -> bool:
            if not is_counted():
                self._last = self.scrape()
            return is_counted()

        try:
            eventually(comes_to_be_counted, what=f"{name}{labels} rises")
        except NotInTimeError as error:
            error.add_note(f"what moved: {self.moved()}")  # not before: it costs another scrape, which is a second
            raise

    def moved(self) -> dict[str, float]:
        """Every metric that moved."""
        return self.scrape().moved_since(self._before)

    def scrape(self) -> Scrape:
        """The metrics now."""
        return self._cluster.metrics()


@contextmanager
def others_unharmed(
    cluster: ProxyCluster, *, topic: str = "persistent://public/default/bystander", **credentials: str
) -> Iterator[Witness]:
    """A bystander that is connected all the while works before, at and after the misbehaviour; so does a newcomer."""
    with WireClient(cluster.port) as bystander:
        assert bystander.connect(**credentials).type == BaseCommand.CONNECTED
        assert_serves(bystander, topic)
        yield Witness(cluster)
        assert_serves(bystander, topic)
        with WireClient(cluster.port) as newcomer:
            assert newcomer.connect(**credentials).type == BaseCommand.CONNECTED
            assert_serves(newcomer, topic)


def assert_serves(client: WireClient, topic: str) -> None:
    """A client in lookup mode gets its PONG and an answer that came from a broker."""
    assert client.ping().type == BaseCommand.PONG
    answer = client.lookup(topic)
    assert answer.type == BaseCommand.LOOKUP_RESPONSE
    assert answer.lookup_topic_response.proxy_through_service_url, answer
