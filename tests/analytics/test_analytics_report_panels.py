"""From points to panels, summary and plots, without Spark: rates, quantiles, limits, gaps, what is missing."""

import json
import math
from datetime import timedelta

import pytest

from analytics.report import metrics, summary
from analytics.report.collect import BrokerAvailability
from analytics.report.headline import Headline, headline, length_text
from analytics.report.panels import LINES_MAX, REST, Cluster, Panel, sections
from analytics.report.plots import figure, figure_json
from analytics.report.points import Distribution, Points
from analytics.report.principals import NOTHING, Billed, Principals, Usage
from analytics.report.span import POINTS_MAX, BadSpan, candidates, fitted, parse_last
from analytics.report.totals import Totals, compare_totals
from analytics.report.units import amount, scale, seconds, share, short
from tests.analytics.report_data import HOSTILE, at, line, span
from tests.analytics.transforms_data import DAY, DAY_MS, MINUTE_MS

NO_BROKERS = BrokerAvailability({}, {}, {}, [])
NO_PRINCIPALS = Principals([], None, None, NOTHING, {}, None)


def cluster(
    points: Points, brokers: BrokerAvailability = NO_BROKERS, principals: Principals = NO_PRINCIPALS
) -> Cluster:
    return Cluster("c", points, brokers, principals)


def panel(points: Points, title: str, section: str = "", brokers: BrokerAvailability = NO_BROKERS) -> Panel:
    found = [
        panel
        for one in sections(cluster(points, brokers), span(1))
        for panel in one.panels
        if panel.title == title and section in one.title
    ]
    assert len(found) == 1
    return found[0]


def figures(points: Points, brokers: BrokerAvailability = NO_BROKERS) -> dict[str, str]:
    return dict(row for rows in summary.summary_groups(cluster(points, brokers), span(1)).values() for row in rows)


# ---- which time


@pytest.mark.parametrize(
    ("hours", "suffixes"),
    [(1, ["1m", "1h", "1d"]), (24, ["1m", "1h", "1d"]), (26, ["1h", "1d"]), (24 * 90, ["1d"]), (24 * 3000, ["1d"])],
)
def test_the_resolution_follows_from_the_length(hours: int, suffixes: list[str]) -> None:
    spans = candidates(DAY, DAY + timedelta(hours=hours), DAY + timedelta(days=4000))
    assert [one.resolution.suffix for one in spans] == suffixes
    assert all(len(one.windows_ms) <= POINTS_MAX or one.resolution.suffix == "1d" for one in spans)


def test_windows_are_whole_and_have_ended() -> None:
    now = DAY + timedelta(hours=5, minutes=30, seconds=20)
    minutes, hours = candidates(DAY + timedelta(seconds=90), now, now)
    assert (minutes.start, minutes.end) == (DAY + timedelta(minutes=1), DAY + timedelta(hours=5, minutes=30))
    assert (hours.start, hours.end) == (DAY, DAY + timedelta(hours=5))
    (daily,) = candidates(DAY, DAY + timedelta(hours=30, days=70), DAY + timedelta(days=90))
    assert daily.end == DAY + timedelta(days=72)  # outward: the day is over
    assert len(daily.windows_ms) == 72


def test_a_time_that_cannot_be_reported_on() -> None:
    with pytest.raises(BadSpan, match="has ended yet"):
        candidates(DAY, DAY + timedelta(minutes=1), DAY + timedelta(seconds=30))
    with pytest.raises(BadSpan, match="10 years"):
        candidates(DAY - timedelta(days=4000), DAY, DAY)
    with pytest.raises(BadSpan, match="before it ends"):
        candidates(DAY, DAY, DAY)


def test_lengths_of_time() -> None:
    assert [parse_last(text) for text in ("90m", "24h", "30d")] == [
        timedelta(minutes=90), timedelta(hours=24), timedelta(days=30)
    ]  # fmt: skip
    for text in ("", "24", "h", "0h", "-1h", "1w", "1.5h"):
        with pytest.raises(BadSpan):
            parse_last(text)


