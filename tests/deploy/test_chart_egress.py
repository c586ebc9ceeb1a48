"""Where the proxy's pods may connect to: DNS, and what the configuration names."""

from typing import Any

import pytest

from proto.addresses import parse_broker_url
from tests.deploy.chart import NAME, Manifests, deep_merge, needs_tools, render

pytestmark = needs_tools

DNS = {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)}
BROKER_PODS = {"podSelector": {"matchLabels": {"component": "broker"}}}
ANYWHERE = None
"""A rule without peers."""


def brokers(**table: Any) -> dict[str, Any]:
    return {"config": {"brokers": table}}


def rules(**values: Any) -> list[Any]:
    spec = render(**values).get("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return list(spec["egress"])


def ports(rule: Any) -> set[tuple[str, int]]:
    return {(one["protocol"], one["port"]) for one in rule["ports"]}


def broker_rule(**values: Any) -> tuple[set[int], Any]:
    """The ports of the rule for brokers, and its peers."""
    dns, rule, *_ = rules(**values)
    assert (ports(dns), dns.get("to")) == (DNS, ANYWHERE)
    assert {protocol for protocol, _ in ports(rule)} == {"TCP"}
    return {port for _, port in ports(rule)}, rule.get("to", ANYWHERE)


def test_as_installed_pods_reach_dns_and_the_releases_brokers_alone() -> None:
    assert len(rules()) == 2
    assert broker_rule() == ({6650, 6651}, [BROKER_PODS])


def test_brokers_of_another_namespace_are_reached_there() -> None:
    namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "pulsar"}}}
    assert broker_rule(brokers={"namespace": "pulsar", "tls": True})[1] == [{**BROKER_PODS, **namespace}]


@pytest.mark.parametrize(
    "url",
    [
        "pulsar://b.example.org",
        "pulsar+ssl://b.example.org",
        "pulsar://a.example.org:7000,b.example.org:7001",
        "pulsar://[2001:db8::1]:7000,[2001:db8::2]",
        "pulsar+ssl://10.1.2.3:443/",
    ],
)
def test_the_ports_of_the_service_url_are_open_to_any_address(url: str) -> None:
    own = {one.port for one in parse_broker_url(url).hosts}
    assert broker_rule(**brokers(service_url=url, port_pairs=[])) == (own, ANYWHERE)


URL = {"service_url": "pulsar://b.example.org:7000"}


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (URL, {7000, 6650, 6651}),
        ({**URL, "port_pairs": [[7000, 7443], [7001, 7444]]}, {7000, 7443, 7001, 7444}),
        ({**URL, "port_pairs": [], "allowed_ports": [8000]}, {7000, 8000}),
        ({**URL, "port_pairs": [], "allowed_hosts": ["*.example.org"]}, {7000, 6650, 6651}),
        ({**URL, "port_pairs": [], "allowed_hosts": ["*.example.org"], "allowed_ports": [8000]}, {7000, 8000}),
        # Relays go to the other proxy, too.
        ({**URL, "through_proxy": True, "allowed_ports": [8000]}, {7000}),
    ],
)
def test_the_ports_of_targets_are_open(table: dict[str, Any], wanted: set[int]) -> None:
    assert broker_rule(**brokers(**table)) == (wanted, ANYWHERE)


def test_brokers_of_srv_records_are_reached_at_any_port() -> None:
    rule = rules(**brokers(service_url="pulsar+srv://b.example.org"))[1]
    assert rule == {"ports": [{"port": 1, "endPort": 65535, "protocol": "TCP"}]}


def test_further_targets_of_a_release_are_reached_by_network_or_anywhere() -> None:
    # Some network plugins know pods by their labels alone, though an address is in the network.
    networks = [{"ipBlock": {"cidr": one}} for one in ("10.0.0.0/8", "192.0.2.1/32", "2001:db8::1/128")]
    addresses = {"allowed_addresses": ["10.0.0.0/8", "192.0.2.1", "2001:db8::1"]}
    assert broker_rule(**brokers(**addresses))[1] == [{"namespaceSelector": {}}, *networks]
    assert broker_rule(**brokers(**addresses, allowed_hosts=["*.x"]))[1] == [{"namespaceSelector": {}}, *networks]
    assert broker_rule(**brokers(allowed_hosts=["*.example.org"]))[1] is ANYWHERE


