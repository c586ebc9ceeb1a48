"""Brokers of apache/pulsar-helm-chart: what is derived from the name of a release, and where relays go then."""

import subprocess
from typing import Any

import msgspec
import pytest
import trio
from fake_dns import Names
from local import go_tools
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.metrics import BrokerMetrics
from lookup.targets.rules import TargetRules
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer
from tests.deploy.chart import CHART, NAMESPACE, Refused, needs_tools, render

pytestmark = needs_tools

ZONE = f"{NAMESPACE}.svc.cluster.local"


def brokers(**values: Any) -> dict[str, Any]:
    """The table `[brokers]` of proxy.toml."""
    table = render(**values).configuration["brokers"]
    assert isinstance(table, dict)
    return table


def derived(service: str, zone: str = ZONE, scheme: str = "pulsar", port: int = 6650) -> dict[str, Any]:
    """What is derived for the brokers behind a Service."""
    return {
        "service_url": f"{scheme}://{service}.{zone}:{port}",
        "allowed_hosts": [f"{service}-*.{service}-headless.{zone}"],
    }


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, derived("pulsar-broker")),
        ({"brokers": {"pulsarRelease": "pulsar"}}, derived("pulsar-broker")),
        # That chart's fullname: `-pulsar` is added where the name does not contain it.
        ({"brokers": {"pulsarRelease": "prod"}}, derived("prod-pulsar-broker")),
        ({"brokers": {"pulsarRelease": "my-pulsar-1"}}, derived("my-pulsar-1-broker")),
        ({"auth": {"pulsarRelease": "prod"}}, derived("prod-pulsar-broker")),
        (
            {"auth": {"pulsarRelease": "a", "token": {"enabled": True}}, "brokers": {"pulsarRelease": "b"}},
            derived("b-pulsar-broker"),
        ),
        ({"brokers": {"tls": True}}, derived("pulsar-broker", scheme="pulsar+ssl", port=6651)),
        ({"brokers": {"namespace": "other"}}, derived("pulsar-broker", "other.svc.cluster.local")),
        ({"clusterDomain": "example.org"}, derived("pulsar-broker", f"{NAMESPACE}.svc.example.org")),
    ],
)
def test_url_and_targets_follow_from_the_release(values: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert brokers(**values) == wanted


def test_the_configuration_takes_precedence() -> None:
    url = {"service_url": "pulsar://b.example.org:6650"}
    assert brokers(config={"brokers": url}) == url
    hosts = {"allowed_hosts": ["*.brokers.example.org"]}
    assert brokers(config={"brokers": hosts}) == {**derived("pulsar-broker"), **hosts}
    # A target must be in both lists: a derived one beside it would forbid the addresses that these brokers advertise.
    addresses = {"allowed_addresses": ["10.244.0.0/16"]}
    only = {"service_url": derived("pulsar-broker")["service_url"], **addresses}
    assert brokers(config={"brokers": addresses}) == only


@pytest.mark.parametrize("key", ["tls", "namespace"])
def test_a_broker_value_without_effect_beside_a_service_url_is_refused(key: str) -> None:
    value: Any = {"tls": True, "namespace": "other"}[key]
    with pytest.raises(Refused, match=rf"brokers\.{key}: config\.brokers\.service_url says"):
        render(brokers={key: value}, config={"brokers": {"service_url": "pulsar://b.example.org:6650"}})


def test_each_of_both_names_stands_for_secrets_too() -> None:
    auth = {"token": {"enabled": True}, "proxyToken": {"enabled": True}}

    def secrets(**values: Any) -> set[str]:
        volumes = render(**values).pod["spec"]["volumes"]
        return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}

    wanted = {"prod-token-asymmetric-key", "prod-token-proxy-admin"}
    assert secrets(auth=auth, brokers={"pulsarRelease": "prod"}) == wanted
    assert secrets(auth={**auth, "pulsarRelease": "prod"}, brokers={"pulsarRelease": "other"}) == wanted


async def test_relays_go_to_pods_of_these_brokers_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's own rules, with the rendered table."""
    names = Names(monkeypatch)
    table = brokers(brokers={"pulsarRelease": "prod"})
    names.server.add(f"prod-pulsar-broker.{ZONE}", "A", "10.96.0.7")
    pod = f"prod-pulsar-broker-0.prod-pulsar-broker-headless.{ZONE}"
    strangers = (
        "prod-pulsar-broker-0.prod-pulsar-broker-headless.other.svc.cluster.local",
        f"prod-pulsar-zookeeper-0.prod-pulsar-zookeeper-headless.{ZONE}",
        f"evil.prod-pulsar-broker-headless.{ZONE}",
        f"prod-pulsar-broker-0.prod-pulsar-broker-headless.{ZONE}.evil.example.org",
        f"prod-pulsar-broker-headless.{ZONE}",
    )
    for host in (pod, *strangers):
        names.server.add(host, "A", "10.244.0.9")
    async with trio.open_nursery() as nursery:
        config = msgspec.convert({"brokers": table}, Config)

        def resolver(*, own: bool) -> Resolver:
            return Resolver(nursery, timeout_s=5, ttl_max_s=300)

        metrics = BrokerMetrics(CollectorRegistry())
        directory = BrokerDirectory(config, Dialer(config.brokers), resolver(own=True), metrics, DirectoryOptions(None))
        nursery.start_soon(directory.discovery.run)
        rules = TargetRules(config.brokers, resolver(own=False), directory)
        target = await rules.check_target(f"{pod}:6650")
        assert (str(target.broker), target.addresses) == (f"{pod}:6650", ("10.244.0.9",))
        for host in strangers:
            with pytest.raises(TargetDenied) as denied:
                await rules.check_target(f"{host}:6650")
            assert denied.value.reason == "host", host
        with pytest.raises(TargetDenied) as denied:
            await rules.check_target(f"{pod}:8080")
        assert denied.value.reason == "port"
        nursery.cancel_scope.cancel()


def notes(*options: str) -> str:
    """What `helm install` prints."""
    command = [go_tools.tool("helm"), "install", "r", CHART, "--dry-run=client", "--namespace", NAMESPACE, *options]
    result = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return result.stdout.partition("\nNOTES:\n")[2]


THESE = "Relays go to these brokers (their hosts, names below them, their addresses)"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("", f"{THESE}, and to hosts named pulsar-broker-*.pulsar-broker-headless.{ZONE}.\n"),
        ("config.brokers.allowed_addresses={10.0.0.0/8}", f"{THESE}, and to hosts in 10.0.0.0/8.\n"),
        (
            "config.brokers.allowed_addresses={10.0.0.0/8},config.brokers.allowed_hosts={*.b.example.org}",
            f"{THESE}, and to hosts named *.b.example.org in 10.0.0.0/8.\n",
        ),
        ("config.brokers.allowed_ports={16650}", ", also at the ports 16650.\n"),
        ("config.brokers.through_proxy=true", "another proxy's, to which all relays go"),
    ],
)
def test_the_notes_say_where_relays_go_and_what_widens_that(options: str, wanted: str) -> None:
    text = notes("--set", options)
    assert f"\n\nBrokers: pulsar://pulsar-broker.{ZONE}:6650\n" in text
    assert wanted in text
    assert ("config.brokers.allowed_hosts (patterns of names)" in text) == ("through_proxy" not in options)