# ---- panels


def test_a_rate_is_growth_over_the_window() -> None:
    points = Points(increase={at(metrics.BYTES, "to_broker"): line(60.0, 120.0)})
    assert panel(points, "Bytes relayed").lines == {"to brokers": line(1.0, 2.0)}


def test_counts_are_not_divided() -> None:
    points = Points(
        increase={at(metrics.RESTARTS, "lookup"): line(0.0, 2.0), at(metrics.RESTARTS, "auth"): line(0.0, 0.0)}
    )
    found = panel(points, "Workers restarted, by role")
    assert (found.lines, found.unit, found.bars) == ({"lookup": line(0.0, 2.0)}, "in each minute", True)
    assert found.note == "1 more were zero all the time."


def test_what_is_zero_is_shown_as_zero_and_what_is_absent_is_not() -> None:
    zero = Points(increase={at(metrics.ADOPTED): line(0.0, 0.0)})
    assert panel(zero, "Relays adopted").lines == {"adopted": line(0.0, 0.0)}
    assert panel(Points(), "Relays adopted").lines == {}


def test_the_smallest_lines_are_summed_as_one() -> None:
    causes = {at(metrics.ENDED, f"cause{number:02}"): line(float(number), 1.0) for number in range(1, 20)}
    found = panel(Points(increase=causes), "Connections ended, by cause").lines
    assert list(found) == [*(f"cause{number:02}" for number in range(19, 19 - LINES_MAX, -1)), REST]
    assert found[REST] == line(float(sum(range(1, 12))), 11.0)


def test_labels_are_summed_over_the_others() -> None:
    failures = {
        at(metrics.AUTH_FAILURES, "token", "expired"): line(1.0),
        at(metrics.AUTH_FAILURES, "token", "bad_signature"): line(2.0),
        at(metrics.AUTH_FAILURES, "sasl", "expired"): line(4.0),
    }
    points = Points(increase=failures)
    assert panel(points, "Failures, by reason").lines == {"expired": line(5.0), "bad_signature": line(2.0)}
    assert panel(points, "Failures, by method", "Authentication").lines == {"sasl": line(4.0), "token": line(3.0)}


def histogram(metric: str, *key: str, counts: tuple[float, ...], total: float = 0.0) -> Points:
    """Classic buckets up to 1, 2 and infinity, in the first minute."""
    increase = {
        at(f"{metric}_bucket", *key, bound): line(sum(counts[: place + 1]))
        for place, bound in enumerate(("1.0", "2.0", "+Inf"))
    }
    return Points(
        increase=increase | {at(f"{metric}_sum", *key): line(total), at(f"{metric}_count", *key): line(sum(counts))}
    )


def test_quantiles_interpolate_in_buckets_of_growth() -> None:
    found = panel(histogram(metrics.LOOKUP, "lookup", counts=(80.0, 15.0, 5.0)), "Time of a request")
    assert {name: round(one[DAY_MS], 6) for name, one in found.lines.items()} == {"p50": 0.625, "p95": 2.0, "p99": 2.0}


def test_quantiles_of_kinds_are_of_their_buckets_together() -> None:
    lookups, schemas = (
        histogram(metrics.LOOKUP, name, counts=counts)
        for name, counts in (("lookup", (98.0, 0.0, 0.0)), ("schema", (0.0, 2.0, 0.0)))
    )
    points = Points(increase=lookups.increase | schemas.increase)
    assert panel(points, "Time of a request").lines["p99"][DAY_MS] == pytest.approx(1.5)
    by_kind = panel(points, "Time of a request, p99 by kind").lines
    assert list(by_kind) == ["lookup", "schema"]
    assert by_kind["schema"][DAY_MS] == pytest.approx(1.99)


def test_a_window_without_observations_has_no_quantile() -> None:
    found = panel(histogram(metrics.LOOKUP, "lookup", counts=(0.0, 0.0, 0.0)), "Time of a request")
    assert found.lines == {}
    assert math.isnan(Distribution().quantile(0.5))
    assert math.isnan(Distribution({math.inf: 3.0}).quantile(0.5))


