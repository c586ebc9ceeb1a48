"""proxy.admin.service: the names and addresses for which the admin port answers."""

from __future__ import annotations

import pytest

from proxy.admin.service import HostCheck
from proxy.config.types import Admin

CONFIG = Admin(bind="admin.internal:8080", allowed_hosts=("Proxy.example.com", "*.pulsar.svc"))


@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1",
        "10.1.2.3:8080",
        "[::1]:8080",
        "[2001:db8::1]",
        "localhost:8080",
        "LOCALHOST.",
        "admin.internal:8080",
        "proxy.example.com",
        "PROXY.example.com.:80",
        "proxy-admin.pulsar.svc:8080",
    ],
)
def test_own_names_and_all_addresses_are_answered(host: str) -> None:
    assert HostCheck(CONFIG).is_own_host(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example:8080",
        "proxy.example.com.attacker.example",
        "a.proxy.example.com",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "127.0.0.1@attacker.example",
        "0x7f.1",
        "2130706433",
        "pulsar.svc",
        "localhost:80:80",
        "[::1",
        "[v1.x]",
        "a b",
        "\xff",
    ],
)
def test_other_names_are_not(host: str) -> None:
    """Security: DNS rebinding."""
    assert not HostCheck(CONFIG).is_own_host(host.encode("latin-1"))
    assert HostCheck(Admin(allowed_hosts=("*",))).is_own_host(host.encode("latin-1"))
