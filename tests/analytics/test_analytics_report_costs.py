"""Prices from a file, lines and their sums, and the files: exact, the same each time, and no formula in a cell."""

import csv
import io
import json
import re
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analytics.report.costs import Line, Use, budget_states, charge_periods, cost_lines, next_month, total
from analytics.report.exports import FOCUS, LINES, Columns, export
from analytics.report.prices import BadPrices, Prices, parse_prices, read_prices
from analytics.report.span import RESOLUTIONS, Span
from tests.analytics.focus_columns import MANDATORY, OTHERS

GIB = 1 << 30
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC)
HOSTILE = ('=cmd|" /C calc"!A0', "+1", "-1+2", "@SUM(A1)", "\t=1", "\r=1", '<script>alert(1)</script>,"x"', "plain")
FILE = """
currency = "EUR"
issuer = "Messaging team"
account = "pulsar"

[tenants]
payments = ["pay-*", "card"]
tests = ["*-test"]

[[price]]
from = 2026-11-01
gib_in = 0.02
gib_out = "0.05"
connection_hour = 0.001

[[price]]
tenant = "payments"
from = 2026-11-15
gib_out = 0.04

[budgets]
payments = 500
default = 10
"""


def prices(text: str = FILE) -> Prices:
    return parse_prices(tomllib.loads(text, parse_float=Decimal))


def use(name: str, start: datetime = NOVEMBER, days: int = 14, **quantities: int) -> Use:
    return Use("east", name, start, start + timedelta(days=days), quantities)


def lines() -> list[Line]:
    later = NOVEMBER + timedelta(days=14)
    known = [use(name, gib_in=GIB * (3 + place)) for place, name in enumerate(HOSTILE)]
    known += [use("pay-1", gib_out=GIB * 100), use("pay-1", later, gib_out=GIB * 100), use("x", million_messages=7)]
    return cost_lines([*known, use("(all connections)", connection_hour=3600 * 1000)], prices())


# ---- prices


def test_a_price_changes_within_a_period_and_only_for_its_tenant() -> None:
    months = Span(NOVEMBER, NOVEMBER + timedelta(days=40), RESOLUTIONS[1])
    starts = [start.day for start, _ in charge_periods(months, prices())]
    assert starts == [1, 15, 1]  # the price's change, and December
    found = {(line.use.principal, line.use.start.day): line.cost for line in lines()}
    assert found["pay-1", 1] == Decimal("5.00")
    assert found["pay-1", 15] == Decimal("4.00")