def test_classic_and_native_do_not_count_twice() -> None:
    points = histogram(metrics.REAUTH_SECONDS, counts=(1.0, 1.0, 0.0), total=3.0)
    native = {DAY_MS: Distribution({8.0: 1.0}, 7.0, 1.0), DAY_MS + MINUTE_MS: Distribution({8.0: 1.0}, 7.0, 1.0)}
    points.native[at(metrics.REAUTH_SECONDS)] = native
    found = panel(points, "Time, average and at most").lines
    assert found == {"average": line(1.5, 7.0), "at most": line(2.0, 8.0)}


def test_rejected_requests_by_kind() -> None:
    points = Points(increase={at("pulsar_proxy_rejected_lookup_requests_total"): line(3.0)})
    assert panel(points, "Requests rejected at the limit").lines == {"lookup": line(3.0)}


def test_brokers() -> None:
    brokers = BrokerAvailability(line(3.0), line(2.5), {}, [("b", 0.5)])
    assert panel(Points(), "Brokers", brokers=brokers).lines == {"configured": line(3.0), "up": line(2.5)}
    assert figures(Points(), brokers)["Brokers up, share of the time"] == "83.33 %"


# ---- summary


def test_nothing_is_not_zero() -> None:
    assert set(figures(Points()).values()) == {"no data", "0 of 60"}


def test_a_label_that_never_counted_is_zero_where_its_siblings_exist() -> None:
    """Prometheus' client shows a labelled counter from its first count on."""
    points = Points(
        increase={
            at(metrics.AUTH_SUCCESS, "token"): line(5.0),
            at(metrics.ENDED, "client_closed"): line(1.0),
            at(metrics.EXPIRED_KILLED): line(0.0),
        }
    )
    found = figures(points)
    assert found["Authentications that failed"] == "0"
    assert found["Connections rejected"] == "0"
    assert found["Re-authentications that succeeded"] == "0"
    assert found["Expired connections closed"] == "0"
    assert found["Time of a re-authentication, average"] == "no data"


def test_figures_of_the_summary() -> None:
    lookups = histogram(metrics.LOOKUP, "lookup", counts=(80.0, 15.0, 5.0))
    more = {
        at(metrics.BYTES, "to_broker"): line(1024.0, 512.0),
        at(metrics.REQUESTS["lookup"]): line(90.0),
        at(metrics.REQUESTS["schema"]): line(10.0),
        at(metrics.ANSWERS, "lookup", "none"): line(99.0),
        at(metrics.ANSWERS, "schema", "TopicNotFound"): line(1.0),
    }
    points = Points(increase=lookups.increase | more, level={at(metrics.ACTIVE): line(10.0, 20.0)})
    found = figures(points)
    assert found["Minutes with samples"] == "2 of 60"
    assert found["Bytes to brokers"] == "1.5 KiB"
    assert found["Bytes to clients"] == "no data"
    assert found["Lookups and other requests"] == "100"
    assert found["Requests answered with an error"] == "1 (1 %)"
    assert found["Time of a request, p50"] == "625 ms"
    assert found["Connections open, on average"] == "15"
    assert found["Connections open, busiest minute"] == "20"


def test_what_is_missing_is_said() -> None:
    points = Points(increase={at(metrics.BYTES, "to_broker"): line(1.0)}, cut={metrics.ENDED}, exponential=2)
    told = summary.missing_notices(cluster(points), span(1))
    assert told[0].startswith("59 of 60 minutes have no sample")
    assert metrics.ENDED in told[1]
    assert told[2].startswith("2 rows of native histograms")
    assert told[3].startswith("No principal's use is counted (bytes to brokers)")
    assert len(told) == 4


# ---- what happened


