"""A name server in memory, behind dnspython's own resolver; and what else names are looked up in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.nameserver
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
import trio

from proxy.runtime.dns import resolver as runtime_dns
from proxy.runtime.dns.resolver import _query_addresses


class FakeNameServer(dns.nameserver.Nameserver):
    """``records``: by name and type, the TTL and the records' texts. Names without any record do not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.asked: list[tuple[str, str]] = []
        self.delay_s: Callable[[str, str], float] = lambda _name, _kind: 0
        self.rcode: dict[tuple[str, str], dns.rcode.Rcode] = {}
        self.broken: Exception | None = None
        self.most_at_once = self.at_once = 0

    def add(self, name: str, kind: str, *records: str, ttl: int = 60) -> None:
        self.records[dns.name.from_text(name).to_text(), kind] = (ttl, list(records))

    def remove(self, name: str) -> None:
        for key in [key for key in self.records if key[0] == dns.name.from_text(name).to_text()]:
            del self.records[key]

    def count(self, name: str, kind: str = "A") -> int:
        return self.asked.count((dns.name.from_text(name).to_text(), kind))

    def __str__(self) -> str:
        return "fake"

    def kind(self) -> str:
        return "fake"

    def is_always_max_size(self) -> bool:
        return True

    def answer_nameserver(self) -> str:
        return "fake"

    def answer_port(self) -> int:
        return 53

    async def async_query(self, request: dns.message.QueryMessage, *_: Any, **__: Any) -> dns.message.Message:
        question = request.question[0]
        key = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(key)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.sleep(self.delay_s(*key))
        finally:
            self.at_once -= 1
        if self.broken is not None:
            raise self.broken
        wire = self._response(request, *key).to_wire()
        return dns.message.from_wire(wire)

    def _response(self, request: dns.message.QueryMessage, name: str, kind: str) -> dns.message.Message:
        response = dns.message.make_response(request)
        if (name, kind) in self.rcode:
            response.set_rcode(self.rcode[name, kind])
            return response
        names = {known for known, _ in self.records}
        if name not in names:
            response.set_rcode(dns.rcode.NXDOMAIN)
        while (name, "CNAME") in self.records:
            ttl, [target] = self.records[name, "CNAME"]
            response.answer.append(dns.rrset.from_text(name, ttl, "IN", "CNAME", target))
            name = target
        if (name, kind) in self.records:
            ttl, records = self.records[name, kind]
            response.answer.append(dns.rrset.from_text(name, ttl, "IN", kind, *records))
        return response


class Still:
    """In place of ReloadingFile: a thread that looks at files knows nothing of the test's clock."""

    def __init__(self, _key: str, _files: Any, build: Callable[[], Any]) -> None:
        self.value = build()

    async def current_value(self) -> Any:
        return self.value


class Names:
    """All that names are looked up in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = FakeNameServer()
        self.hosts: dict[str, tuple[str, ...]] = {}
        self.search = ""
        self.no_server = False
        monkeypatch.setattr(runtime_dns, "ReloadingFile", Still)
        monkeypatch.setattr(runtime_dns, "_read_hosts", lambda: self.hosts)
        monkeypatch.setattr(runtime_dns, "_read_resolv_conf", self._resolver)
        monkeypatch.setattr(runtime_dns, "_query_addresses", _query_addresses)  # where a fake network has its own

    def _resolver(self) -> dns.asyncresolver.Resolver | None:
        if self.no_server:
            return None
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.domain = dns.name.root
        resolver.search = [dns.name.from_text(suffix) for suffix in self.search.split()]
        resolver.nameservers = [self.server]
        return resolver
