"""A day of two clusters, made up: what `make report-pictures` and the browser's tests draw. No Spark is needed."""

import math
import random
from datetime import timedelta

from analytics.report import metrics
from analytics.report.collect import BrokerAvailability
from analytics.report.page import Report
from analytics.report.panels import Cluster
from analytics.report.points import Key, Line, Points
from analytics.report.principals import Billed, Principals, Usage
from analytics.report.span import RESOLUTIONS, Span
from tests.analytics.transforms_data import DAY

LONG_NAME = "https://issuer.example.com/realms/" + "a-very-long-realm-" * 6 + "/clients/telemetry"
HOSTILE_NAMES = ("<script>alert(1)</script>", "\u202etxt.exe", "<a href='http://x'>y</a>", LONG_NAME)
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, math.inf)


def sample_report(hours: float = 24, *, minutes_of_data: int | None = None, only_one: bool = False) -> Report:
    """A day by minute; the second cluster has little to show. `minutes_of_data`: no more than these have samples."""
    span = Span(DAY, DAY + timedelta(hours=hours), RESOLUTIONS[0])
    windows = list(span.windows_ms)[:minutes_of_data]
    clusters = [_busy(span, windows)] if only_one else [_busy(span, windows), _idle(windows)]
    return Report(span, DAY + timedelta(hours=hours, minutes=2), clusters, [])


def _wave(windows: list[int], height: float, seed: int, noise: float = 0.08) -> Line:
    chance = random.Random(seed)
    return {
        at: max(0.0, height * (1.2 + math.sin(at / 86_400_000 * 2 * math.pi + seed)) * chance.gauss(1.0, noise))
        for at in windows
    }


def _rare(windows: list[int], often: float, seed: int) -> Line:
    chance = random.Random(seed)
    return {at: float(chance.random() < often) * chance.randint(1, 5) for at in windows}


def _busy(span: Span, windows: list[int]) -> Cluster:
    increase: dict[tuple[str, Key], Line] = {}

    def add(metric: str, *key: str, line: Line) -> None:
        increase[metric, key] = {at: float(round(value)) for at, value in line.items()}

    add(metrics.BYTES, "to_broker", line=_wave(windows, 3e9, 1))
    add(metrics.BYTES, "to_client", line=_wave(windows, 5e9, 2))
    add(metrics.MESSAGES, "to_broker", line=_wave(windows, 3e6, 1))
    add(metrics.MESSAGES, "to_client", line=_wave(windows, 4e6, 2))
    add(metrics.OPENED, line=_wave(windows, 40, 3, 0.3))
    for place, cause in enumerate(("client_closed", "broker_closed", "timeout", "session_expired", "idle", "max_age")):
        add(metrics.ENDED, cause, line=_rare(windows, 0.5 / (place + 1), 10 + place))
    add(metrics.ENDED, "defect", line=dict.fromkeys(windows, 0.0))
    for place, kind in enumerate(metrics.REQUESTS.values()):
        add(kind, line=_wave(windows, 9000 / (1 + 5 * place), 20 + place))
    for kind in ("lookup", "partitions"):
        add(metrics.ANSWERS, kind, "none", line=_wave(windows, 9000, 30))
        add(metrics.ANSWERS, kind, "TopicNotFound", line=_rare(windows, 0.2, 31))
        _histogram(increase, metrics.LOOKUP, (kind,), windows, 9000)
    for stage in ("total", "authentication", "broker"):
        _histogram(increase, metrics.HANDSHAKE, (stage,), windows, 40)
    add(metrics.AUTH_SUCCESS, "token", line=_wave(windows, 40, 40))
    add(metrics.AUTH_FAILURES, "token", "expired", line=_rare(windows, 0.05, 41))
    _histogram(increase, metrics.AUTH_ROUND, (), windows, 40)
    add(metrics.REAUTH_SUCCESS, "token", line=_wave(windows, 20, 42))
    _histogram(increase, metrics.REAUTH_SECONDS, (), windows, 20)
    add(metrics.EXPIRED_KILLED, line=dict.fromkeys(windows, 0.0))
    add(metrics.ADOPTED, line=dict.fromkeys(windows, 0.0))
    add(metrics.RESTARTS, "lookup", line=_rare(windows, 0.002, 43))
    level: dict[tuple[str, Key], Line] = {(metrics.ACTIVE, ()): _wave(windows, 4200, 50, 0.02)}
    for place, state in enumerate(("relay", "lookup", "handshake", "new")):
        level[metrics.STATES, (state,)] = _wave(windows, 4000 / 10**place, 50 + place, 0.05)
    configured, up = dict.fromkeys(windows, 3.0), dict.fromkeys(windows, 3.0) | dict.fromkeys(windows[200:260], 2.0)
    brokers = BrokerAvailability(configured, up, {}, [("broker-1.example:6651", 0.958), (HOSTILE_NAMES[0], 0.999)])
    return Cluster("east", Points(increase, level), brokers, _principals(span, windows, increase))


def _histogram(increase: dict[tuple[str, Key], Line], metric: str, key: Key, windows: list[int], count: float) -> None:
    below = 0.0
    for place, bound in enumerate(BOUNDS):
        below = min(1.0, below + 0.5 / (place + 1) ** 1.5)
        text = "+Inf" if math.isinf(bound) else str(bound)
        cumulative = count * (1.0 if math.isinf(bound) else below)
        increase[f"{metric}_bucket", (*key, text)] = dict.fromkeys(windows, cumulative)
    increase[f"{metric}_sum", key] = dict.fromkeys(windows, count * 0.004)
    increase[f"{metric}_count", key] = dict.fromkeys(windows, float(count))


def _principals(span: Span, windows: list[int], increase: dict[tuple[str, Key], Line]) -> Principals:
    moved = [sum(increase[metrics.BYTES, (way,)].values()) for way in ("to_broker", "to_client")]
    names = ["telemetry", "billing", *HOSTILE_NAMES, "orders", "audit"]
    shares = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.04]
    top = [
        Usage(name, (int(moved[0] * part), int(moved[1] * part), int(1e7 * part), int(2e7 * part), int(900 * part)))
        for name, part in zip(names, shares, strict=True)
    ]
    total = (*(int(one) for one in moved), 10_000_000, 20_000_000, 900)
    named = [sum(one.figures[place] for one in top) for place in range(5)]
    other = Usage("other", tuple(whole - mine for whole, mine in zip(total, named, strict=True)))
    lines = {
        one.name: {at: value * part for at, value in _wave(windows, 8e9, place).items()}
        for place, (one, part) in enumerate(zip(top[:7], shares, strict=False))
    }
    billed_sums = (total[0] - 1_234_567, *total[1:])
    billed = Billed(span.start, span.end, "hour", total, billed_sums, open_windows=2, late_samples=17)
    return Principals(top, other, None, total, lines, billed)


def _idle(windows: list[int]) -> Cluster:
    increase = {(metrics.BYTES, ("to_client",)): dict.fromkeys(windows, 60.0)}
    nobody = Principals([], None, None, (0, 0, 0, 0, 0), {}, None)
    return Cluster("west", Points(increase), BrokerAvailability({}, {}, {}, []), nobody)
