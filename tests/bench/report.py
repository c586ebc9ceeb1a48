"""The results as Markdown tables, which are readable on a terminal too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.contenders import CONTENDERS, FramedRelays, HAProxy, Java, Ours, Straight
from tests.bench.figures import Figure, figure, ratio, text
from tests.bench.measuring import Memory, Results, Sample
from tests.bench.rows import GIB, IDLE_BYTES_MAX, IDLE_RELAYS, MICRO, SHARED_CLIENTS, Metric, Row

_KIB, _MIB = 1 << 10, 1 << 20

OPERATOR_BYTES = 100e6
OPERATOR_OPERATIONS = 10_000
_COUNTED_ROWS = frozenset({"echo32", "tls-echo32", "tls-broker-echo32", "tls-both-echo32"})


@dataclass(frozen=True)
class Report:
    """Results, and the rows and contenders they are of."""

    results: Results
    rows: Sequence[Row]
    contenders: Sequence[str]
    framed_rows: Sequence[Row] = ()
    tls_rows: Sequence[Row] = ()
    http_rows: Sequence[Row] = ()

    def markdown(self) -> str:
        """All tables."""
        parts = []
        if self.rows:
            parts += ["### CPU time of the proxy (µs an operation; bulk: s a GiB)", self._ratios("cost")]
            parts += ["### Throughput (operations a second; bulk: GiB a second)", self._ratios("rate")]
            if latencies := self._latencies():
                parts += ["### Latency of an echo: median / 99 % (µs)", latencies]
            if reconnects := self._reconnects():
                parts += ["### All relays are cut at once and come back at once", reconnects]
            parts += [
                "### The load generator (CPU time in µs an operation; bulk: GiB a second, s a GiB)",
                self._generator(),
            ]
        if self.framed_rows:
            parts += [
                "### Framed relays: CPU time (µs an operation; bulk: s a GiB)",
                self._framed(),
            ]
        if self.tls_rows:
            parts += ["### TLS 1.3: CPU time of the proxy (µs an operation; bulk: s a GiB)", self._tls()]
            parts += [f"Cipher suites to clients: {self._ciphers()}."]
        if self.http_rows:
            parts += ["### HTTP: CPU time of the proxy (µs a request; bodies: s a GiB)", self._http()]
        if self.rows and self.tls_rows:
            parts += ["### CPUs as an operator counts them", self._cpus()]
        if self.results.memory:
            parts += [f"### Memory ({IDLE_RELAYS:,} idle relays)", self._memory()]
        if self.results.broker_connections:
            parts += [f"### Connections to the broker ({SHARED_CLIENTS:,} clients in lookup mode)", self._connections()]
        return "\n\n".join(parts)

    def values(self, row: Row, contender: str, of: Callable[[Sample], float]) -> list[float]:
        """What the rounds gave for one thing."""
        return [of(sample) for sample in self.results.samples.get((row.name, contender), [])]

    def metric(self, row: Row, contender: str, metric: Metric) -> list[float]:
        """Cost or rate, round by round."""
        return self.values(row, contender, lambda sample: sample.cost if metric == "cost" else sample.rate)

    def _ratios(self, metric: Metric) -> str:
        head = ["", *(CONTENDERS[name].label for name in self.contenders)]
        head += ["ours / Java", "target", "ours / HAProxy"]
        lines = [head]
        for row in self.rows:
            ours = self.metric(row, Ours.name, metric)
            to_java = ratio(ours, self.metric(row, Java.name, metric))
            to_haproxy = ratio(ours, self.metric(row, HAProxy.name, metric))
            figures = [text(figure(self.metric(row, name, metric))) for name in self.contenders]
            lines.append([row.title, *figures, text(to_java), _target(row, metric, to_java), text(to_haproxy)])
        return _table(lines)

    def _cpus(self) -> str:
        """Costs of a GiB and of an operation, as the CPUs that 100 MB/s or 10,000 operations a second need."""
        lines = [["CPUs for", Ours.label, Java.label, "ours / Java"]]
        for row in (*self.rows, *self.tls_rows):
            if not row.in_bytes and row.name not in _COUNTED_ROWS:
                continue
            factor = OPERATOR_BYTES / GIB if row.in_bytes else OPERATOR_OPERATIONS / MICRO
            ours, java = ([cost * factor for cost in self.metric(row, one.name, "cost")] for one in (Ours, Java))
            unit = "100 MB/s" if row.in_bytes else f"{OPERATOR_OPERATIONS:,} a second"
            cells = (figure(ours), figure(java), ratio(ours, java))
            lines.append([f"{unit}: {row.title_with_sides}", *map(text, cells)])
        return _table(lines)

    def _latencies(self) -> str:
        names = (Straight.name, *self.contenders)
        rows = [row for row in self.rows if row.has_latency]
        lines = [[row.title, *(self._latency(row, name) for name in names)] for row in rows]
        return _table([["", *map(_label, names)], *lines]) if lines else ""

    def _reconnects(self) -> str:
        def line(row: Row, title: str, of: Callable[[Sample], float]) -> list[str]:
            return [title, *(text(figure(self.values(row, name, of))) for name in names)]

        def last(sample: Sample) -> float:
            return sample.seconds

        names = (Straight.name, *self.contenders)
        lines = [["", *map(_label, names), "ours / Java"]]
        for row in (row for row in self.rows if row.is_single):
            to_java = text(ratio(*(self.values(row, name, last) for name in (Ours.name, Java.name))))
            lines += [
                [*line(row, "until half of them are back, s", lambda sample: sample.p50_us / MICRO), ""],
                [*line(row, "until the last is back, s", last), to_java],
                [*line(row, "connections that failed and were tried again", lambda sample: sample.retries), ""],
                [*line(row, "growth of the proxy's memory, MiB", lambda sample: sample.grown_bytes / _MIB), ""],
            ]
        return _table(lines) if lines[1:] else ""

    def _latency(self, row: Row, contender: str) -> str:
        medians = figure(self.values(row, contender, lambda sample: sample.p50_us))
        highs = figure(self.values(row, contender, lambda sample: sample.p99_us))
        return f"{medians.median:,.0f} / {highs.median:,.0f}" if medians and highs else "-"

    def _generator(self) -> str:
        names = (Straight.name, *self.contenders)
        head = ["", "operations a second, no proxy", "CPU time of both ends, no proxy"]
        lines = [[*head, *(f"load busy: {_label(name)}" for name in names)]]
        for row in self.rows:
            straight = [
                text(figure(self.metric(row, Straight.name, "rate"))),
                text(figure(self.values(row, Straight.name, lambda sample: sample.generator_cost))),
            ]
            busy = [figure(self.values(row, name, lambda sample: sample.load_busy)) for name in names]
            lines.append([row.title, *straight, *(f"{share.median:.0%}" if share else "-" for share in busy)])
        return _table(lines)

    def _framed(self) -> str:
        lines = [["", Ours.label, FramedRelays.label, "framed / not", "target"]]
        for row in self.framed_rows:
            costs = [self.metric(row, kind.name, "cost") for kind in (Ours, FramedRelays)]
            share = ratio(costs[1], costs[0])
            lines.append([row.title, *(text(figure(cost)) for cost in costs), text(share), _target(row, "cost", share)])
        return _table(lines)

    def _tls(self) -> str:
        head = ["", *map(_label, self.contenders), "ours / Java", "ours / HAProxy", "load busy"]
        lines = [head]
        for row in self.tls_rows:
            costs = {name: self.metric(row, name, "cost") for name in (Ours.name, Java.name, HAProxy.name)}
            ratios = [text(ratio(costs[Ours.name], costs[name])) for name in (Java.name, HAProxy.name)]
            cells = [f"{text(figure(costs[name]))}{self._resumed(row, name)}" for name in self.contenders]
            lines.append([row.title_with_sides, *cells, *ratios, self._busy(row)])
        return _table(lines)

    def _http(self) -> str:
        head = ["", *map(_label, self.contenders), "ours / Java", "target", "ours / HAProxy", "load busy"]
        lines = [head]
        for row in self.http_rows:
            costs = {name: self.metric(row, name, "cost") for name in (Ours.name, Java.name, HAProxy.name)}
            to_java, to_haproxy = (ratio(costs[Ours.name], costs[name]) for name in (Java.name, HAProxy.name))
            cells = [text(figure(costs[name])) for name in self.contenders]
            cells += [text(to_java), _target(row, "cost", to_java), text(to_haproxy)]
            lines.append([row.title, *cells, self._busy(row)])
        return _table(lines)

    def _busy(self, row: Row) -> str:
        busy = [figure(self.values(row, name, lambda sample: sample.load_busy)) for name in self.contenders]
        return " / ".join(f"{share.median:.0%}" if share else "-" for share in busy)

    def _resumed(self, row: Row, contender: str) -> str:
        share = figure(self.values(row, contender, lambda sample: sample.resumed)) if row.resumed else None
        if share is None:
            return ""
        return f"; {share.median:.0%} resumed" if share.median else "; no usable ticket"

    def _ciphers(self) -> str:
        def ciphers(name: str) -> str:
            samples = (sample for row in self.tls_rows for sample in self.results.samples.get((row.name, name), []))
            return " or ".join(sorted({sample.cipher for sample in samples} - {""})) or "-"

        return ", ".join(f"{_label(name)} {ciphers(name)}" for name in self.contenders)

    def _connections(self) -> str:
        counts = self.results.broker_connections
        return _table([[_label(name) for name in counts], [f"{count:,}" for count in counts.values()]])

    def _memory(self) -> str:
        def line(title: str, of: Callable[[Memory], float], target: str) -> list[str]:
            figures = [figure([of(memory) for memory in self.results.memory.get(name, [])]) for name in names]
            return [title, *map(text, figures), target]

        names = self.contenders
        target = f"≤ {IDLE_BYTES_MAX // _KIB}"
        ours = figure([memory.bytes_per_relay for memory in self.results.memory.get(Ours.name, [])])
        if ours:
            target += f": {'met' if ours.median <= IDLE_BYTES_MAX else 'missed'}"
        return _table(
            [
                ["", *(_label(name) for name in names), "target (ours)"],
                line("an idle relay, KiB", lambda memory: memory.bytes_per_relay / _KIB, target),
                line("all processes before, MiB", lambda memory: memory.process_bytes / _MIB, ""),
            ]
        )


def _label(name: str) -> str:
    return Straight.label if name == Straight.name else CONTENDERS[name].label


def _target(row: Row, metric: Metric, measured: Figure | None) -> str:
    target = row.target(metric)
    if target is None:
        return ""
    return f"{target}: {target.verdict(measured.median)}" if measured else str(target)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def render(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    head, *rest = lines
    return "\n".join([render(head), rule, *map(render, rest)])
