"""proxy.runtime.network.dial_check: a lookup worker that was taken over leads no relay to where no broker can be."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from fake_dns import Names

from proto.addresses import HostPort
from proxy.config.types import Brokers
from proxy.runtime.network.dial_check import DialCheck
from proxy.runtime.network.dial_rules import TargetDenied

Check = Callable[..., DialCheck]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def check(names: Names, nursery: trio.Nursery) -> Check:
    def make(service_url: str = "pulsar://10.9.9.9:6650", **brokers: Any) -> DialCheck:
        return DialCheck(msgspec.convert({"service_url": service_url, **brokers}, Brokers), nursery)

    return make


async def denial(check: DialCheck, *addresses: str, port: int = 6650) -> str:
    with pytest.raises(TargetDenied) as denied:
        await check.check_target(HostPort("b0", port), addresses)
    return denied.value.reason


EVERYWHERE = {"allowed_hosts": ["*"], "allowed_addresses": ["*"]}


@pytest.mark.parametrize("brokers", [{}, EVERYWHERE], ids=["by default", "where all is allowed"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("169.254.169.254", "metadata"),
        ("::ffff:169.254.169.254", "metadata"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("169.254.1.1", "link_local"),
        ("fe80::1%eth0", "link_local"),
        ("0.0.0.0", "unspecified"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("no address", "malformed"),
    ],
)
async def test_an_address_that_no_broker_can_have_is_refused(
    check: Check, address: str, reason: str, brokers: dict[str, Any]
) -> None:
    """Security."""
    assert await denial(check(**brokers), address) == reason
    assert await denial(check(**brokers), "10.9.9.9", address) == reason, "beside a broker's"


@pytest.mark.parametrize("port", [22, 6651, 8080, 99999])
async def test_a_port_that_is_no_brokers(check: Check, port: int) -> None:
    """Security."""
    assert await denial(check(), "10.9.9.9", port=port) == "port"


async def test_ports_that_the_operator_allows(check: Check) -> None:
    for rules in (check(**EVERYWHERE), check(allowed_ports=[6651])):
        await rules.check_target(HostPort("b0", 6651), ["10.0.0.1"])
    assert await denial(check(**EVERYWHERE, allowed_ports=[7000]), "10.0.0.1", port=6651) == "port"


@pytest.mark.parametrize("service_url", ["pulsar://127.0.0.1", "pulsar://[::1]", "pulsar://here,10.0.0.1"])
async def test_brokers_at_loopback_addresses(check: Check, names: Names, service_url: str) -> None:
    """As a lookup worker has it: one of the operator's brokers at such an address is enough."""
    names.hosts["here"] = ("127.0.0.1",)
    await check(service_url).check_target(HostPort("b0", 6650), ["127.0.0.1"])


async def test_loopback_addresses_that_the_operator_names(check: Check) -> None:
    await check(allowed_addresses=["127.0.0.0/8"]).check_target(HostPort("b0", 6650), ["127.0.0.1"])
    assert await denial(check(allowed_addresses=["0.0.0.0/0"]), "127.0.0.1") == "loopback"


async def test_brokers_at_loopback_count_while_dns_fails(
    check: Check, names: Names, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b0", "A", "127.0.0.1")
    rules = check("pulsar://b0")
    await rules.check_target(HostPort("b0", 6650), ["127.0.0.1"])
    names.server.broken = OSError("no name server")
    await trio.sleep(600)
    await rules.check_target(HostPort("b0", 6650), ["127.0.0.1"])


async def test_srv_records_say_hosts_and_ports(check: Check, names: Names) -> None:
    names.server.add("_pulsar._tcp.example.org", "SRV", "0 0 7000 b0.example.org.")
    names.server.add("b0.example.org", "A", "127.0.0.1")
    rules = check("pulsar+srv://example.org")
    await rules.check_target(HostPort("b0.example.org", 7000), ["127.0.0.1"])
    assert await denial(rules, "127.0.0.1", port=7001) == "port"


async def test_the_next_proxy_is_where_its_name_leads(check: Check, names: Names) -> None:
    """Security: a lookup worker does not check its address, so only the operator's own name for it may lead there."""
    names.server.add("next", "A", "127.0.0.1")
    rules = check("pulsar://next", through_proxy=True)
    for address in ("127.0.0.1", "10.0.0.1"):
        await rules.check_target(HostPort("next", 6650), [address])
    assert await denial(rules, "127.0.0.2") == "loopback"
    assert await denial(rules, "169.254.169.254") == "metadata"
    assert await denial(rules, "10.0.0.1", port=6651) == "port"


async def test_a_brokers_address_needs_no_name_server(check: Check, names: Names) -> None:
    await check("pulsar://b0").check_target(HostPort("b0", 6650), ["10.0.0.1", "fd00::1"])
    assert names.server.asked == []