def test_the_first_line_says_what_happened_and_what_to_look_at() -> None:
    points = Points(
        increase={
            at(metrics.BYTES, "to_broker"): line(1024.0),
            at(metrics.ENDED, "client_closed"): line(3.0),
            at(metrics.ENDED, "defect"): line(1.0),
            at(metrics.REJECTED, "max_connections"): line(2.0),
            at(metrics.ANSWERS, "lookup", "none"): line(90.0),
            at(metrics.ANSWERS, "lookup", "Timeout"): line(10.0),
            at(metrics.REQUESTS["lookup"]): line(100.0),
        },
        level={at(metrics.ACTIVE): line(10.0, 20.0)},
    )
    principals = Principals([Usage("alice", NOTHING)], None, None, NOTHING, {}, None)
    found = headline(cluster(points, BrokerAvailability({}, {}, {}, [("b", 0.5)]), principals), span(1))
    assert found.text == (
        "In 1 hour: 1.0 KiB to brokers and 0 B to clients for 1 principal; 20 connections open at the busiest minute; "
        "100 requests."
    )
    assert found.troubles == [
        "1 connection ended by a defect of the proxy",
        "2 connections rejected",
        "1 broker not up all the time",
        "10 % of requests answered with an error",
    ]


def test_what_is_not_in_the_tables_is_not_called_well() -> None:
    assert headline(cluster(Points()), span(1)).is_failure_data_present is False
    only_bytes = Points(increase={at(metrics.BYTES, "to_broker"): line(1.0)})
    assert headline(cluster(only_bytes), span(1)).is_failure_data_present is False
    ended = Points(increase={at(metrics.ENDED, "client_closed"): line(1.0)})
    assert headline(cluster(ended), span(1)) == Headline(
        "In 1 hour nothing was relayed.", [], is_failure_data_present=True
    )
    assert [length_text(span(hours)) for hours in (1 / 6, 3, 24 * 30)] == ["10 minutes", "3 hours", "30 days"]


# ---- totals


MOVED = Points(
    increase={at(metrics.BYTES, "to_broker"): line(600.0, 400.0), at(metrics.BYTES, "to_client"): line(50.0)},
)
HOUR = (DAY, DAY + timedelta(hours=1), "hour")


def compared(total: tuple[int, ...], billed: Billed | None, without_start: int = 0) -> Totals:
    found = compare_totals(cluster(MOVED, principals=Principals([], None, None, total, {}, billed, without_start)))
    assert found is not None
    return found


def test_totals_that_agree_need_no_reason() -> None:
    same = (1000, 50, 7, 8, 9)
    found = compared(same, Billed(*HOUR, same, same, open_windows=1, missing_windows=1, late_samples=1))
    assert (found.reasons, all(row.agrees for row in found.rows)) == ([], True)
    assert compared(same, None).reasons == []
    assert compare_totals(cluster(Points())) is None


@pytest.mark.parametrize(
    ("total", "without_start", "said"),
    [
        ((900, 50, 0, 0, 1), 3, "of 3 counters of principals the start is unknown"),
        ((900, 50, 0, 0, 1), 0, "samples of the principals' counters are missing"),
        ((1001, 50, 0, 0, 1), 0, "before a process's first scrape is known of principals only"),
        ((0, 0, 0, 0, 0), 0, "No principal's use is counted"),
    ],
)
def test_a_difference_between_connections_and_principals_has_a_reason(
    total: tuple[int, ...], without_start: int, said: str
) -> None:
    found = compared(total, None, without_start)
    assert len(found.reasons) == 1
    assert said in found.reasons[0]
    assert "bytes to brokers" in found.reasons[0]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"open_windows": 2}, "2 hours still open"),
        ({"missing_windows": 1}, "1 hour not in the usage tables yet: run `usage`"),
        ({"late_samples": 5}, "5 samples came after their hours were closed"),
        ({}, "growth across the first or the last hour's boundary"),
    ],
)
def test_a_difference_from_the_usage_tables_has_a_reason(figures: dict[str, int], said: str) -> None:
    same = (1000, 50, 7, 8, 9)
    found = compared(same, Billed(*HOUR, same, (1000, 50, 7, 6, 9), **figures))
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("The usage tables differ in messages to clients: ")
    assert said in found.reasons[0]
    assert [row.agrees for row in found.rows] == [True, True, True, False, True]


