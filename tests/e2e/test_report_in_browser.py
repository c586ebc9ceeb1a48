"""The report's page in a headless Chromium: structure at three widths, light and dark, and what its policy forbids.

How it looks, a person judges: `make report-pictures`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.chromium import Page, browser, executable
from local.report_pictures import WIDTHS, show_full_page

from analytics.report.page import render_page
from tests.analytics.report_sample import sample_report

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")

LOOK = """({
  wide: document.documentElement.scrollWidth - innerWidth,
  first: document.querySelector("header").nextElementSibling.className,
  columns: getComputedStyle(document.querySelector(".panels")).gridTemplateColumns.split(" ").length,
  navigation: getComputedStyle(document.querySelector("nav")).position,
  modebars: document.querySelectorAll(".modebar, .modebar-container .modebar-btn").length,
  plots: document.querySelectorAll(".plot").length,
  blank: [...document.querySelectorAll(".plot")].filter(
    (plot) => ![...plot.querySelectorAll(".scatterlayer path, .barlayer path")].some(
      (path) => path.getBBox().width + path.getBBox().height > 0)).length,
  back: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector(".plot .xtick text")).fill,
  covered: [...document.querySelectorAll(".plot, .legend, figcaption, h3")].flatMap((one, place, all) => {
    const a = one.getBoundingClientRect(), next = all[place + 1];
    if (!next) return [];
    const b = next.getBoundingClientRect();
    const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    return apart ? [] : [`${one.className || one.textContent} and ${next.className || next.textContent}`];
  }),
  links: [...document.querySelectorAll("nav a")].filter(
    (link) => !document.querySelector(link.getAttribute("href"))).length,
  legends: [...document.querySelectorAll(".legend button")].filter(
    (one) => one.scrollWidth > one.clientWidth + 1).length,
})"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def day_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "day.html"
    file.write_text(render_page(sample_report()), encoding="utf-8")
    return file


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_at_a_width(chromium: Page, day_file: Path, width: int, dark: bool) -> None:
    chromium.messages.clear()
    show_full_page(chromium, day_file, width, dark=dark)
    seen: dict[str, Any] = chromium.evaluate(LOOK)
    assert seen["wide"] <= 0  # nothing is wider than the window
    assert seen["first"] == "happened"
    assert seen["columns"] == (1 if width < 900 else 2)
    assert seen["navigation"] == ("sticky" if width >= 1280 else "static")
    assert (seen["modebars"], seen["blank"], seen["covered"], seen["links"], seen["legends"]) == (0, 0, [], 0, 0)
    assert seen["plots"] > 15
    light_back, light_ink = brightness(seen["back"]), brightness(seen["ink"])
    assert (light_back < light_ink) is dark
    assert abs(light_back - light_ink) > 120
    assert chromium.messages == []  # no request, no error, nothing that the page's policy refused


def brightness(colour: str) -> float:
    """Of `rgb(1, 2, 3)`, 0 to 255."""
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def test_the_policy_lets_no_other_script_run(chromium: Page, day_file: Path, tmp_path: Path) -> None:
    """As if a name had got through the escaping."""
    file = tmp_path / "attacked.html"
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    text = day_file.read_text(encoding="utf-8")
    file.write_text(text.replace("<main>", f"<main>{attack}"), encoding="utf-8")
    chromium.messages.clear()
    chromium.open(file, width=1000, height=800)
    assert chromium.evaluate("document.title").startswith("Pulsar proxy")
    assert len(chromium.messages) >= 2  # what was refused, is told
    chromium.messages.clear()


def test_a_line_goes_and_comes_back_by_its_name(chromium: Page, day_file: Path) -> None:
    show_full_page(chromium, day_file, 1000, dark=False)
    lines = "document.querySelectorAll('#plot-0-0-0 .scatterlayer .trace').length"
    press = "document.querySelector('.legend button').click()"
    assert chromium.evaluate(lines) == 2
    chromium.evaluate(press)
    assert chromium.evaluate(lines) == 1
    chromium.evaluate(press)
    assert chromium.evaluate(lines) == 2


@pytest.mark.parametrize("minutes", [1, 2, 4])
def test_of_ten_minutes_few_have_samples_and_no_plot_is_blank(chromium: Page, tmp_path: Path, minutes: int) -> None:
    file = tmp_path / "few.html"
    file.write_text(render_page(sample_report(1 / 6, minutes_of_data=minutes, only_one=True)), encoding="utf-8")
    show_full_page(chromium, file, 1000, dark=False)
    looked = "[...document.querySelectorAll('.plot')].map((plot) => [plot.data[0].x0, plot.layout.xaxis.range])"
    found = chromium.evaluate(looked)
    if minutes == 1:
        assert found == []
        assert chromium.evaluate("document.querySelectorAll('figure table').length") > 10
        return
    seen = chromium.evaluate(LOOK)
    assert (seen["blank"], seen["covered"]) == (0, [])
    first_ms = sample_report(1 / 6).span.windows_ms.start
    ends = {axis[1] for _, axis in found}
    assert all(x0 == first_ms for x0, _ in found)
    assert len(ends) <= 2  # of lines, and of bars, which have a width
