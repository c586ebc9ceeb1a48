"""A scrape of `/metrics`, parsed, with sums over whatever labels a test does not care about."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Scrape:
    """All samples of one scrape."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """From the text that the cluster serves."""
        families = text_string_to_metric_families(text)
        return cls(tuple(sample for family in families for sample in family.samples))

    def total(self, name: str, **labels: str) -> float:
        """The sum of every sample of that name which has these labels; 0 if there is none."""
        wanted = labels.items()
        return sum(s.value for s in self.samples if s.name == name and wanted <= s.labels.items())

    def names(self) -> set[str]:
        """Every sample's name."""
        return {sample.name for sample in self.samples}

    def label_values(self, label: str) -> set[str]:
        """Every value of a label."""
        return {sample.labels[label] for sample in self.samples if label in sample.labels}

    def moved_since(self, before: Scrape) -> dict[str, float]:
        """Sums by name that differ from those of `before`: for error texts."""
        names = self.names() | before.names()
        changes = {name: self.total(name) - before.total(name) for name in sorted(names)}
        return {name: change for name, change in changes.items() if change}


USAGE = {
    "bytes_in": ("pulsar_proxy_principal_bytes_total", {"direction": "to_broker"}),
    "bytes_out": ("pulsar_proxy_principal_bytes_total", {"direction": "to_client"}),
    "messages_in": ("pulsar_proxy_principal_messages_total", {"direction": "to_broker"}),
    "messages_out": ("pulsar_proxy_principal_messages_total", {"direction": "to_client"}),
    "sessions": ("pulsar_proxy_principal_sessions_total", {}),
}


def per_principal(scrape: Scrape) -> dict[str, dict[str, int]]:
    """The proxy's own counters of the principals, as the usage tables name them."""
    return {
        principal: {
            what: int(scrape.total(metric, principal=principal, **labels)) for what, (metric, labels) in USAGE.items()
        }
        for principal in sorted(scrape.label_values("principal"))
    }
