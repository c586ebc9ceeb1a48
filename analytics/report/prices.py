"""Prices, tenants and budgets, from a TOML file. Money is never a float; a price is valid from midnight UTC on."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from analytics.errors import AnalyticsError

DEFAULT: Final = "default"
"""The tenant of principals that no pattern names, and whose prices hold where a tenant has none of its own."""
T = TypeVar("T")
_FILE_BYTES_MAX: Final = 1 << 20
_PRICE_MAX: Final = Decimal(10**6)
_PRICE_DIGITS: Final = 12
_DECIMALS_MAX: Final = 6
_NAME_CHARS_MAX: Final = 128


class Item(NamedTuple):
    """What is priced: `per` of the consumed unit are one of the pricing unit."""

    text: str
    consumed_unit: str
    pricing_unit: str
    per: int


ITEMS: Final = {
    "gib_in": Item("Data from clients to brokers", "B", "GiB", 1 << 30),
    "gib_out": Item("Data from brokers to clients", "B", "GiB", 1 << 30),
    "million_messages": Item("Messages in and out", "Messages", "1000000 Messages", 10**6),
    "connection_hour": Item("Open connections", "Connection-Seconds", "Connection-Hours", 3600),
}


class BadPrices(AnalyticsError, ValueError):
    """An invalid price file; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`table`: (tenant, item) → (valid from, price of a pricing unit), the latest last; `tenants`: (pattern, tenant).

    `budgets`: by tenant, of a calendar month. `decimals`: digits after the point of the currency's smallest unit.
    """

    currency: str
    decimals: int = 2
    issuer: str = "Pulsar proxy"
    account: str = "pulsar-proxy"
    table: dict[tuple[str, str], list[tuple[date, Decimal]]] = field(default_factory=dict)
    tenants: list[tuple[str, str]] = field(default_factory=list)
    budgets: dict[str, Decimal] = field(default_factory=dict)

    @property
    def dates(self) -> list[date]:
        """The days on which a price changes."""
        return sorted({day for entries in self.table.values() for day, _ in entries})

    def tenant(self, principal: str) -> str:
        """Return the principal's tenant: of the first pattern that matches, in the file's order."""
        return next((name for pattern, name in self.tenants if fnmatchcase(principal, pattern)), DEFAULT)

    def price(self, tenant: str, item: str, day: date) -> tuple[str, Decimal] | None:
        """Return the tenant whose price it is (its own or DEFAULT), and the price; None where there is no price."""
        for name in (tenant, DEFAULT):
            if valid := [price for since, price in self.table.get((name, item), ()) if since <= day]:
                return name, valid[-1]
        return None


def read_prices(path: Path) -> Prices:
    """Read the file. Raises BadPrices."""
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadPrices(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise BadPrices(f"{path}: longer than {_FILE_BYTES_MAX} bytes")
    try:
        return parse_prices(tomllib.loads(raw.decode(), parse_float=Decimal))
    except (ValueError, RecursionError) as error:
        raise BadPrices(f"{path}: {error}") from error


def parse_prices(raw: dict[str, Any]) -> Prices:
    """Return the prices of a parsed file. Raises BadPrices."""
    _known(raw, {"currency", "decimals", "issuer", "account", "price", "tenants", "budgets"}, "the file")
    currency, decimals = raw.get("currency"), raw.get("decimals", 2)
    if not isinstance(currency, str) or not re.fullmatch("[A-Z]{3}", currency):
        raise BadPrices(f"currency: three capital letters of ISO 4217, not {currency!r}")
    if type(decimals) is not int or not 0 <= decimals <= _DECIMALS_MAX:
        raise BadPrices(f"decimals: 0 to {_DECIMALS_MAX}, not {decimals!r}")
    names = {key: _name(raw[key], key) for key in ("issuer", "account") if key in raw}
    tenants = [
        (_name(pattern, f"tenants.{name}"), _name(name, "tenants"))
        for name, patterns in _typed(raw.get("tenants", {}), dict, "tenants").items()
        for pattern in _typed(patterns, list, f"tenants.{name}")
    ]
    known = {DEFAULT, *(name for _, name in tenants)}
    table: dict[tuple[str, str], list[tuple[date, Decimal]]] = {}
    for place, entry in enumerate(_typed(raw.get("price", []), list, "price")):
        _add_entry(table, _typed(entry, dict, f"price[{place}]"), known, f"price[{place}]")
    budgets = _typed(raw.get("budgets", {}), dict, "budgets")
    _known(budgets, known, "budgets")
    of_month = {name: _money(value, f"budgets.{name}") for name, value in budgets.items()}
    return Prices(
        currency, decimals, table={key: sorted(entries) for key, entries in table.items()}, tenants=tenants,
        budgets=of_month, **names,
    )  # fmt: skip


def _add_entry(
    table: dict[tuple[str, str], list[tuple[date, Decimal]]], entry: dict[str, Any], known: set[str], where: str
) -> None:
    _known(entry, {"from", "tenant", *ITEMS}, where)
    tenant, since = entry.get("tenant", DEFAULT), entry.get("from")
    if tenant not in known:
        raise BadPrices(f"{where}: tenant {tenant!r} is not in [tenants]")
    if type(since) is not date:
        raise BadPrices(f"{where}: from is a day, as 2026-11-01 without quotes, not {since!r}")
    for item in ITEMS.keys() & entry.keys():
        if item == "connection_hour" and tenant != DEFAULT:
            raise BadPrices(f"{where}: open connections are counted by cluster, so no tenant has its own price of them")
        entries = table.setdefault((tenant, item), [])
        if since in {day for day, _ in entries}:
            raise BadPrices(f"{where}: a second price of {item} for {tenant!r} from {since}")
        entries.append((since, _money(entry[item], f"{where}.{item}")))


def _money(value: object, where: str) -> Decimal:
    try:
        amount = Decimal(value) if type(value) in {str, int, Decimal} else None  # type: ignore[arg-type]
    except ArithmeticError:
        amount = None
    if amount is None or not amount.is_finite() or not 0 <= amount <= _PRICE_MAX:
        raise BadPrices(f"{where}: an amount from 0 to {_PRICE_MAX}, not {value!r}")
    if -int(amount.as_tuple().exponent) > _PRICE_DIGITS:
        raise BadPrices(f"{where}: at most {_PRICE_DIGITS} digits after the point")
    return amount


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _NAME_CHARS_MAX or not value.isprintable():
        raise BadPrices(f"{where}: a name is text of 1 to {_NAME_CHARS_MAX} printable characters, not {value!r}")
    return value


def _known(given: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(given.keys() - known):
        raise BadPrices(f"{where}: unknown {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _typed(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind):
        raise BadPrices(f"{where}: a {kind.__name__}, not {value!r}")
    return value