def test_tenants_by_patterns_and_prices_of_unknown_ones() -> None:
    known = prices()
    assert [known.tenant(name) for name in ("pay-x", "card", "pay-test", "a-test", "PAY-x", "who")] == [
        "payments", "payments", "payments", "tests", "default", "default"
    ]  # fmt: skip
    assert known.price("tests", "gib_out", NOVEMBER.date()) == ("default", Decimal("0.05"))
    assert known.price("tests", "gib_out", (NOVEMBER - timedelta(days=1)).date()) is None
    assert known.price("tests", "million_messages", NOVEMBER.date()) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"EUR"', '"euro"'), "currency"),
        (("gib_in = 0.02", "gib_in = -1"), "an amount from 0"),
        (("gib_in = 0.02", "gib_in = nan"), "an amount from 0"),
        (("gib_in = 0.02", 'gib_in = "two"'), "an amount from 0"),
        (("gib_in = 0.02", "gib_in = true"), "an amount from 0"),
        (("gib_in = 0.02", "gib_in = 1e9"), "an amount from 0"),
        (("gib_in = 0.02", "gib_in = 1e-13"), "digits after the point"),
        (("gib_in", "gib"), "unknown 'gib'"),
        (("from = 2026-11-15", 'from = "2026-11-15"'), "without quotes"),
        (("from = 2026-11-15", "from = 2026-11-15T00:00:00"), "without quotes"),
        (('tenant = "payments"\nfrom = 2026-11-15', "from = 2026-11-01"), "a second price of gib_out"),
        (('tenant = "payments"', 'tenant = "paiments"'), "not in [tenants]"),
        (("gib_out = 0.04", "connection_hour = 0.04"), "counted by cluster"),
        (("default = 10", "who = 10"), "unknown 'who'"),
        (('["pay-*", "card"]', '"pay-*"'), "a list"),
        (("currency", "decimals = 7\ncurrency"), "decimals"),
        (("[budgets]", "[budgets"), "prices.toml"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(FILE.replace(*change))
    with pytest.raises(BadPrices, match=re.escape(said)):
        read_prices(path)


def test_a_file_that_is_too_long_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    for content in (b"#" * (1 << 20) + b"#", b"\xff", b"a = " + b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(BadPrices, match="longer than" if content.startswith(b"#") else "prices.toml"):
            read_prices(path)


# ---- lines and sums


@given(st.lists(st.integers(min_value=-(1 << 20), max_value=1 << 60), max_size=30), st.integers(0, 6))
def test_the_lines_add_up_to_the_total_that_is_rounded_once(quantities: list[int], decimals: int) -> None:
    known = prices(f"decimals = {decimals}\n{FILE}")
    found = cost_lines([use(f"p{place}", gib_out=quantity) for place, quantity in enumerate(quantities)], known)
    exact = sum((line.exact for line in found), Fraction())
    unit = Fraction(1, 10**decimals)
    assert total(found) == round(exact / unit) * unit
    assert all(abs(Fraction(line.cost) - line.exact) < unit for line in found)
    assert all(-line.cost.as_tuple().exponent == decimals for line in found if line.quantity)


def test_use_without_a_price_is_a_line_and_costs_nothing() -> None:
    (found,) = (line for line in lines() if line.item == "million_messages")
    assert (found.price, found.cost, found.quantity) == (None, 0, 7)


def test_a_budgets_state_and_forecast() -> None:
    until = NOVEMBER + timedelta(days=15)
    default, payments = sorted(budget_states(lines(), prices(), NOVEMBER, until), key=lambda one: one.tenant)
    assert (payments.spent, payments.forecast) == (Decimal("9.00"), Decimal("18.00"))
    assert default.spent == total(line for line in lines() if line.tenant == "default")
    at_once = replace(payments, until=NOVEMBER + timedelta(milliseconds=1), spent=Decimal("0.00"))
    assert at_once.forecast == 0
    assert next_month(datetime(2026, 12, 31, 23, tzinfo=UTC)) == datetime(2027, 1, 1, tzinfo=UTC)


# ---- files


def read_csv(columns: Columns) -> list[dict[str, str]]:
    content = export(lines(), prices(), columns, parquet=False)
    assert content == export(list(lines()), prices(), columns, parquet=False)
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


@pytest.mark.parametrize("columns", [LINES, FOCUS])
def test_no_cell_of_a_csv_file_is_a_formula(columns: Columns) -> None:
    rows = read_csv(columns)
    numbers = {name for name, (kind, _) in columns.items() if kind is Decimal}
    for row in rows:
        assert not [cell for name, cell in row.items() if name not in numbers and cell.startswith(tuple("=+-@\t\r\n"))]
        assert all(re.fullmatch(r"-?\d+(\.\d+)?|", row[name]) for name in numbers)
    name = "principal" if columns is LINES else "ResourceName"
    assert {f"'{one}" for one in HOSTILE[:6]} | set(HOSTILE[6:]) <= {row[name] for row in rows}


def test_the_focus_file_has_the_specifications_columns_types_and_nulls() -> None:
    known = MANDATORY | OTHERS
    table = pq.read_table(pa.BufferReader(export(lines(), prices(), FOCUS, parquet=True)))
    assert set(MANDATORY) <= set(table.column_names) <= set(known)
    kinds = {"Decimal": pa.decimal128(38, 18), "Date/Time": pa.timestamp("us", "UTC")}
    for name in table.column_names:
        kind, nullable, allowed = known[name]
        values = table.column(name).to_pylist()
        assert table.schema.field(name).type == kinds.get(kind, pa.string()), name
        assert nullable or None not in values, name
        assert allowed is None or set(values) - {None} <= allowed, name
        if kind == "JSON":
            assert all(isinstance(json.loads(value), dict) for value in values)
    rows = table.to_pylist()
    for row in rows:
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        assert (row["ConsumedQuantity"] is None) == (row["ConsumedUnit"] is None)
        assert re.fullmatch("[A-Z]{3}", row["BillingCurrency"])
        if row["ListUnitPrice"] is not None:
            exact = Fraction(row["ListUnitPrice"]) * Fraction(row["PricingQuantity"])
            assert abs(exact - Fraction(row["ListCost"])) < Fraction(1, 10**12)
    assert sum(row["BilledCost"] for row in rows) == total(lines())


def test_the_focus_csv_has_utc_times_and_plain_numbers() -> None:
    rows = read_csv(FOCUS)
    for name, (kind, nullable, _) in ((name, (MANDATORY | OTHERS)[name]) for name in FOCUS):
        for row in rows:
            assert nullable or row[name], name
            if kind == "Date/Time":
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[name])
    assert sum(Decimal(row["BilledCost"]) for row in rows) == total(lines())
    assert {row["ChargeClass"] for row in rows} == {""}


def test_the_largest_quantities_fit_into_parquet() -> None:
    known = prices(FILE.replace("gib_in = 0.02", "gib_in = 1000000\nmillion_messages = 1000000"))
    large = cost_lines([use("p", gib_in=1 << 60, million_messages=1 << 60)], known)
    table = pq.read_table(pa.BufferReader(export(large, known, LINES, parquet=True)))
    assert sum(table.column("cost").to_pylist()) == total(large)
