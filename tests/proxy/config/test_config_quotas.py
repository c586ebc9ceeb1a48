"""proxy.config.quotas: combinations of keys that are refused, by their names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.common.errors import ConfigError
from proxy.config.checks import validate_config
from proxy.config.types import QUOTAS_MAX, Config

TENANT = {"by": "tenant", "tenant": "acme"}


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ({}, "it limits nothing"),
        ({"dry_run": True}, "it limits nothing"),
        ({"max_connections": 1, "principals": ["a*b"]}, 'principals: "a\\*b" has a "\\*" that is not its last'),
        ({"max_connections": 1, "tenant": "acme"}, "tenant: it belongs to"),
        ({"by": "tenant", "lookups_per_second": 1}, "tenant: it belongs to"),
        ({"by": "address", "tenant": "a", "new_connections_per_second": 1}, "tenant: it belongs to"),
        ({"by": "address", "principals": ["a"], "new_connections_per_second": 1}, "principals: by"),
        ({"by": "address", "max_connections": 1}, "limits new_connections_per_second alone"),
        ({"by": "address", "new_connections_per_second": 1, "lookups_per_second": 1}, "alone"),
        ({**TENANT, "max_connections": 1}, "max_connections: for a tenant it needs principals"),
        ({**TENANT, "new_connections_per_second": 1}, "new_connections_per_second: for a tenant it needs"),
        ({**TENANT, "lookups_per_second": 1, "principals": ["a"]}, "principals: a tenant's lookups"),
        ({**TENANT, "tenant": "a*", "lookups_per_second": 1}, "tenant: a name"),
        ({**TENANT, "tenant": "a/b", "lookups_per_second": 1}, "no slash"),
        ({**TENANT, "tenant": "*", "max_connections": 1, "principals": ["a"]}, "which tenant a connection is of"),
    ],
)
def test_refused(quota: dict[str, Any], text: str) -> None:
    config = msgspec.convert({"quota": [{"max_connections": 1}, quota]}, Config)
    with pytest.raises(ConfigError, match=rf"^quota\[1\].*{text}"):
        validate_config(config)


@pytest.mark.parametrize(
    "quota",
    [
        {"max_connections": 1},
        {"lookups_per_second": 1, "principals": ["alice", "team-*", "*"], "dry_run": True},
        {"by": "address", "new_connections_per_second": 1},
        {**TENANT, "lookups_per_second": 1},
        {**TENANT, "tenant": "*", "lookups_per_second": 1},
        {**TENANT, "max_connections": 1, "lookups_per_second": 1, "principals": ["acme-*"]},
    ],
)
def test_accepted(quota: dict[str, Any]) -> None:
    config = msgspec.convert({"quota": [quota]}, Config)
    assert validate_config(config) is config


def test_their_number_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"quota": [{"max_connections": 1}] * (QUOTAS_MAX + 1)}, Config)
