"""The page as text: what comes first, names of strangers, units, folded panels, no network. Its look: tests/e2e."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from analytics.report import metrics
from analytics.report.page import Report, render_page
from analytics.report.points import Points
from analytics.report.principals import Principals, Usage
from analytics.report.text import NAME_CHARS_MAX, display_name, html_text
from tests.analytics.report_data import at, line, span
from tests.analytics.report_sample import HOSTILE_NAMES, LONG_NAME, sample_report
from tests.analytics.test_analytics_report_panels import cluster
from tests.analytics.transforms_data import DAY


class Parsed(HTMLParser):
    """Tags, and the text between them without scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All of it, without tags."""
        return "".join(self.texts)


@pytest.fixture(scope="module")
def day() -> str:
    return render_page(sample_report())


def test_names_of_strangers_are_text_bounded_and_visible(day: str) -> None:
    parsed = Parsed(day)
    assert not any("alert(1)" in script for script in parsed.scripts if "Plotly" in script)
    assert "<script>alert(1)</script>" in parsed.texts
    assert LONG_NAME not in day
    assert "\u202e" not in day
    assert "\\u202etxt.exe" in parsed.texts
    assert not any(tag == "a" and not (own["href"] or "").startswith("#") for tag, own in parsed.tags)
    longest = max(len(own.get("aria-label") or "") for _, own in parsed.tags)
    assert longest < 200


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "", "x" * 10**6, "\x00\x1b[31m\u2028\ud800", '"><img src=x>'])
def test_a_name_is_short_and_cannot_become_markup(name: str) -> None:
    text = html_text(name)
    assert len(display_name(name)) <= 8 * NAME_CHARS_MAX  # escapes of what nobody sees are longer
    assert not set(text) & set("<>\"'\x00\x1b\u2028\u202e")
    assert display_name("") == "(none)"
    text.encode()


def test_two_long_names_that_differ_at_an_end_look_different() -> None:
    assert (
        len({display_name(name) for name in ("a" + "x" * 200, "b" + "x" * 200, "x" * 200 + "a", "x" * 200 + "b")}) == 4
    )


def test_the_page_asks_the_network_for_nothing(day: str) -> None:
    parsed = Parsed(day)
    for tag, own in parsed.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}, tag
        assert "src" not in own
    (policy,) = (own["content"] or "" for tag, own in parsed.tags if tag == "meta" and "http-equiv" in own)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    assert len(day) < 8e6


def test_what_happened_comes_first_then_what_differs(day: str) -> None:
    parsed = Parsed(day)
    text = parsed.text
    order = ["In 1 day: ", "To look at: ", "What is missing or differs", "Summary", "Cluster east", "Totals compared"]
    places = [text.index(one) for one in order]
    assert places == sorted(places)
    assert "17 samples came after their hours were closed" in text
    assert "The tables do not show if anything failed." in text  # of west


def test_units_are_the_same_in_a_plot_and_its_table(day: str) -> None:
    drawn = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', day)]
    axes = [one["layout"]["yaxis"]["title"]["text"] for one in drawn]
    captions = [re.sub("<[^>]+>", "", one).rpartition(", ")[2] for one in re.findall("<caption>(.*?)</caption>", day)]
    assert len(axes) > 15
    assert {"MiB/s", "ms"} <= set(axes)
    assert set(axes) <= set(captions)
    assert {one["layout"]["yaxis"]["tickformat"] for one in drawn} == {",.4~r"}  # no k, no M: the tables have none


def test_panels_without_anything_to_see_are_folded(day: str) -> None:
    folded = re.findall(r'<details class="quiet"><summary>Not drawn: ([^<]+)</summary>', day)
    assert any("without data" in one for one in folded)
    assert any("zero all the time" in one for one in folded)
    assert "<li>Relays adopted: zero all the time</li>" in day
    assert "<li>Handshakes: Whole handshake: no data</li>" in day  # of west, which has no such section


def test_messages_that_are_not_counted_are_not_shown_as_zero() -> None:
    alice = Usage("alice", (100, 0, 0, 0, 7))
    uncounted = Principals([alice], None, None, alice.figures, {}, None, counts_messages=False)
    zeros = Points(increase={at(metrics.BYTES, "to_broker"): line(100.0), at(metrics.MESSAGES, "to_broker"): line(0.0)})
    shown = {
        counts: render_page(Report(span(1), DAY, [cluster(zeros, principals=principals)], []))
        for counts, principals in ((False, uncounted), (True, replace(uncounted, counts_messages=True)))
    }
    cells = "<td>100 B</td><td>0 B</td><td>100 %</td><td>{0}</td><td>{0}</td><td>7</td>"
    assert shown[False].count(cells.format("not counted")) == 2  # alice, and all
    assert '<th scope="row">Messages to brokers</th><td>not counted</td>' in shown[False]
    assert '<th scope="row">Messages to brokers</th><td></td><td>not counted</td>' in shown[False]  # totals compared
    assert "<li>Messages relayed: not counted</li>" in shown[False]
    assert shown[True].count(cells.format("0")) == 2
    assert "not counted" not in shown[True]
