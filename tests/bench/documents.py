"""docs/benchmarks.md and its picture. What people wrote around the results stays."""

from pathlib import Path

from local.console import print_status
from local.environment import ROOT

from tests.bench.report import Report

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = PAGE.with_suffix(".svg")
_BEGIN, _END = "<!-- results: begin (written by make bench ARGS=--write) -->", "<!-- results: end -->"


def write(report: Report, machine: list[tuple[str, str]], rounds: int, window_s: float) -> None:
    """Replace the results and the picture."""
    from tests.bench.picture import draw  # needs matplotlib, which only this does

    about = [f"* {what}: {value}" for what, value in machine]
    about.append(f"* {rounds} rounds, {window_s:g} s a measurement; medians, in brackets the range over the rounds")
    PAGE.write_text(replaced(PAGE.read_text(), "\n".join(about) + "\n\n" + report.markdown()))
    draw(report, PICTURE)
    for path in (PAGE, PICTURE):
        print_status.line(f"written: {_shown(path)}")


def replaced(page: str, results: str) -> str:
    """The page with new results between its markers."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {_BEGIN} and {_END}")
    return f"{before}{begin}\n\n{results}\n\n{end}{after}"


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT)
