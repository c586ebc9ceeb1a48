"""lookup.targets: a client is only relayed to where the operator's rules allow, at the addresses that were checked."""

from typing import Any

import pytest
import trio
from lookup_fakes import Network, make_config

from lookup.targets import Target, TargetDenied, TargetRules
from proto.addresses import HostPort


def rules(**brokers: Any) -> TargetRules:
    return TargetRules(make_config(brokers=brokers).brokers)


async def denial(text: str, **brokers: Any) -> str:
    with pytest.raises(TargetDenied) as caught:
        await rules(**brokers).check(text)
    return caught.value.reason


async def test_by_default_pulsars_own_ports_are_allowed(network: Network) -> None:
    network.names["broker"] = [["10.0.0.1"]]
    assert await rules().check("broker:6650") == Target(HostPort("broker", 6650), ("10.0.0.1",))
    assert (await rules().check("broker:6651")).broker.port == 6651
    assert await denial("broker:22") == "port"


async def test_port_is_checked_before_anything_is_resolved(network: Network) -> None:
    assert await denial("broker:8080", allowed_ports=[6650]) == "port"
    assert network.resolved == []


async def test_another_port_list(network: Network) -> None:
    assert (await rules(allowed_ports=[7000]).check("10.0.0.1:7000")).addresses == ("10.0.0.1",)
    assert await denial("10.0.0.1:6650", allowed_ports=[7000]) == "port"


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
    network: Network, pattern: str, host: str, allowed: bool
) -> None:
    network.names[host] = [["10.0.0.1"]]
    if allowed:
        assert (await rules(allowed_hosts=[pattern]).check(f"{host}:6650")).broker.host == host
    else:
        assert await denial(f"{host}:6650", allowed_hosts=[pattern]) == "host"
        assert network.resolved == []


async def test_one_of_several_patterns_is_enough(network: Network) -> None:
    network.names["b"] = [["10.0.0.1"]]
    assert (await rules(allowed_hosts=["a", "b"]).check("b:6650")).addresses == ("10.0.0.1",)


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
        ("fe80::/10", "fe80::1%eth0", True),
        # ::ffff:a.b.c.d reaches a.b.c.d.
        ("10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("10.0.0.0/8", "::ffff:127.0.0.1", False),
        ("::/0", "::ffff:127.0.0.1", False),
    ],
)
async def test_resolved_addresses_are_held_against_the_networks(
    network: Network, network_text: str, address: str, allowed: bool
) -> None:
    network.names["broker"] = [[address]]
    if allowed:
        assert (await rules(allowed_addresses=[network_text]).check("broker:6650")).addresses == (address,)
    else:
        assert await denial("broker:6650", allowed_addresses=[network_text]) == "address"


