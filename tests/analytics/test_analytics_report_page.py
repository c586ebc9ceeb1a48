"""The page as text: what comes first, the bill, names of strangers, no network, no script."""

from datetime import timedelta
from html.parser import HTMLParser

import pytest

from analytics.report import figures
from analytics.report.bill import Bill, Usage
from analytics.report.figures import Figures
from analytics.report.page import Report, render_page
from analytics.report.summary import Cluster, headline, missing, summary, troubles
from analytics.report.text import NAME_CHARS_MAX, amount, display_name, html_text, seconds, share
from tests.analytics.report_data import span
from tests.analytics.transforms_data import DAY

LONG_NAME = "https://issuer.example.com/realms/" + "a-very-long-realm-" * 6 + "/clients/telemetry"
HOSTILE_NAMES = ("<script>alert(1)</script>", "\u202etxt.exe", "<a href='http://x'>y</a>", LONG_NAME)
NO_BILL = Bill([], Usage("all principals", (0,) * 5, 0))


class Parsed(HTMLParser):
    """Tags, and the text between them without styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All of it, without tags."""
        return "".join(self.texts)


def busy() -> Cluster:
    growth = {
        (figures.BYTES, "to_broker"): 1536.0,
        (figures.BYTES, ""): 1.0,
        (figures.ENDED, "defect"): 1.0,
        (figures.ENDED, ""): 7.0,
        (figures.REJECTED, ""): 2.0,
        (figures.ANSWERS, "none"): 90.0,
        (figures.ANSWERS, ""): 10.0,
        (figures.AUTH_SUCCESS, ""): 5.0,
        (figures.EXPIRED_KILLED, ""): 0.0,
    }
    buckets = {1.0: 80.0, 2.0: 15.0, float("inf"): 5.0}
    brokers = [("broker-1.example:6651", 0.958), (HOSTILE_NAMES[0], 0.999)]
    found = Figures(growth, 2, DAY + timedelta(hours=1), 15.0, 20.0, buckets, 0.9, brokers)
    named = [Usage(name, (1000 - place, 12_345_678, 1, 2, 3), 0) for place, name in enumerate(HOSTILE_NAMES)]
    one = Usage("orders", (500, 500, 0, 0, 0), 800)
    total = Usage("all principals", (5000, 50_000_000, 4, 8, 12), 800)
    counts = {"open_windows": 2, "missing_windows": 1, "late_samples": 17, "without_start": 3}
    return Cluster("east", found, Bill([*named, one, Usage("other", (1, 1, 0, 0, 0), 0)], total, 1, **counts))


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(Report(span(3), DAY, [busy(), Cluster("west", Figures(), NO_BILL)], ["See `usage`."], DAY))


def test_names_of_strangers_are_text_bounded_and_visible(page: str) -> None:
    parsed = Parsed(page)
    assert "<script>alert(1)</script>" in parsed.texts
    assert LONG_NAME not in page
    assert "\u202e" not in page
    assert "\\u202etxt.exe" in parsed.texts


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "", "x" * 10**6, "\x00\x1b[31m\u2028\ud800", '"><img src=x>'])
def test_a_name_is_short_and_cannot_become_markup(name: str) -> None:
    text = html_text(name)
    assert len(display_name(name)) <= 8 * NAME_CHARS_MAX  # escapes of invisible characters are longer
    assert not set(text) & set("<>\"'\x00\x1b\u2028\u202e")
    assert display_name("") == "(none)"
    text.encode()


def test_two_long_names_that_differ_at_an_end_look_different() -> None:
    assert (
        len({display_name(name) for name in ("a" + "x" * 200, "b" + "x" * 200, "x" * 200 + "a", "x" * 200 + "b")}) == 4
    )


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(page: str) -> None:
    parsed = Parsed(page)
    for tag, own in parsed.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}, tag
        assert not any(name in {"src", "href"} or name.startswith("on") for name in own)
    (policy,) = (own["content"] or "" for tag, own in parsed.tags if tag == "meta" and "http-equiv" in own)
    assert policy.startswith("default-src 'none';")
    assert "script" not in policy


