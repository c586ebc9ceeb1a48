"""proxy.runtime.dns.resolver: names that Trio itself looks up."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
from fake_dns import Names

from proxy.runtime.dns.resolver import Hostnames, Resolver


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery) -> Iterator[Names]:
    """Names as Trio finds them; the C library knows none."""
    names = Names(monkeypatch)
    names.hosts = {"listed": ("10.0.0.2",), "issuer": ("127.0.0.1",)}
    monkeypatch.setattr(socket, "getaddrinfo", _numbers_alone(socket.getaddrinfo))
    trio.socket.set_custom_hostname_resolver(Hostnames(Resolver(nursery, timeout_s=5, ttl_max_s=30)))
    yield names
    nursery.cancel_scope.cancel()


def _numbers_alone(getaddrinfo: object) -> object:
    def look_up(host: object, port: object, *arguments: int) -> object:
        *others, flags = (*arguments, *(0,) * (4 - len(arguments)))
        return getaddrinfo(host, port, *others, flags | socket.AI_NUMERICHOST)  # type: ignore[operator]

    return look_up


async def test_names_are_resolved_by_dns_and_the_table_of_hosts(names: Names) -> None:
    names.server.add("issuer.example", "AAAA", "fd00::1")
    names.server.add("issuer.example", "A", "10.0.0.1")
    found = await trio.socket.getaddrinfo("issuer.example", 443, type=socket.SOCK_STREAM)
    assert [(entry[0], entry[4][:2]) for entry in found] == [
        (socket.AF_INET6, ("fd00::1", 443)),
        (socket.AF_INET, ("10.0.0.1", 443)),
    ]
    found = await trio.socket.getaddrinfo("issuer.example", 443, family=socket.AF_INET)
    assert [entry[4] for entry in found] == [("10.0.0.1", 443)]
    assert [entry[4] for entry in await trio.socket.getaddrinfo("listed", None)] == [("10.0.0.2", 0)]
    assert {entry[4] for entry in await trio.socket.getaddrinfo("10.0.0.9", 80)} == {("10.0.0.9", 80)}


async def test_a_name_that_is_not_known_is_the_usual_error(names: Names) -> None:
    with pytest.raises(socket.gaierror, match="nowhere: is not known"):
        await trio.socket.getaddrinfo("nowhere", 443)


async def test_a_connection_is_opened_by_name(names: Names) -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream("issuer", listener.socket.getsockname()[1]):
        pass


async def test_an_address_has_no_name(names: Names) -> None:
    assert await trio.socket.getnameinfo(("10.0.0.1", 80), 0) == ("10.0.0.1", "80")
