"""lookup.targets.rules: a client is only relayed to where the operator's rules allow, at the addresses that were
checked."""

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from fake_dns import Names
from lookup_fakes import Network, make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.metrics import BrokerMetrics
from lookup.targets.rules import ANY_BROKER_MAX, Target, TargetRules
from proto.addresses import HostPort
from proxy.runtime.dns.resolver import Addresses, Resolver
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.network.dial_rules import TargetDenied, effective_address, forbidden_reason
from proxy.runtime.network.dialing import Dialer

Rules = Callable[..., TargetRules]


@pytest.fixture
def rules(network: Network, nursery: trio.Nursery) -> Rules:
    """The rules of a lookup worker whose brokers are looked for, but not at."""

    def make(*, search: bool = True, **brokers: Any) -> TargetRules:
        brokers.setdefault("service_url", "pulsar://10.9.9.9")
        config = make_config(brokers=brokers)

        def resolver() -> Resolver:
            timeout_s = config.brokers.connect_timeout_ms / 1000
            return Resolver(nursery, timeout_s=timeout_s, ttl_max_s=300)

        known = BrokerDirectory(config, Dialer(config.brokers), resolver(), BrokerMetrics(CollectorRegistry()))
        if search:
            nursery.start_soon(known.discovery.run)
        return TargetRules(config.brokers, resolver(), known)

    return make


@pytest.fixture
def denial(rules: Rules) -> Callable[..., Any]:
    async def reason(text: str, **brokers: Any) -> str:
        with pytest.raises(TargetDenied) as caught:
            await rules(**brokers).check_target(text)
        return caught.value.reason

    return reason


Denial = Callable[..., Any]


async def test_by_default_pulsars_own_ports_are_allowed(network: Network, rules: Rules, denial: Denial) -> None:
    network.names["broker"] = [["10.0.0.1"]]
    checked = rules(allowed_hosts=["broker"])
    assert await checked.check_target("broker:6650") == Target(HostPort("broker", 6650), ("10.0.0.1",))
    assert await denial("broker:22") == "port"


async def test_port_is_checked_before_anything_is_resolved(network: Network, denial: Denial) -> None:
    assert await denial("broker:8080", allowed_ports=[6650]) == "port"
    assert network.resolved == []


async def test_another_port_list(network: Network, rules: Rules, denial: Denial) -> None:
    others = {"allowed_ports": [7000], "allowed_addresses": ["10.0.0.1"]}
    assert (await rules(**others).check_target("10.0.0.1:7000")).addresses == ("10.0.0.1",)
    assert await denial("10.0.0.1:6650", **others) == "port"


@pytest.mark.parametrize(
    ("pattern", "host", "allowed"),
    [
        ("*", "anything.example", True),
        ("broker-*.pulsar.svc", "broker-0.pulsar.svc", True),
        ("broker-*.pulsar.svc", "BROKER-0.Pulsar.SVC", True),
        ("BROKER-*.pulsar.svc", "broker-0.pulsar.svc", True),
        ("broker-?", "broker-1", True),
        ("broker-?", "broker-12", False),
        ("broker-*.pulsar.svc", "broker-0.pulsar.svc.evil.example", False),
        ("broker-*.pulsar.svc", "evil-broker-0.pulsar.svc", False),
        ("broker.example", "brokerXexample", False),
        ("broker", "broker", True),
        ("broker", "broker2", False),
    ],
)
async def test_host_patterns_match_whole_names_in_any_case(
    network: Network, rules: Rules, denial: Denial, *, pattern: str, host: str, allowed: bool
) -> None:
    network.names[host.lower()] = [["10.0.0.1"]]
    if allowed:
        assert (await rules(allowed_hosts=[pattern]).check_target(f"{host}:6650")).broker.host == host
    else:
        assert await denial(f"{host}:6650", allowed_hosts=[pattern]) == "host"


async def test_a_host_that_matches_one_of_several_patterns_is_allowed(network: Network, rules: Rules) -> None:
    network.names["b"] = [["10.0.0.1"]]
    assert (await rules(allowed_hosts=["a", "b"]).check_target("b:6650")).addresses == ("10.0.0.1",)