def test_events_come_first_then_gaps_then_the_bill(page: str) -> None:
    text = Parsed(page).text
    order = ["as they were at 2026-11-20 00:00:00", "In 3 hours: ", "To look at: ", "What is missing", "Cluster east"]
    assert "counts from the first scrape of each counter on, the bill from the first byte on" in text
    places = [text.index(one) for one in [*order, "Bill, 2026-11-20 00:00 to 2026-11-20 03:00", "Summary"]]
    assert places == sorted(places)
    assert "The tables do not show if anything failed." in text  # of west
    assert "no usage in the tables" in text


def test_the_bill_is_exact_and_compared_with_the_time_before(page: str) -> None:
    texts = Parsed(page).texts
    assert texts.count("12,345,678") == len(HOSTILE_NAMES)
    assert "50,000,000" in texts
    place = texts.index("orders")
    assert texts[place : place + 9] == ["orders", "500", "500", "below 0.01 %", "0", "0", "0", "800", "+25.0 %"]
    assert "other (all that the proxy does not count by name)" in texts
    assert "Before: 2026-11-19 21:00 to 2026-11-20 00:00; 1 of 3 hours have usage." in texts


def test_where_no_message_was_counted_the_bill_says_so() -> None:
    alice = Usage("alice", (5, 7, 0, 0, 1), 0)
    for messages, said in ((0, "none counted"), (3, "0")):
        bill = Bill([alice], Usage("all principals", (5, 7, messages, 0, 1), 0))
        texts = Parsed(render_page(Report(span(3), DAY, [Cluster("east", Figures(), bill)], []))).texts
        place = texts.index("alice")
        assert texts[place : place + 7] == ["alice", "5", "7", "100 %", said, said, "1"]
        assert any("No message was counted" in text for text in texts) is (messages == 0)


def test_the_headline_and_the_failures() -> None:
    assert headline(busy(), span(3)) == (
        "In 3 hours: 1.5 KiB to brokers and 0 B to clients; 20 connections open in the busiest hour; "
        "100 requests, 99 % within 2 s."
    )
    assert troubles(busy()) == [
        "1 connection ended by a defect of the proxy",
        "2 connections rejected",
        "2 brokers not up all the time",
        "10 % of requests answered with an error",
    ]
    nothing = Cluster("c", Figures(), NO_BILL)
    assert (headline(nothing, span(1)), troubles(nothing)) == ("No sample of this cluster in 1 hour.", None)
    idle = Cluster("c", Figures({(figures.ENDED, ""): 1.0}, 1), NO_BILL)
    assert (headline(idle, span(1)), troubles(idle)) == ("In 1 hour nothing was relayed.", [])


def test_nothing_is_not_zero_but_for_a_label_whose_siblings_exist() -> None:
    """Prometheus' client shows a labelled counter from its first count on."""
    assert set(summary(Cluster("c", Figures(), NO_BILL), span(1)).values()) == {"no data", "0 of 1"}
    found = summary(busy(), span(3))
    assert (found["Bytes to brokers, all connections"], found["Bytes to clients, all connections"]) == (
        "1.5 KiB",
        "0 B",
    )
    assert (found["Authentications that failed"], found["Re-authentications that failed"]) == ("0", "0")
    assert (found["Workers restarted"], found["… with an error"]) == ("no data", "10 (10 %)")
    assert (found["Time of a request, 50 % within"], found["Brokers up, share of the time"]) == ("625 ms", "90 %")


def test_gaps_are_said() -> None:
    told = missing(busy(), span(3))
    starts = (
        "1 of 3 hours have no sample",
        "2 hours of the bill",
        "1 hour of usage",
        "17 samples came",
        "Of 3 counters",
    )
    assert [text.startswith(start) for text, start in zip(told, starts, strict=True)] == [True] * 5
    assert missing(Cluster("c", Figures(), NO_BILL), span(1)) == []


def test_units() -> None:
    assert [amount(value) for value in (0, 1023, 1536, 5 * 1024**3, 1024**6)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 GiB", "1,024.0 PiB"
    ]  # fmt: skip
    assert [seconds(value) for value in (0.0005, 0.0123, 1.5)] == ["0.5 ms", "12.3 ms", "1.5 s"]
    assert [share(value) for value in (1.0, 0.99999, 0.5, 0.00001, 0.0)] == [
        "100 %", "99.99 %", "50 %", "below 0.01 %", "0 %"
    ]  # fmt: skip
