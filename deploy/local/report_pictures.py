"""`make report-pictures`: screenshots of the analytics' report, for visual inspection.

A made-up day (tests/analytics/report_sample.py) at three widths, light and dark, as PNG in `build/report-pictures`; the
page itself is beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from local import machine
from local.chromium import Page, browser
from local.environment import Environment
from local.test import ERRORS, become

WIDTHS = (360, 1000, 1920)
DRAWN = "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg.main-svg'))"
"""Expression that is true when each plot has been drawn. In a window as high as the page all are in view."""


def show_full_page(page: Page, file: Path, width: int, *, dark: bool) -> None:
    """Show the whole page at this width, with every plot drawn."""
    page.open(file, width=width, height=1000, dark=dark)
    for _ in range(2):  # plots make it longer
        page.resize(width, int(page.evaluate("document.documentElement.scrollHeight")))
        page.evaluate(
            f"new Promise((done) => {{ const look = () => {DRAWN} ? done(1) : setTimeout(look, 50); look(); }})"
        )


def take_screenshots(file: Path, directory: Path) -> list[Path]:
    """Take screenshots of a page; return their paths."""
    taken = []
    with browser() as page:
        for width in WIDTHS:
            for dark in (False, True):
                show_full_page(page, file, width, dark=dark)
                picture = directory / f"{file.stem}-{width}-{'dark' if dark else 'light'}.png"
                picture.write_bytes(page.screenshot())
                taken.append(picture)
    return taken


def main() -> int:
    """Prepare, then run `tests.analytics.report_pictures` in the environment that has Plotly."""
    try:
        machine.ensure((machine.VENV, machine.CHROMIUM))
        environment = Environment()
        environment.prepare("test")
    except ERRORS as error:
        print(f"\nmake report-pictures: {error}", file=sys.stderr)
        return 1
    return become(environment, "tests.analytics.report_pictures", with_local=True)


if __name__ == "__main__":
    sys.exit(main())
