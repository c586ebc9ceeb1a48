"""The page as text: what comes first, the bill, names of strangers, no network, no script."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from html.parser import HTMLParser

import pytest

from analytics.report.bill import Bill, Usage
from analytics.report.costs import SHARED, Line, Use, budget_states, cost_lines
from analytics.report.failures import Failures
from analytics.report.page import Cluster, Statement, missing, render_page
from analytics.report.prices import Prices
from analytics.report.text import NAME_CHARS_MAX, amount, display_name, html_text, share
from analytics.report.unusual import Finding
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
    named = [Usage(name, (1000 - place, 12_345_678, 1, 2, 3), 0) for place, name in enumerate(HOSTILE_NAMES)]
    named += [Usage("orders", (500, 500, 0, 0, 0), 800), Usage("left", (0, 0, 0, 0, 0), 700)]
    total = Usage("all principals", (5000, 50_000_000, 4, 8, 12), 1500)
    counts = {"open_windows": 2, "missing_windows": 1, "late_samples": 17, "without_start": 3}
    bill = Bill([*named, Usage("other", (1, 1, 0, 0, 0), 0)], total, 1, **counts)
    failures = Failures(
        [("relays not opened", HOSTILE_NAMES[0], 1234, 5)], [("broker-1.example:6651", 0.958, None), ("b2", None, 1.0)]
    )
    days = [DAY.date() + timedelta(days=place) for place in range(3)]
    daily = {f"p{number}": dict.fromkeys(days, number << 30) for number in range(1, 12)}
    daily[HOSTILE_NAMES[0]] = dict.fromkeys(days, 99 << 30)
    finding = Finding(HOSTILE_NAMES[0], "above", days[0], days[1], 99 << 30, 3 << 30)
    return Cluster("east", bill, failures, [(DAY, DAY + timedelta(hours=1))], days, daily, [finding])


PRICES = Prices(
    "EUR",
    table={("default", "gib_in"): [(DAY.date(), Decimal("0.5"))]},
    tenants=[("ord*", "shop"), ("<*", "<b>tenant</b>")],
    budgets={"shop": Decimal(10)},
)


def lines() -> list[Line]:
    names = [("orders", 21 << 30), (HOSTILE_NAMES[0], 3 << 30), ("further-1", 1 << 30), ("further-2", 1 << 30)]
    end = DAY + timedelta(hours=3)
    use = [Use("east", name, DAY, end, {"gib_in": size, "gib_out": 7}) for name, size in names]
    return cost_lines([*use, Use("east", SHARED, DAY, end, {"connection_hour": 60})], PRICES)


@pytest.fixture(scope="module")
def page() -> str:
    clusters = [busy(), Cluster("west", NO_BILL)]
    budgets = budget_states(lines(), PRICES, DAY.replace(day=1), DAY)
    return render_page(Statement(span(3), DAY, clusters, ["See `usage`."], DAY, PRICES, lines(), budgets))


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


def test_the_bill_comes_first_then_what_is_missing_and_unusual(page: str) -> None:
    text = Parsed(page).text
    order = ["as they were at 2026-11-20 00:00:00", "13.00 EUR", "Costs by tenant", "Budgets of 2026-11"]
    order += [
        "What is missing",
        "Unusual use",
        "Cluster east",
        "Bytes in and out by day",
        "Use by principal, 2026-11-20",
    ]
    order += [
        "Failures by cause",
        "Failures by broker",
        "Cluster west",
        "no usage in the tables",
        "Prices that were used",
    ]
    places = [text.index(one) for one in order]
    assert places == sorted(places)


def test_costs_by_tenant_and_principal_and_what_has_no_price(page: str) -> None:
    texts = Parsed(page).texts
    place = texts.index("all tenants")
    assert texts[place + 1 : place + 4] == ["13.00", "4", "5 lines"]
    assert (
        "5 lines of use without a price, which cost nothing: Data from brokers to clients, Open connections." in texts
    )
    place = texts.index("orders")
    assert texts[place + 1 : place + 3] == ["10.50", "shop"]
    place = texts.index("Budgets of 2026-11, EUR")
    place = texts.index("shop", place)
    assert texts[place : place + 6] == ["shop", "10", "10.50", "105 %", "16.58", "exceeded"]


def test_principals_beyond_the_list_have_the_rest_of_the_costs() -> None:
    bill = Bill(
        [Usage("orders", (1,) * 5, 0), Usage("2 further principals", (1,) * 5, 0, is_rest=True)], NO_BILL.total, 0
    )
    made = Statement(span(3), DAY, [Cluster("east", bill)], [], None, PRICES, lines())
    texts = Parsed(render_page(made)).texts
    assert texts[texts.index("2 further principals") + 1] == "2.50"  # of all that are not listed


def test_a_principal_named_like_the_line_of_connections_pays_its_own_use() -> None:
    names = (SHARED, SHARED)
    shared, own = (Use("east", name, DAY, DAY + timedelta(hours=3), {}) for name in names)
    known = cost_lines(
        [replace(shared, quantities={"connection_hour": 3600}), replace(own, quantities={"gib_in": 1 << 30})],
        replace(PRICES, table={**PRICES.table, ("default", "connection_hour"): [(DAY.date(), Decimal(7))]}),
    )
    bill = Bill([Usage(SHARED, (1,) * 5, 0)], NO_BILL.total, 0)
    texts = Parsed(render_page(Statement(span(3), DAY, [Cluster("east", bill)], [], None, PRICES, known))).texts
    assert [texts[place + 1] for place, text in enumerate(texts) if text == SHARED] == ["0.50", "7.00"]


def test_a_plot_has_at_most_eight_series_and_wide_tables_say_that_they_scroll(page: str) -> None:
    parsed = Parsed(page)
    legend = [own["class"] for tag, own in parsed.tags if tag == "i"]
    assert legend == [f"s{number}" for number in range(8)]
    assert "5 further principals" in parsed.texts
    assert parsed.texts.count("more columns: scroll →") >= 3
    assert all(own.get("tabindex") == "0" for tag, own in parsed.tags if own.get("class") == "scroll")


def test_failures_and_unusual_use(page: str) -> None:
    texts = Parsed(page).texts
    place = texts.index("relays not opened")
    assert texts[place : place + 4] == ["relays not opened", HOSTILE_NAMES[0], "1,234", "5"]
    place = texts.index("broker-1.example:6651")
    assert texts[place + 1] == "4.2 %"
    place = texts.index("far above its own use")
    assert texts[place : place + 5] == [
        "far above its own use", "2026-11-20 to 2026-11-21", "99.0 GiB", "3.0 GiB", "33"
    ]  # fmt: skip


def test_the_bill_is_exact_and_compared_with_the_time_before(page: str) -> None:
    texts = Parsed(page).texts
    assert texts.count("12,345,678") == len(HOSTILE_NAMES)
    assert "50,000,000" in texts
    place = texts.index("orders")
    assert texts[place + 3 : place + 11] == ["500", "500", "below 0.01 %", "0", "0", "0", "800", "+25.0 %"]
    assert texts[texts.index("left") + 10] == "gone"
    assert texts[texts.index(HOSTILE_NAMES[0], texts.index("change")) + 10] == "new"
    assert "other (all that the proxy does not count by name)" in texts
    assert "Before: 2026-11-19 21:00 to 2026-11-20 00:00; 1 of 3 hours have usage." in texts


def test_where_no_message_was_counted_the_bill_says_so() -> None:
    alice = Usage("alice", (5, 7, 0, 0, 1), 0)
    for messages, said in ((0, "none counted"), (3, "0")):
        bill = Bill([alice], Usage("all principals", (5, 7, messages, 0, 1), 0))
        texts = Parsed(render_page(Statement(span(3), DAY, [Cluster("east", bill)], []))).texts
        place = texts.index("alice")
        assert texts[place : place + 7] == ["alice", "5", "7", "100 %", said, said, "1"]
        assert any("No message was counted" in text for text in texts) is (messages == 0)


def test_gaps_are_said() -> None:
    told = missing(busy(), span(3))
    starts = (
        "1 hour of 3 without any sample: 2026-11-20 00:00 to 2026-11-20 01:00.",
        "2 hours of the bill",
        "1 hour of usage",
        "17 samples came",
        "Of 3 counters",
    )
    assert [text.startswith(start) for text, start in zip(told, starts, strict=True)] == [True] * 5
    assert missing(Cluster("c", NO_BILL), span(1)) == []


def test_units() -> None:
    assert [amount(value) for value in (0, 1023, 1536, 5 * 1024**3, 1024**6)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 GiB", "1,024.0 PiB"
    ]  # fmt: skip
    assert [share(value) for value in (1.0, 0.99999, 0.5, 0.00001, 0.0)] == [
        "100 %", "99.99 %", "50 %", "below 0.01 %", "0 %"
    ]  # fmt: skip
