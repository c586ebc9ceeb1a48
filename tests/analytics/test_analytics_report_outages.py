"""Growth over an outage is drawn over the outage, and sums do not change. With the jobs' tables: of principals."""

from analytics.report import metrics
from analytics.report.outages import spread_growth
from analytics.report.points import Points
from tests.analytics.report_data import at, line, span
from tests.analytics.test_analytics_report_panels import figures, panel
from tests.analytics.transforms_data import DAY_MS, MINUTE_MS


def test_growth_over_an_outage_is_drawn_over_the_outage() -> None:
    """Samples until minute 0, and again from minute 4 on, in which the growth of four minutes was seen."""
    grown = line(60.0) | {DAY_MS + 4 * MINUTE_MS: 250.0, DAY_MS + 5 * MINUTE_MS: 60.0}
    drawn = dict(grown)
    spread_growth(drawn, span(1), DAY_MS + 4 * MINUTE_MS, DAY_MS, 240.0)
    assert drawn == line(60.0, 60.0, 60.0, 60.0, 70.0, 60.0)
    points = Points(
        increase={at(metrics.BYTES, "to_broker"): grown, at(metrics.BYTES, "to_client"): line(120.0)},
        spread={at(metrics.BYTES, "to_broker"): drawn},
    )
    lines = panel(points, "Bytes relayed").lines
    assert lines["to brokers"] == {at: value / 60 for at, value in drawn.items()}
    assert lines["to clients"] == line(2.0)
    assert figures(points)["Bytes to brokers"] == "370 B"  # as before
    began_before = {DAY_MS: 600.0}
    spread_growth(began_before, span(1), DAY_MS, DAY_MS - 10 * MINUTE_MS, 600.0)
    assert began_before == {DAY_MS: 60.0}