async def test_an_address_as_target_is_held_against_the_networks_too(network: Network) -> None:
    assert await denial("127.0.0.1:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    assert await denial("[::ffff:127.0.0.1]:6650", allowed_addresses=["10.0.0.0/8"]) == "address"
    assert (await rules(allowed_addresses=["fd00::/8"]).check("[fd00::1]:6650")).addresses == ("fd00::1",)
    assert network.resolved == []


@pytest.mark.parametrize("text", ["127.1:6650", "2130706433:6650", "0x7f000001:6650", "0177.0.0.1:6650"])
async def test_odd_spellings_of_an_address_are_judged_by_what_they_resolve_to(network: Network, text: str) -> None:
    network.names[text.partition(":")[0]] = [["127.0.0.1"]]
    assert await denial(text, allowed_addresses=["10.0.0.0/8"]) == "address"


async def test_of_several_addresses_only_the_allowed_ones_may_be_dialled(network: Network) -> None:
    network.names["broker"] = [["127.0.0.1", "10.0.0.1", "::1", "10.0.0.2", "10.0.0.1"]]
    target = await rules(allowed_addresses=["10.0.0.0/8"]).check("broker:6650")
    assert target.addresses == ("10.0.0.1", "10.0.0.2")


async def test_rebinding_the_addresses_given_are_those_that_were_checked(network: Network) -> None:
    network.names["broker"] = [["10.0.0.1"], ["127.0.0.1"]]
    target = await rules(allowed_addresses=["10.0.0.0/8"]).check("broker:6650")
    assert target.addresses == ("10.0.0.1",)
    assert network.resolved == ["broker"], "a second look at the name server is the window that rebinding needs"


@pytest.mark.parametrize(
    "text",
    ["", "broker", "broker:", "broker:0", "broker:65536", "broker:x", ":6650", "pulsar://broker:6650", "a b:6650",
     "[::1:6650", "[broker]:6650", "broker:6650:6651", "bröker:6650", "x" * 300 + ":6650", "broker:-1", "broker:٦٦٥٠"],
)  # fmt: skip
async def test_malformed(network: Network, text: str) -> None:
    assert await denial(text) == "malformed"
    assert network.resolved == []


async def test_unknown_host(network: Network) -> None:
    assert await denial("nowhere:6650") == "unknown_host"


async def test_a_name_without_an_address_is_denied(network: Network) -> None:
    network.names["broker"] = [[]]
    assert await denial("broker:6650", allowed_addresses=["10.0.0.0/8"]) == "address"


async def test_a_resolver_that_does_not_answer(
    network: Network, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        await trio.sleep_forever()

    monkeypatch.setattr("proxy.runtime.resolve.getaddrinfo", never)
    assert await denial("broker:6650", connect_timeout_ms=2000) == "unknown_host"
    assert trio.current_time() == pytest.approx(2)


async def test_the_text_is_for_the_log_and_says_what_to_change(network: Network) -> None:
    network.names["broker"] = [["192.0.2.1"]]
    with pytest.raises(TargetDenied, match=r"broker:6650 is at 192.0.2.1, outside brokers.allowed_addresses"):
        await rules(allowed_addresses=["10.0.0.0/8"]).check("broker:6650")


# ---- through another proxy


async def test_through_another_proxy_every_relay_goes_there(network: Network) -> None:
    network.names["p0"], network.names["p1"] = [["10.0.0.1"]], [["10.0.0.2"]]
    through = rules(service_url="pulsar://p0:7000,p1", through_proxy=True)
    found = [await through.check("broker:6650") for _ in range(3)]
    first, second = Target(HostPort("p0", 7000), ("10.0.0.1",)), Target(HostPort("p1", 6650), ("10.0.0.2",))
    assert found == [first, second, first], "each in its turn"
    assert "broker" not in network.resolved, "what its name leads to is for the other proxy to see"


@pytest.mark.parametrize(
    ("target", "brokers", "reason"),
    [
        ("broker:22", {}, "port"),
        ("broker:7000", {}, "port"),
        ("evil:6650", {"allowed_hosts": ["broker*"]}, "host"),
        ("broker", {}, "malformed"),
    ],
)
async def test_another_proxy_is_only_asked_for_what_is_allowed(
    network: Network, target: str, brokers: dict[str, Any], reason: str
) -> None:
    """Security: the client's words decide where the other proxy goes, within this one's rules."""
    network.names["p0"] = [["10.0.0.1"]]
    assert await denial(target, service_url="pulsar://p0:7000", through_proxy=True, **brokers) == reason
    assert network.resolved == []


async def test_another_proxy_that_has_no_address(network: Network) -> None:
    assert await denial("broker:6650", service_url="pulsar://nowhere:7000", through_proxy=True) == "unknown_host"


async def test_the_other_proxy_need_not_be_among_the_brokers_addresses(network: Network) -> None:
    """It is the operator's own word; `allowed_addresses` bounds where clients' words lead."""
    network.names["p0"] = [["192.0.2.1"]]
    through = rules(service_url="pulsar://p0:7000", through_proxy=True, allowed_addresses=["10.0.0.0/8"])
    assert (await through.check("broker:6650")).addresses == ("192.0.2.1",)
