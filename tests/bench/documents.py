"""docs/benchmarks.md and its picture. What people wrote around the results stays."""

from pathlib import Path

from local.console import print_status
from local.environment import ROOT

from tests.bench import flood, latency
from tests.bench.report import Report

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = PAGE.with_suffix(".svg")
LATENCY_PICTURE = PAGE.with_name("latency.svg")
_RESULTS = "<!-- results: begin (written by make bench ARGS=--write) -->", "<!-- results: end -->"
_LATENCY = '<!-- latency: begin (written by make bench ARGS="--latency --write") -->', "<!-- latency: end -->"

_FLOOD = '<!-- flood: begin (written by make bench ARGS="--handshake-flood --write") -->', "<!-- flood: end -->"


def write(report: Report, machine: list[tuple[str, str]], rounds: int, window_s: float) -> None:
    """Replace the results and the picture."""
    from tests.bench.picture import draw  # needs matplotlib, which only this does

    about = [f"* {what}: {value}" for what, value in machine]
    about.append(f"* {rounds} rounds, {window_s:g} s a measurement; medians, in brackets the range over the rounds")
    PAGE.write_text(replaced(PAGE.read_text(), "\n".join(about) + "\n\n" + report.markdown()))
    draw(report, PICTURE)
    _print_written(PICTURE)


def write_latency(rate: int, found: dict[str, list[latency.Produced]], machine: list[tuple[str, str]]) -> None:
    """Replace the table of a producer's waits, and its picture."""
    from tests.bench.picture import draw_latency

    about = "\n".join(f"* {what}: {value}" for what, value in machine)
    PAGE.write_text(replaced(PAGE.read_text(), f"{about}\n\n{latency.table(rate, found)}", _LATENCY))
    draw_latency(found, LATENCY_PICTURE)
    _print_written(LATENCY_PICTURE)


def write_flood(samples: flood.Samples, machine: list[tuple[str, str]]) -> None:
    """Replace the table of what relays wait in a flood of handshakes."""
    about = "\n".join(f"* {what}: {value}" for what, value in machine)
    PAGE.write_text(replaced(PAGE.read_text(), f"{about}\n\n{flood.table(samples)}", _FLOOD))
    _print_written()


def _print_written(*pictures: Path) -> None:
    for path in (PAGE, *pictures):
        print_status.line(f"written: {_shown(path)}")


def replaced(page: str, results: str, markers: tuple[str, str] = _RESULTS) -> str:
    """The page with new results between its markers."""
    before, begin, rest = page.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {markers[0]} and {markers[1]}")
    return f"{before}{begin}\n\n{results}\n\n{end}{after}"


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT)