@pytest.mark.parametrize(
    ("network_text", "address", "allowed"),
    [
        ("10.0.0.0/8", "10.255.0.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "2001:db8::1", False),
        ("fd00::/8", "10.0.0.1", False),
        ("10.0.0.0/8", "fd12::1", False),
        ("*", "203.0.113.1", True),
        # A scope names an interface; it changes nothing about which network an address is in.
        ("fd00::/8", "fd00::1%eth0", True),
        # ::ffff:a.b.c.d reaches a.b.c.d.
        ("10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("10.0.0.0/8", "::ffff:127.0.0.1", False),
        ("::/0", "::ffff:127.0.0.1", False),
    ],
)
async def test_resolved_addresses_are_held_against_the_networks(
    network: Network, rules: Rules, denial: Denial, *, network_text: str, address: str, allowed: bool
) -> None:
    network.names["broker"] = [[address]]
    if allowed:
        assert (await rules(allowed_addresses=[network_text]).check_target("broker:6650")).addresses == (address,)
    else:
        assert await denial("broker:6650", allowed_addresses=[network_text]) == "address"


async def test_an_address_as_target_is_held_against_the_networks_too(
    network: Network, rules: Rules, denial: Denial
) -> None:
    assert await denial("127.0.0.1:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    assert await denial("[::ffff:127.0.0.1]:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    assert (await rules(allowed_addresses=["fd00::/8"]).check_target("[fd00::1]:6650")).addresses == ("fd00::1",)
    assert network.resolved == []


@pytest.mark.parametrize("text", ["127.1:6650", "2130706433:6650", "0x7f000001:6650", "0177.0.0.1:6650"])
async def test_odd_spellings_of_an_address_are_checked_by_what_they_resolve_to(
    network: Network, text: str, denial: Denial
) -> None:
    network.names[text.partition(":")[0]] = [["127.0.0.1"]]
    assert await denial(text, allowed_addresses=["10.0.0.0/8"]) == "address"


async def test_of_several_addresses_only_the_allowed_ones_may_be_dialled(network: Network, rules: Rules) -> None:
    network.names["broker"] = [["127.0.0.1", "10.0.0.1", "::1", "10.0.0.2", "10.0.0.1"]]
    target = await rules(allowed_addresses=["10.0.0.0/8"]).check_target("broker:6650")
    assert target.addresses == ("10.0.0.1", "10.0.0.2")


@pytest.mark.conforms("pip-1.8", "pip-1.40")
async def test_rebinding_the_addresses_given_are_those_that_were_checked(network: Network, rules: Rules) -> None:
    network.names["broker"] = [["10.0.0.1"], ["127.0.0.1"]]
    target = await rules(allowed_addresses=["10.0.0.0/8"]).check_target("broker:6650")
    assert target.addresses == ("10.0.0.1",)
    assert network.resolved == ["broker"], "a second look at the name server is the window that rebinding needs"


@pytest.mark.parametrize(
    "text",
    ["", "broker:", "broker:0", "broker:65536", "broker:x", ":6650", "pulsar://broker:6650", "a b:6650",
     "[::1:6650", "[broker]:6650", "broker:6650:6651", "bröker:6650", "x" * 300 + ":6650", "broker:-1", "broker:٦٦٥٠"],
)  # fmt: skip
async def test_malformed(network: Network, text: str, denial: Denial) -> None:
    assert await denial(text) == "malformed"
    assert network.resolved == []


async def test_unknown_host(network: Network, denial: Denial) -> None:
    assert await denial("nowhere:6650") == "unknown_host"


async def test_a_name_without_an_address_is_denied(network: Network, denial: Denial) -> None:
    network.names["broker"] = [[]]
    assert await denial("broker:6650", allowed_addresses=["10.0.0.0/8"]) == "unknown_host"


async def test_a_resolver_that_does_not_answer(
    network: Network, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, denial: Denial
) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        await trio.sleep_forever()

    monkeypatch.setattr("proxy.runtime.dns.resolver._query_addresses", never)
    assert await denial("broker:6650", connect_timeout_ms=2000) == "unknown_host"
    assert trio.current_time() == pytest.approx(2)


async def test_the_text_is_for_the_log_and_says_what_to_change(network: Network, rules: Rules) -> None:
    network.names["broker"] = [["192.0.2.1"]]
    with pytest.raises(TargetDenied) as caught:
        await rules(allowed_addresses=["10.0.0.0/8"]).check_target("broker:6650")
    assert str(caught.value) == (
        "broker:6650 is at 192.0.2.1, no broker's of brokers.service_url (its hosts, below them, at their addresses), "
        "and not in brokers.allowed_addresses; "
        'if it is a broker of yours, set brokers.allowed_addresses = […, "192.0.2.1"]'
    )


# ---- through another proxy


async def test_through_another_proxy_every_relay_goes_there(network: Network, rules: Rules) -> None:
    network.names["p0"], network.names["p1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    through = rules(service_url="pulsar://p0:7000,p1", through_proxy=True)
    await trio.testing.wait_all_tasks_blocked()
    found = [await through.check_target("broker:6650") for _ in range(3)]
    first, second = Target(HostPort("p0", 7000), ("10.0.0.1",)), Target(HostPort("p1", 6650), ("10.0.0.2",))
    assert found == [first, second, first], "each in its turn"
    assert "broker" not in network.resolved, "what its name leads to is for the other proxy to see"


@pytest.mark.parametrize(
    ("target", "brokers", "reason"),
    [
        ("broker:22", {}, "port"),
        ("broker:7000", {}, "port"),
        ("evil:6650", {"allowed_hosts": ["broker*"]}, "host"),
        ("broker", {}, "no_port"),
    ],
)
async def test_another_proxy_is_only_asked_for_what_is_allowed(
    network: Network, target: str, brokers: dict[str, Any], reason: str, denial: Denial
) -> None:
    """Security: the client's words decide where the other proxy goes, within this one's rules."""
    network.names["p0"] = [["10.0.0.1"]]
    assert await denial(target, service_url="pulsar://p0:7000", through_proxy=True, **brokers) == reason
    assert network.resolved == []


async def test_another_proxy_that_has_no_address(network: Network, denial: Denial) -> None:
    assert await denial("broker:6650", service_url="pulsar://nowhere:7000", through_proxy=True) == "unknown_host"


async def test_the_other_proxy_need_not_be_among_the_brokers_addresses(network: Network, rules: Rules) -> None:
    """It is the operator's own word; `allowed_addresses` bounds where clients' words lead."""
    network.names["p0"] = [["192.0.2.1"]]
    through = rules(service_url="pulsar://p0:7000", through_proxy=True, allowed_addresses=["10.0.0.0/8"])
    assert (await through.check_target("broker:6650")).addresses == ("192.0.2.1",)


# ---- any broker


async def test_any_broker_is_each_in_its_turn_with_the_others_behind_it(network: Network, rules: Rules) -> None:
    network.names["b0"], network.names["b1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    anywhere = rules(service_url="pulsar://b0:6650,b1:7000")
    first, second = Target(HostPort("b0", 6650), ("10.0.0.1",)), Target(HostPort("b1", 7000), ("10.0.0.2",))
    await trio.testing.wait_all_tasks_blocked()
    assert [await anywhere.targets_for_any_broker() for _ in range(3)] == [
        [first, second],
        [second, first],
        [first, second],
    ]


async def test_any_broker_is_a_healthy_one_while_there_is_one(network: Network, rules: Rules) -> None:
    network.names["b0"], network.names["b1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    hour_ms = 3_600_000
    anywhere = rules(service_url="pulsar://b0:6650,b1:6650", ejection_time_ms=hour_ms, ejection_time_max_ms=hour_ms)
    await trio.testing.wait_all_tasks_blocked()
    down = anywhere._brokers.discovery.endpoints[0]
    failures = [BrokerLinkFailed("unreachable", "down", message="") for _ in range(3)]
    for failure in failures:
        anywhere._brokers.record_failure(down, "unreachable", failure)
    assert [[target.broker.host for target in await anywhere.targets_for_any_broker()] for _ in range(3)] == [
        ["b1", "b0"]
    ] * 3


async def test_any_broker_of_many_is_one_of_a_few(network: Network, rules: Rules) -> None:
    network.names["b"] = [[f"10.0.0.{number}" for number in range(1, 41)]]
    anywhere = rules(service_url="pulsar://b:6650")
    found = await anywhere.targets_for_any_broker()
    assert len({target.addresses for target in found}) == len(found) == ANY_BROKER_MAX


async def test_any_broker_is_at_an_allowed_address(network: Network, rules: Rules) -> None:
    """Security: what DNS says of the operator's names leads nowhere where no target may be, either."""
    network.names["b0"], network.names["b1"] = [["169.254.169.254"]], [["10.0.0.2"]]
    anywhere = rules(service_url="pulsar://b0:6650,b1:6650")
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(2):
        assert await anywhere.targets_for_any_broker() == [Target(HostPort("b1", 6650), ("10.0.0.2",))]


async def test_of_a_broker_only_the_allowed_addresses_are_any_brokers(network: Network, rules: Rules) -> None:
    network.names["b0"] = [["10.0.0.1", "fe80::1"]]  # one broker, of two families
    assert await rules(service_url="pulsar://b0:6650").targets_for_any_broker() == [
        Target(HostPort("b0", 6650), ("10.0.0.1",))
    ]


@pytest.mark.parametrize(("answer", "reason"), [("169.254.169.254", "metadata"), ("224.0.0.1", "multicast")])
async def test_no_broker_is_allowed(network: Network, rules: Rules, answer: str, reason: str) -> None:
    network.names["b0"] = [[answer]]
    with pytest.raises(TargetDenied) as caught:
        await rules(service_url="pulsar://b0:6650").targets_for_any_broker()
    assert caught.value.reason == reason


async def test_no_broker_is_known(rules: Rules) -> None:
    with pytest.raises(TargetDenied, match="nowhere") as caught:
        await rules(service_url="pulsar://nowhere:6650").targets_for_any_broker()
    assert caught.value.reason == "unknown_host"


async def test_any_broker_through_another_proxy_is_that_proxy(network: Network, rules: Rules) -> None:
    network.names["p0"] = [["192.0.2.1"]]
    through = rules(service_url="pulsar://p0:7000", through_proxy=True, allowed_addresses=["10.0.0.0/8"])
    assert await through.targets_for_any_broker() == [Target(HostPort("p0", 7000), ("192.0.2.1",))]


# ---- never allowed, whatever the operator's rules are


EVERYTHING = ["*", "0.0.0.0/0", "::/0", "169.254.0.0/16", "fe80::/10", "224.0.0.0/4", "ff00::/8", "fd00:ec2::254"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("169.254.169.254", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("fd20:ce::254", "metadata"),
        ("100.100.100.200", "metadata"),
        ("168.63.129.16", "metadata"),
        ("192.0.0.192", "metadata"),
        ("169.254.0.1", "link_local"),
        ("169.254.170.2", "link_local"),
        ("fe80::1", "link_local"),
        ("fe80::1%eth0", "link_local"),
        ("febf::1", "link_local"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("ff02::1", "multicast"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("255.255.255.255", "reserved"),
        ("240.0.0.1", "reserved"),
        ("::127.0.0.1", "reserved"),
        ("64:ff9b:1::7f00:1", "reserved"),
        ("4000::1", "reserved"),
        # IPv4 within IPv6: mapped, NAT64, 6to4, Teredo
        ("::ffff:169.254.169.254", "metadata"),
        ("::ffff:a9fe:1", "link_local"),
        ("::ffff:0.0.0.0", "unspecified"),
        ("::ffff:224.0.0.1", "multicast"),
        ("64:ff9b::169.254.169.254", "metadata"),
        ("64:ff9b::255.255.255.255", "reserved"),
        ("2002:a9fe:a9fe::1", "metadata"),
        ("2002:a9fe:1::", "link_local"),
        ("2001:0:1:2:3:4:5601:5601", "metadata"),
    ],
)
async def test_addresses_that_are_never_allowed(
    network: Network, rules: Rules, denial: Denial, address: str, reason: str
) -> None:
    network.names["broker"] = [[address]]
    assert await denial("broker:6650", allowed_addresses=EVERYTHING) == reason
    if "%" not in address:
        literal = f"[{address}]" if ":" in address else address
        assert await denial(f"{literal}:6650", allowed_addresses=EVERYTHING) == reason
    network.names["broker"] = [[address, "10.0.0.1"]]
    assert (await rules(allowed_addresses=EVERYTHING).check_target("broker:6650")).addresses == ("10.0.0.1",)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "192.168.1.1", "203.0.113.1", "8.8.8.8", "169.253.255.255", "223.255.255.255", "100.100.100.201",
     "fd00::1", "2001:db8::1", "2a00::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::"],
)  # fmt: skip
async def test_addresses_that_are_like_any_other(network: Network, rules: Rules, address: str) -> None:
    network.names["broker"] = [[address]]
    assert (await rules(allowed_hosts=["broker"]).check_target("broker:6650")).addresses == (address,)


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1%eth0", "fd00::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("64:ff9b::10.0.0.1", "10.0.0.1"),
        ("2002:a00:1::7", "10.0.0.1"),
        ("2001:0:c000:201:0:0:f5ff:fffe", "10.0.0.1"),
    ],
)
def test_the_effective_address_is_the_one_embedded_in_an_ipv6_address(text: str, reached: str) -> None:
    assert str(effective_address(text)) == reached
    assert forbidden_reason(effective_address(text)) is None


@pytest.mark.parametrize("address", ["::ffff:10.0.0.1", "64:ff9b::10.0.0.1"])
async def test_ipv4_within_ipv6_is_held_against_the_networks_as_ipv4(
    network: Network, rules: Rules, denial: Denial, address: str
) -> None:
    assert (await rules(allowed_addresses=["10.0.0.0/8"]).check_target(f"[{address}]:6650")).addresses
    assert await denial(f"[{address}]:6650", allowed_addresses=["::/0"]) == "address"


@pytest.mark.parametrize("address", ["2002:a00:1::7", "2001:0:c000:201:0:0:f5ff:fffe"])
async def test_of_a_tunnel_both_ends_must_be_allowed(rules: Rules, denial: Denial, address: str) -> None:
    """Security: who announces a route to 2002::/16 or 2001::/32 answers for 10.0.0.1 there."""
    assert await denial(f"[{address}]:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    assert await denial(f"[{address}]:6650", allowed_addresses=["::/0"]) == "address"
    assert await denial(f"[{address}]:6650", service_url="pulsar://10.0.0.1") == "host"
    both = rules(allowed_addresses=["10.0.0.0/8", "2002::/16", "2001::/32"])
    assert (await both.check_target(f"[{address}]:6650")).addresses == (str(ipaddress.ip_address(address)),)


# ---- loopback


LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::"]


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize("allowed", [["*"], ["*", "0.0.0.0/0", "::/0"], ["0.0.0.0/0", "::/0"]])
async def test_this_machine_is_not_allowed_where_no_broker_is_on_it(
    network: Network, denial: Denial, address: str, allowed: list[str]
) -> None:
    network.names["broker"] = [[address]]
    assert await denial("broker:6650", allowed_addresses=allowed) == "loopback"
    literal = f"[{address}]" if ":" in address else address
    assert await denial(f"{literal}:6650", allowed_addresses=allowed) == "loopback"


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize("service_url", ["pulsar://localhost", "pulsar://10.0.0.1,localhost", "pulsar://[::1]"])
async def test_this_machine_is_allowed_where_a_broker_is_on_it(
    network: Network, rules: Rules, address: str, service_url: str
) -> None:
    network.names["localhost"] = [["127.0.0.1"]]
    network.names["broker"] = [[address]]
    checked = rules(service_url=service_url, allowed_hosts=["broker"])
    assert (await checked.check_target("broker:6650")).addresses == (address,)


async def test_a_broker_on_this_machine_does_not_outweigh_the_operators_networks(
    network: Network, denial: Denial
) -> None:
    where = {"service_url": "pulsar://127.0.0.1", "allowed_addresses": ["10.0.0.0/8"]}
    assert await denial("127.0.0.2:6650", **where) == "address"


@pytest.mark.parametrize(
    ("allowed", "address", "good"),
    [
        (["127.0.0.0/8"], "127.0.0.1", True),
        (["*", "127.0.0.1"], "127.0.0.1", True),
        (["*", "127.0.0.1"], "::ffff:127.0.0.1", True),
        (["*", "::1"], "::1", True),
        (["*", "127.0.0.1"], "127.0.0.2", False),
        (["*", "127.0.0.1"], "::1", False),
        (["126.0.0.0/7"], "127.0.0.1", False),
    ],
)
async def test_this_machine_is_allowed_where_the_operator_names_it(
    rules: Rules, denial: Denial, allowed: list[str], address: str, *, good: bool
) -> None:
    target = f"[{address}]:6650" if ":" in address else f"{address}:6650"
    if good:
        assert len((await rules(allowed_addresses=allowed).check_target(target)).addresses) == 1
    else:
        assert await denial(target, allowed_addresses=allowed) == "loopback"


async def test_whether_brokers_are_on_this_machine_is_known_once_they_are_found(
    network: Network, rules: Rules, autojump_clock: trio.testing.MockClock
) -> None:
    """At the start a relay may come before the first answer of DNS."""
    network.names["localhost"] = [["127.0.0.1"]]
    late = rules(service_url="pulsar://10.0.0.1,localhost", search=False)
    done, found = trio.Event(), list[Target]()

    async def check() -> None:
        found.append(await late.check_target("127.0.0.1:6650"))
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(check)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        nursery.start_soon(late._brokers.discovery.run)
        await done.wait()
        nursery.cancel_scope.cancel()
    assert found == [Target(HostPort("localhost", 6650), ("127.0.0.1",))]


async def test_where_several_addresses_are_refused_the_first_reason_is_told(network: Network, denial: Denial) -> None:
    network.names["broker"] = [["192.0.2.1", "127.0.0.1"]]
    assert await denial("broker:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    network.names["broker"] = [["127.0.0.1", "169.254.1.1"]]
    assert await denial("broker:6650", allowed_hosts=["broker"]) == "loopback"


# ---- a target without a port


@pytest.mark.parametrize("text", ["broker", "10.0.0.1", "[fd00::1]"])
async def test_a_target_without_a_port_is_told_so(network: Network, rules: Rules, text: str) -> None:
    with pytest.raises(TargetDenied, match="has no port: a target is host:port") as caught:
        await rules().check_target(text)
    assert caught.value.reason == "no_port"
    assert network.resolved == []


# ---- again each time


async def test_each_target_is_checked_by_what_its_name_resolves_to_now(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, denial: Denial, autojump_clock: trio.testing.MockClock
) -> None:
    names = Names(monkeypatch)
    names.server.add("broker", "A", "10.0.0.1", ttl=1)
    checked = rules(allowed_hosts=["broker"])
    assert (await checked.check_target("broker:6650")).addresses == ("10.0.0.1",)
    names.server.add("broker", "A", "169.254.169.254", ttl=1)
    await trio.sleep(1.1)
    with pytest.raises(TargetDenied):
        await checked.check_target("broker:6650")


async def test_without_a_port_list_further_targets_have_pulsars_ports(rules: Rules, denial: Denial) -> None:
    further = {"allowed_ports": [], "port_pairs": [], "allowed_addresses": ["10.0.0.1"]}
    for port in (6650, 6651):
        assert (await rules(**further).check_target(f"10.0.0.1:{port}")).broker.port == port
    assert await denial("10.0.0.1:6652", **further) == "port"


# ---- the other port of a broker: with TLS where service_url has none, or the reverse

PLAIN = {"service_url": "pulsar://b0"}
TLS = {"service_url": "pulsar+ssl://b0"}
FURTHER = {"allowed_hosts": ["b1"]}
PAIRS = {"port_pairs": [[7650, 7651], [8650, 8651]]}
SAID = ("pulsar://b0:6650", "pulsar+ssl://b0:9651")
SAID_TLS = ("pulsar+ssl://b0:6651", "pulsar://b0:9650")


async def dialled(rules: Rules, network: Network, target: str, said: tuple[str, str] | None, brokers: Any) -> str:
    """Where a target leads, or the reason of its denial, once a broker has said two URLs."""
    network.names["b0"], network.names["b1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    checked = rules(**brokers)
    if said is not None:
        checked._brokers.port_pairs.learn_urls(*said)
    try:
        return str((await checked.check_target(target)).broker)
    except TargetDenied as denied:
        return denied.reason


@pytest.mark.parametrize(
    ("target", "said", "brokers", "expected"),
    [
        # Pulsar's own ports need no setting
        ("b0:6651", None, PLAIN, "b0:6650"),
        ("b0:6650", None, TLS, "b0:6651"),
        ("b0:6650", None, PLAIN, "b0:6650"),
        ("b0:6651", None, TLS, "b0:6651"),
        ("b1:6651", None, PLAIN | FURTHER, "b1:6650"),
        ("b1:6650", None, TLS | FURTHER, "b1:6651"),
        ("b0:6650", None, TLS | {"allowed_ports": [6650]}, "b0:6651"),
        ("b0:6651", None, PLAIN | {"port_pairs": []}, "port"),
        ("b0:6650", None, {"service_url": "pulsar+ssl://b0:443"}, "port"),
        ("b1:6650", None, {"service_url": "pulsar+ssl://b0:443", **FURTHER}, "b1:6651"),
        ("b1:6651", None, {"service_url": "pulsar://b0:7650", "allowed_ports": [6651], **FURTHER}, "b1:6651"),
        # configured
        ("b0:7651", None, PAIRS | {"service_url": "pulsar://b0:7650"}, "b0:7650"),
        ("b0:7650", None, PAIRS | {"service_url": "pulsar+ssl://b0:7651"}, "b0:7651"),
        ("b0:8651", None, PAIRS | {"service_url": "pulsar://b0:7650,b0:8650"}, "b0:8650"),
        ("b0:7651", None, PAIRS | {"service_url": "pulsar://b0:7650,b0:8650"}, "b0:7650"),
        ("b0:8651", None, PAIRS | {"service_url": "pulsar://b0:7650"}, "port"),
        ("b0:9651", None, PAIRS | {"service_url": "pulsar://b0:7650"}, "port"),
        # a port of service_url is of its kind, whatever the pairs are
        ("b0:6651", None, {"service_url": "pulsar://b0:6650,b0:6651"}, "b0:6651"),
        ("b0:6651", ("pulsar://b0:6650", "pulsar+ssl://b0:6651"), {"service_url": "pulsar://b0:6650,b0:6651"},
         "b0:6651"),
        # learned
        ("b0:9651", SAID, PLAIN, "b0:6650"),
        ("b0:9650", SAID_TLS, TLS, "b0:6651"),
        ("B0:9651", SAID, PLAIN, "B0:6650"),
        ("b0:9651", SAID, PLAIN | {"allowed_ports": [9651]}, "b0:6650"),
        ("b1:6651", ("pulsar://b1:6651", ""), PLAIN | FURTHER, "b1:6651"),
        ("b0:6651", ("pulsar://b0:7650", "pulsar+ssl://b0:6651"), {"service_url": "pulsar://b0:6650,b0:7650"},
         "b0:7650"),
        # hostile or mistaken: another port, another host, no broker's port, a forbidden host, the wrong kind
        ("b0:22", SAID, PLAIN, "port"),
        ("b1:9651", SAID, PLAIN | FURTHER, "port"),
        ("b0:9651", ("pulsar://b1:6650", "pulsar+ssl://b0:9651"), PLAIN | FURTHER, "port"),
        ("b0:9651", ("pulsar://b0:22", "pulsar+ssl://b0:9651"), PLAIN | FURTHER, "port"),
        ("b0:22", ("pulsar://b0:22", ""), PLAIN | FURTHER, "port"),
        ("b1:9651", ("pulsar://b1:6650", "pulsar+ssl://b1:9651"), PLAIN, "host"),
        ("b0:9651", ("pulsar+ssl://b0:6650", "pulsar://b0:9651"), PLAIN, "port"),
        ("b0:9651", ("pulsar://b0:6650", "pulsar://b0:9651"), PLAIN, "port"),
    ],
)  # fmt: skip
async def test_the_other_port_of_a_broker_is_dialled_at_the_one_of_service_urls_kind(  # noqa: PLR0917 -- one case
    network: Network, rules: Rules, target: str, said: tuple[str, str] | None, brokers: dict[str, Any], expected: str
) -> None:
    assert await dialled(rules, network, target, said, brokers) == expected


async def test_the_name_of_a_target_is_resolved_for_the_owner_of_its_client(rules: Rules) -> None:
    owners = []

    class Asked:
        async def resolve_addresses(self, _host: str, *, owner: str = "") -> Addresses:
            owners.append(owner)
            return Addresses(("10.0.0.1",), 0.0)

    checked = rules(service_url="pulsar://b0")
    checked._resolver = Asked()
    for port in (6650, 6651):
        await checked.check_target(f"b0:{port}", "alice")
    assert owners == ["alice", "alice"]


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254"])
async def test_addresses_are_held_against_the_rules_at_the_port_that_is_dialled(
    network: Network, rules: Rules, address: str
) -> None:
    """Security: a known pair allows nothing."""
    network.names["b1"] = [[address]]
    for port in (6650, 6651):
        with pytest.raises(TargetDenied) as caught:
            await rules(service_url="pulsar://10.0.0.1", **FURTHER).check_target(f"b1:{port}")
        assert caught.value.reason == ("loopback" if address == "127.0.0.1" else "metadata")


async def test_of_two_brokers_at_one_address_the_other_port_leads_to_the_right_one(
    network: Network, rules: Rules
) -> None:
    """By their address, too: each under the operator's own name for it."""
    network.names["one"] = network.names["two"] = [["10.0.0.1"]]
    checked = rules(service_url="pulsar+ssl://one:7651,two:8651", **PAIRS)
    await trio.testing.wait_all_tasks_blocked()
    assert (await checked.check_target("10.0.0.1:7650")).broker == HostPort("one", 7651)
    assert (await checked.check_target("10.0.0.1:8650")).broker == HostPort("two", 8651)


async def test_the_other_port_of_brokers_of_srv_records(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, autojump_clock: trio.testing.MockClock
) -> None:
    """Their ports are known once DNS has answered."""
    names = Names(monkeypatch)
    names.server.add("_pulsar-ssl._tcp.brokers", "SRV", "0 1 6651 b0.example.")
    names.server.add("b0.example", "A", "10.0.0.1")
    names.server.delay_s = lambda *_: 1
    target = await rules(service_url="pulsar+ssl+srv://brokers").check_target("b0.example:6650")
    assert target == Target(HostPort("b0.example", 6651), ("10.0.0.1",))


async def test_another_proxy_gets_the_clients_own_words(network: Network, rules: Rules, denial: Denial) -> None:
    """It knows its brokers' ports itself, and this one's `service_url` says nothing of them."""
    network.names["p0"] = [["10.0.0.1"]]
    through = {"service_url": "pulsar://p0:7000", "through_proxy": True, "port_pairs": [[6650, 9651]]}
    assert (await rules(**through).check_target("broker:6651")).broker == HostPort("p0", 7000)
    assert await denial("broker:9651", **through) == "port"


async def test_a_denied_port_names_the_setting(network: Network, rules: Rules) -> None:
    network.names["b0"] = [["10.0.0.1"]]
    with pytest.raises(TargetDenied, match=r"^b0:9651: .* nor paired with such a port in brokers\.port_pairs"):
        await rules(service_url="pulsar://b0").check_target("b0:9651")


async def test_a_configured_broker_is_not_reached_at_the_ports_of_further_targets(
    network: Network, denial: Denial
) -> None:
    """Security: at any other port of its machine anything may listen."""
    network.names["broker"] = [["10.0.0.1"]]
    brokers = {"service_url": "pulsar://broker:6660", "allowed_hosts": ["*.other.example"]}
    for target in ("10.0.0.1:6650", "10.0.0.1:6651", "broker:6651"):
        assert await denial(target, **brokers) == "port"


async def test_where_only_addresses_are_allowed_a_configured_broker_keeps_its_name(
    network: Network, rules: Rules
) -> None:
    """Security: it is the name that its certificate is compared with."""
    network.names["broker"] = [["10.0.0.1"]]
    checked = rules(service_url="pulsar://broker:6650", allowed_addresses=["10.0.0.0/8"])
    assert await checked.check_target("10.0.0.1:6650") == Target(HostPort("broker", 6650), ("10.0.0.1",))


# ---- names in clients' TLS


async def test_a_name_in_tls_must_be_a_brokers_itself(network: Network, rules: Rules) -> None:
    """Security: the name goes on to the address, which strangers' machines may share."""
    network.names.update({"b0.pulsar.example": [["10.0.0.1"]], "stranger.example": [["10.0.0.1"]]})
    network.names["b1.pulsar.example"] = [["10.0.0.2"]]
    url = "pulsar+ssl://b0.pulsar.example:6651,b1.pulsar.example:7651"
    named = rules(service_url=url)
    await trio.testing.wait_all_tasks_blocked()
    assert str((await named.check_target("stranger.example:6651")).broker) == "b0.pulsar.example:6651"
    for name in ("stranger.example", "elsewhere.example"):
        with pytest.raises(TargetDenied):
            await named.check_server_name(name)


@pytest.mark.parametrize(("url", "record"), [("pulsar+ssl+srv", "_pulsar-ssl"), ("pulsar+srv", "_pulsar")])
async def test_names_in_tls_of_brokers_of_srv_records(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, autojump_clock: trio.testing.MockClock, url: str, record: str
) -> None:
    """They and their ports are known once DNS has answered; the port is of the URL's kind, which forwarders pair."""
    names = Names(monkeypatch)
    names.server.add(f"{record}._tcp.brokers", "SRV", "0 1 7651 b0.example.", "0 1 8651 b1.example.")
    for number in range(3):
        names.server.add(f"b{number}.example", "A", f"10.0.0.{number}")
    names.server.delay_s = lambda *_: 1
    named = rules(service_url=f"{url}://brokers")
    assert await named.check_server_name("b0.example") == Target(HostPort("b0.example", 7651), ("10.0.0.0",))
    assert await named.check_server_name("b1.example") == Target(HostPort("b1.example", 8651), ("10.0.0.1",))
    with pytest.raises(TargetDenied):
        await named.check_server_name("b2.example")


async def test_no_name_in_tls_is_a_brokers_while_srv_records_are_missing(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, autojump_clock: trio.testing.MockClock
) -> None:
    Names(monkeypatch).server.add("b0.example", "A", "10.0.0.1")
    with pytest.raises(TargetDenied) as denied:
        await rules(service_url="pulsar+ssl+srv://brokers").check_server_name("b0.example")
    assert denied.value.reason == "unknown_host"


async def test_the_port_for_a_name_in_tls_is_the_operators(network: Network, rules: Rules) -> None:
    network.names.update({"b0.pulsar.example": [["10.0.0.1"]], "b1.pulsar.example": [["10.0.0.2"]]})
    network.names["b2.b0.pulsar.example"] = [["10.0.0.3"]]
    url = "pulsar+ssl://b0.pulsar.example:6651,b1.pulsar.example:7651"
    named = rules(service_url=url, allowed_hosts=["*.b0.pulsar.example"])
    await trio.testing.wait_all_tasks_blocked()
    for name, port in (("b0.pulsar.example", 6651), ("b1.pulsar.example", 7651), ("b2.b0.pulsar.example", 6651)):
        assert (await named.check_server_name(name)).broker.port == port
