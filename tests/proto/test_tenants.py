"""proto.tenants: the tenant of a topic or a namespace, as brokers read it."""

from __future__ import annotations

import pytest

from proto.tenants import tenant_of


@pytest.mark.parametrize(
    ("subject", "tenant"),
    [
        ("persistent://acme/ns/t", "acme"),
        ("non-persistent://acme/ns/t", "acme"),
        ("persistent://acme/cluster/ns/t", "acme"),
        ("segment://acme/ns/t/0000-ffff-1", "acme"),
        ("acme/ns/t", "acme"),
        ("acme/ns", "acme"),
        ("t", "public"),
        ("persistent://acme", "acme"),
        ("persistent://a.b-c=d:e/ns/t", "a.b-c=d:e"),
        ("persistent://acme/ns/a://b", "acme"),
        ("", "public"),
        ("t/", "public"),
        ("/t", "public"),
        ("//t//", "public"),
        ("acme/ns/t/", "acme"),
        ("persistent:///t", ""),
        ("://", ""),
        ("/", "public"),
    ],
)
def test_tenants(subject: str, tenant: str) -> None:
    assert tenant_of(subject) == tenant
