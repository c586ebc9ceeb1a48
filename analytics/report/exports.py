"""The statement's lines as CSV or Parquet, with columns of its own or those of FOCUS 1.3 (Cost and Usage)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from analytics.report.costs import SCALE, Line, month_of, next_month, to_decimal
from analytics.report.prices import DEFAULT, ITEMS, Prices

_SERVICE: Final = "Pulsar proxy"
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
Columns = dict[str, tuple[type, Callable[[Line, Prices], Any]]]

LINES: Final[Columns] = {
    "cluster": (str, lambda line, _: line.use.cluster),
    "tenant": (str, lambda line, _: line.tenant),
    "principal": (str, lambda line, _: line.use.principal),
    "item": (str, lambda line, _: line.item),
    "start": (datetime, lambda line, _: line.use.start),
    "end": (datetime, lambda line, _: line.use.end),
    "quantity": (Decimal, lambda line, _: Decimal(line.quantity)),
    "unit": (str, lambda line, _: ITEMS[line.item].consumed_unit),
    "price": (Decimal, lambda line, _: line.price),
    "priced_unit": (str, lambda line, _: ITEMS[line.item].pricing_unit),
    "exact_cost": (Decimal, lambda line, _: to_decimal(line.exact)),
    "cost": (Decimal, lambda line, _: line.cost),
    "currency": (str, lambda _, prices: prices.currency),
}


def _describe(line: Line, _prices: Prices) -> str:
    item = ITEMS[line.item]
    return f"{item.text}, {'no price' if line.price is None else f'by {item.pricing_unit}'}"


def _tags(line: Line, _prices: Prices) -> str:
    tags = {"cluster": line.use.cluster, "principal": line.use.principal, "tenant": line.tenant}
    return json.dumps(tags, ensure_ascii=False)


def _issuer(_line: Line, prices: Prices) -> str:
    return prices.issuer


def _constant(text: str | None) -> Callable[[Line, Prices], str | None]:
    return lambda _line, _prices: text


FOCUS: Final[Columns] = {
    "BilledCost": LINES["cost"],
    "BillingAccountId": (str, lambda _, prices: prices.account),
    "BillingAccountName": (str, lambda _, prices: prices.account),
    "BillingCurrency": (str, lambda _, prices: prices.currency),
    "BillingPeriodEnd": (datetime, lambda line, _: next_month(line.use.start)),
    "BillingPeriodStart": (datetime, lambda line, _: month_of(line.use.start)),
    "ChargeCategory": (str, _constant("Usage")),
    "ChargeClass": (str, _constant(None)),
    "ChargeDescription": (str, _describe),
    "ChargeFrequency": (str, _constant("Usage-Based")),
    "ChargePeriodEnd": (datetime, lambda line, _: line.use.end),
    "ChargePeriodStart": (datetime, lambda line, _: line.use.start),
    "ConsumedQuantity": (Decimal, lambda line, _: Decimal(line.quantity)),
    "ConsumedUnit": (str, lambda line, _: ITEMS[line.item].consumed_unit),
    "ContractedCost": LINES["exact_cost"],
    "ContractedUnitPrice": (Decimal, lambda line, _: line.price),
    "EffectiveCost": LINES["exact_cost"],
    "HostProviderName": (str, _issuer),
    "InvoiceIssuerName": (str, _issuer),
    "ListCost": LINES["exact_cost"],
    "ListUnitPrice": (Decimal, lambda line, _: line.price),
    "PricingCategory": (str, _constant("Standard")),
    "PricingQuantity": (Decimal, lambda line, _: to_decimal(Fraction(line.quantity, ITEMS[line.item].per))),
    "PricingUnit": (str, lambda line, _: ITEMS[line.item].pricing_unit),
    "ProviderName": (str, _issuer),
    "PublisherName": (str, _issuer),
    "ResourceId": (str, lambda line, _: f"{line.use.cluster}/{line.use.principal}"),
    "ResourceName": (str, lambda line, _: line.use.principal),
    "ResourceType": (str, _constant("Principal")),
    "ServiceCategory": (str, _constant("Integration")),
    "ServiceName": (str, _constant(_SERVICE)),
    "ServiceProviderName": (str, _issuer),
    "ServiceSubcategory": (str, _constant("Messaging")),
    "SkuId": (str, lambda line, _: line.item),
    "SkuMeter": (str, lambda line, _: ITEMS[line.item].text),
    "SkuPriceId": (str, lambda line, _: line.item if line.price_of == DEFAULT else f"{line.item}/{line.price_of}"),
    "SubAccountId": (str, lambda line, _: line.tenant),
    "SubAccountName": (str, lambda line, _: line.tenant),
    "SubAccountType": (str, _constant("Tenant")),
    "Tags": (str, _tags),
}
"""Of FOCUS 1.3's columns the mandatory ones, the deprecated ProviderName and PublisherName included, and those of the
others that have a meaning here. List, contracted and effective costs are exact, billed costs rounded.
"""


def export(lines: Sequence[Line], prices: Prices, columns: Columns, *, parquet: bool) -> bytes:
    """Return the file's bytes: the same for the same lines."""
    rows = [[value(line, prices) for _, value in columns.values()] for line in lines]
    return _parquet(rows, columns) if parquet else _csv(rows, columns)


def _csv(rows: list[list[Any]], columns: Columns) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue().encode(errors="backslashreplace")


def _cell(value: Any) -> str:
    """Return a value's text: of names of strangers none that a spreadsheet takes for a formula."""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%SZ}"
    if isinstance(value, Decimal):
        return format(value, "f")
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _parquet(rows: list[list[Any]], columns: Columns) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {str: pa.string(), datetime: pa.timestamp("us", "UTC"), Decimal: pa.decimal128(38, SCALE)}
    by_column = zip(*rows, strict=True) if rows else ([] for _ in columns)
    arrays = [pa.array(list(cells), kinds[kind]) for cells, (kind, _) in zip(by_column, columns.values(), strict=True)]
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, list(columns)), out)
    return bytes(out.getvalue())
