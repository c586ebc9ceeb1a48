"""Costs of use: lines with exact amounts, rounded once, so that the lines' sum is the total.

The exact total (a fraction, no float) is rounded half to even to the currency's smallest unit. Each line is rounded
down, and the units that are then missing from the total go to the lines with the largest remainders: so no line is
further from its exact amount than one unit, and every sum of lines (a tenant's, a principal's) is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Final

from analytics.report.prices import ITEMS, Prices
from analytics.report.span import Span

SHARED: Final = "(all connections)"
"""In place of a principal, for open connections, which are counted by cluster only."""
SCALE: Final = 18
"""Digits after the point of exact amounts and quantities in exports."""


@dataclass(frozen=True, slots=True)
class Use:
    """Use of one principal in one charge period (start and end within a month and within a price's validity)."""

    cluster: str
    principal: str
    start: datetime
    end: datetime
    quantities: dict[str, int]
    """By item, in its consumed unit."""


@dataclass(frozen=True, slots=True)
class Line:
    """One item of one use; `price` None: there is none, so it costs nothing, and is shown as unpriced."""

    use: Use
    tenant: str
    item: str
    quantity: int
    price: Decimal | None
    price_of: str
    cost: Decimal = Decimal(0)

    @property
    def principal(self) -> str | None:
        """The principal whose use it is; None: of all together (a principal may be named like SHARED)."""
        return None if self.item == "connection_hour" else self.use.principal

    @property
    def exact(self) -> Fraction:
        """The cost before it is rounded."""
        return Fraction(self.quantity, ITEMS[self.item].per) * Fraction(self.price or 0)


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A tenant's budget of the month that begins at `month`: spent until `until`, and with the same daily spending."""

    tenant: str
    month: datetime
    until: datetime
    budget: Decimal
    spent: Decimal

    @property
    def forecast(self) -> Decimal:
        """The month's cost, if the rest of it is as its part until now."""
        whole, elapsed = next_month(self.month) - self.month, self.until - self.month
        longer = Fraction(int(whole.total_seconds()), max(1, int(elapsed.total_seconds())))
        return to_decimal(Fraction(self.spent) * longer, -int(self.spent.as_tuple().exponent))


def charge_periods(span: Span, prices: Prices | None) -> list[tuple[datetime, datetime]]:
    """Cut the span at the beginnings of months and at days on which a price changes."""
    days = {datetime(day.year, day.month, day.day, tzinfo=UTC) for day in prices.dates} if prices else set()
    month = next_month(span.start)
    while month < span.end:
        days.add(month)
        month = next_month(month)
    cuts = [span.start, *sorted(day for day in days if span.start < day < span.end), span.end]
    return list(pairwise(cuts))


def next_month(moment: datetime) -> datetime:
    """Return the beginning of the next calendar month (UTC)."""
    return (month_of(moment) + timedelta(days=32)).replace(day=1)


def month_of(moment: datetime) -> datetime:
    """Return the beginning of the calendar month (UTC)."""
    return datetime(moment.year, moment.month, 1, tzinfo=UTC)


def cost_lines(use: Iterable[Use], prices: Prices) -> list[Line]:
    """Return the lines of all use that is not zero, sorted, with rounded costs: their sum is the rounded total."""
    lines = []
    for one in sorted(use, key=lambda one: (one.cluster, one.principal, one.start)):
        tenant = prices.tenant(one.principal)
        for item, quantity in one.quantities.items():
            if quantity:
                price_of, price = prices.price(tenant, item, one.start.date()) or (tenant, None)
                lines.append(Line(one, tenant, item, quantity, price, price_of))
    unit = Fraction(1, 10**prices.decimals)
    exact = [line.exact / unit for line in lines]
    units = [floor(amount) for amount in exact]
    missing = round(sum(exact, Fraction())) - sum(units)
    by_remainder = sorted(range(len(lines)), key=lambda place: (units[place] - exact[place], place))
    for place in by_remainder[:missing]:
        units[place] += 1
    return [replace(line, cost=to_decimal(n * unit, prices.decimals)) for line, n in zip(lines, units, strict=True)]


def total(lines: Iterable[Line]) -> Decimal:
    """Return the sum of the lines' costs, exactly."""
    return sum((line.cost for line in lines), Decimal(0))


def budget_states(lines: Sequence[Line], prices: Prices, month: datetime, until: datetime) -> list[BudgetState]:
    """Return the state of each budget, from the lines of the month until `until`."""
    spent = {name: total(line for line in lines if line.tenant == name) for name in prices.budgets}
    zero = Decimal(1).scaleb(-prices.decimals) * 0
    return [BudgetState(name, month, until, prices.budgets[name], spent[name] + zero) for name in prices.budgets]


def to_decimal(value: Fraction, digits: int = SCALE) -> Decimal:
    """Return the number with this many digits after the point, rounded half to even."""
    with localcontext() as context:
        context.prec = 100
        return Decimal(round(value * 10**digits)).scaleb(-digits)