def oidc(*issuers: str, enabled: bool = True) -> dict[str, Any]:
    table = {"allowed_issuers": list(issuers), "allowed_audiences": ["a"]}
    return {"config": {"authentication": {"enabled": enabled, "oidc": table}}}


def kubernetes(**table: Any) -> dict[str, Any]:
    oidc_table = {"allowed_audiences": ["a"], "kubernetes": table}
    return {"config": {"authentication": {"enabled": True, "oidc": oidc_table}}}


OAUTH2 = brokers(credentials={"method": "oauth2", "file": "/x", "issuer_url": "https://issuer.example.org:9443"})
SASL = brokers(credentials={"method": "sasl", "file": "/x", "principal": "proxy/a@R"})
HTTP_PROXY = {
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://user:pass@proxy.example.org:3128/"},
        {"name": "NO_PROXY", "value": "x:1"},
        {"name": "http_proxy", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (oidc("https://a.example.org"), {("TCP", 443)}),
        (oidc("https://a.example.org:8443/realms/x", "http://[::1]/y"), {("TCP", 8443), ("TCP", 80)}),
        (deep_merge(OAUTH2, oidc("https://a.example.org/")), {("TCP", 443), ("TCP", 9443)}),
        (deep_merge(OAUTH2, HTTP_PROXY), {("TCP", 3128), ("TCP", 9443)}),
        (SASL, {("TCP", 88), ("UDP", 88)}),
        (oidc("https://a.example.org", enabled=False), None),
        (kubernetes(), {("TCP", 443), ("TCP", 6443)}),
        (kubernetes(api_server="https://api.example.org:7443"), {("TCP", 7443)}),
        (
            kubernetes(api_server="https://api.example.org:7443", discovery="trusted_issuer"),
            {("TCP", 443), ("TCP", 7443)},
        ),
        (HTTP_PROXY, None),
        # Clients' tickets are checked with the keytab alone.
        ({"config": {"authentication": {"enabled": True, "sasl": {"principal": "p/h@R", "keytab": "/k"}}}}, None),
    ],
)
def test_what_authentication_asks_is_open(values: dict[str, Any], wanted: set[tuple[str, int]] | None) -> None:
    further = rules(**values)[2:]
    assert all("to" not in rule for rule in further)
    assert [ports(rule) for rule in further] == ([] if wanted is None else [wanted])


def test_rules_of_ones_own_are_added() -> None:
    own = [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 15012, "protocol": "TCP"}]}, {"ports": [{"port": 9}]}]
    assert rules(networkPolicy={"egress": own}) == [*rules(), *own]


def test_egress_may_be_open() -> None:
    spec = render(networkPolicy={"egressMode": "open"}).get("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert "egress" not in spec


def pod_labels(manifests: Manifests) -> dict[str, dict[str, str]]:
    """The labels of all pods, by the name of what makes them."""
    found = {}
    for one in manifests.all:
        spec = one.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template", one if one["kind"] == "Pod" else None)
        if template:
            found[one["metadata"]["name"]] = template["metadata"]["labels"]
    return found


def test_the_rules_hold_for_the_proxys_pods_alone() -> None:
    manifests = render(analytics={"receiver": {"enabled": True}, "rollup": {"enabled": True}})
    selector = manifests.get("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items()
    restricted = {name: selector <= labels.items() for name, labels in pod_labels(manifests).items()}
    others = (f"{NAME}-{suffix}" for suffix in ("config-check", "test", "receiver", "rollup"))
    assert restricted == {NAME: True, **dict.fromkeys(others, False)}
    policies = [one["spec"] for one in manifests.all if one["kind"] == "NetworkPolicy"]
    assert [spec["policyTypes"] for spec in policies].count(["Ingress", "Egress"]) == 1