# ---- plots


def test_a_missing_window_is_a_gap() -> None:
    part = {DAY_MS: 1.0, DAY_MS + 2 * MINUTE_MS: 3.0}
    drawn = figure(Panel("t", "", "u", {"a": part}), span(0.05))
    (trace,) = drawn.data
    assert (list(trace.y), trace.x0, trace.dx, trace.connectgaps) == ([1.0, None, 3.0], DAY_MS, MINUTE_MS, False)
    assert drawn.layout.yaxis.title.text == "u"
    assert (trace.mode, list(drawn.layout.xaxis.range)) == ("lines+markers", [DAY_MS, DAY_MS + 2 * MINUTE_MS])


def test_bars_have_room_for_the_last_window() -> None:
    drawn = figure(Panel("t", "", "u", {"a": line(1.0, 2.0)}, bars=True), span(0.05))
    assert list(drawn.layout.xaxis.range) == [DAY_MS, DAY_MS + 3 * MINUTE_MS]


def test_a_point_without_neighbours_is_marked() -> None:
    whole = dict.fromkeys(span(3).windows_ms, 1.0)
    alone = {at: value for at, value in whole.items() if at != DAY_MS + MINUTE_MS}
    modes = [figure(Panel("t", "", "u", {"a": one}), span(3)).data[0].mode for one in (whole, alone)]
    assert modes == ["lines", "lines+markers"]


def test_the_axis_is_fitted_to_the_data() -> None:
    part = fitted(span(1), {DAY_MS + 5 * MINUTE_MS, DAY_MS + 7 * MINUTE_MS, DAY_MS - MINUTE_MS})
    assert part.windows_ms == range(DAY_MS + 5 * MINUTE_MS, DAY_MS + 8 * MINUTE_MS, MINUTE_MS)
    assert fitted(span(1), set()) == span(1)


def test_axis_and_table_share_a_unit() -> None:
    panel = Panel("t", "", "bytes per second", {"a": line(3 * 1024.0**2)})
    drawn = figure(panel, span(0.05))
    assert (drawn.layout.yaxis.title.text, drawn.data[0].y[0]) == ("MiB/s", 3.0)
    assert (scale("seconds", 0.5).unit, scale("seconds", 1.5).unit, scale("u", 1e9)) == ("ms", "s", scale("u", 1.0))


def test_lines_differ_in_more_than_colour() -> None:
    lines = {str(number): line(1.0, 2.0) for number in range(9)}
    drawn = figure(Panel("t", "", "u", lines), span(1))
    assert len({(trace.meta, trace.line.dash) for trace in drawn.data}) == 9
    assert len({trace.meta for trace in drawn.data}) == 9


def test_names_are_text_to_plotly_and_cannot_end_the_script() -> None:
    names = {HOSTILE: line(1.0), '<a href="http://x">y</a>': line(2.0), "]]></script><!--": line(3.0)}
    text = figure_json(Panel("t", "", "u", names), span(1))
    assert not set("<>&") & set(text)
    assert next(trace["name"] for trace in json.loads(text)["data"]) == "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert not any(set("<>") & set(trace["name"]) for trace in json.loads(text)["data"])


def test_units() -> None:
    assert [amount(value) for value in (0, 1023, 1536, 5 * 1024**3, 1024**6)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 GiB", "1,024.0 PiB"
    ]  # fmt: skip
    assert [seconds(value) for value in (0.0005, 0.0123, 1.5)] == ["0.5 ms", "12.3 ms", "1.5 s"]
    assert [share(value) for value in (1.0, 0.99999, 0.5, 0.00001, 0.0)] == [
        "100 %", "99.99 %", "50 %", "below 0.01 %", "0 %"
    ]  # fmt: skip
    assert [short(value) for value in (0.012345, 12345.6)] == ["0.01235", "12,346"]
