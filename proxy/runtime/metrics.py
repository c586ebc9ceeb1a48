"""Metrics of one process, and of all of them in one scrape.

Each process has a registry of its own and writes it as text; the supervisor asks all workers and merges what they say,
with the labels ``cluster``, ``role`` and ``worker`` on every sample. No label of ours may take a value that a stranger
chooses.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


def new_registry() -> CollectorRegistry:
    """A registry for one process; never the library's global one, which tests would share."""
    return CollectorRegistry()


def exposition(registry: CollectorRegistry) -> str:
    """A process's metrics as text."""
    return generate_latest(registry).decode()


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged_exposition(parts: Iterable[tuple[Mapping[str, str], str]]) -> bytes:
    """Merge the metrics of several processes into one exposition.

    ``parts``: for each process the labels that name it, and its text. Families of one name become one family.
    """
    families: dict[str, Metric] = {}
    for labels, text in parts:
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**labels, **sample.labels}))
    registry = CollectorRegistry()
    registry.register(_Merged(families[name] for name in sorted(families)))
    return generate_latest(registry)
