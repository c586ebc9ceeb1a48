"""HTTP in the chart: its listener, who reaches it by which Service, Ingress and route, and where it is passed on to."""

from typing import Any

import msgspec
import pytest

from proxy.config.cgroups import ContainerLimits
from proxy.config.http import check_http
from proxy.config.memory import fit_to_container
from proxy.config.types import Config
from proxy.config.upstreams import FUNCTIONS, http_upstreams
from tests.deploy.chart import NAME, NAMESPACE, Manifests, Refused, deep_merge, needs_tools, render
from tests.deploy.metric_names import ROOT
from tests.deploy.test_chart_service import notes
from tests.deploy.test_chart_templates import SECRETS, TLS, mounted, smoke

pytestmark = needs_tools

HTTP_NAME = f"{NAME}-http"
EDGE = [{"name": "edge", "sectionName": "a"}]
ROUTE = {"parentRefs": EDGE}
TLS_ROUTE = {"parentRefs": EDGE, "hostnames": ["pulsar.example.org"]}
INGRESS = {"enabled": True, "hostname": "pulsar.example.org"}
PEERS = [{"podSelector": {"matchLabels": {"app": "ingress"}}}]
OWN_URL = {"brokers": {"service_url": "pulsar://b:6650", "web_service_url": "http://b:8080"}}
OWN_LISTENERS = {
    "http_listener": [{"bind": "0.0.0.0:8081"}, {"bind": "0.0.0.0:8443", "tls": {"certificate": "c", "key": "k"}}]
}


def with_http(values: dict[str, Any] | None = None, **http: Any) -> Manifests:
    """The manifests with HTTP, and other values."""
    return render(**deep_merge(values or {}, {"http": {"enabled": True, **http}}))


def listener(manifests: Manifests) -> dict[str, Any]:
    """The one listener for HTTP."""
    (found,) = manifests.configuration["http_listener"]
    return found  # type: ignore[no-any-return]


def names_of_ports(manifests: Manifests, name: str = NAME) -> list[str]:
    """The ports of a Service."""
    return [port["name"] for port in manifests.get("Service", name)["spec"]["ports"]]


def rules_for(manifests: Manifests, port: int) -> list[Any]:
    """The rules of the NetworkPolicy that admit clients to a port."""
    rules = manifests.get("NetworkPolicy")["spec"]["ingress"]
    return [rule for rule in rules if port in [one["port"] for one in rule["ports"]]]


# ---- what is there, and for whom


def test_as_installed_nothing_serves_http() -> None:
    manifests = render()
    assert not {"http", "http_listener"} & manifests.configuration.keys()
    assert "web_service_url" not in manifests.configuration["brokers"]
    assert manifests.names("Service") == [NAME, f"{NAME}-admin"]
    assert rules_for(manifests, 8081) == []
    assert [port["name"] for port in manifests.container["ports"]] == ["pulsar", "admin"]
    routes = ("Ingress", "HTTPRoute", "TCPRoute", "TLSRoute")
    assert [name for kind in routes for name in manifests.names(kind)] == []
    assert "Pulsar's HTTP (/admin, /lookup, functions) is not passed on (http.enabled)." in notes()


def test_http_has_a_port_and_a_service_of_its_own() -> None:
    manifests = with_http()
    assert listener(manifests) == {"bind": "0.0.0.0:8081"}
    ports = {port["name"]: port["containerPort"] for port in manifests.container["ports"]}
    assert ports == {"pulsar": 6650, "http": 8081, "admin": 8080}
    spec = manifests.get("Service", HTTP_NAME)["spec"]
    assert spec["ports"] == [{"name": "http", "port": 8081, "targetPort": "http", "protocol": "TCP"}]
    assert spec["selector"] == manifests.get("Service")["spec"]["selector"]
    assert f"http://{HTTP_NAME}.{NAMESPACE}.svc.cluster.local:8081" in notes(http={"enabled": True})


@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_http_is_not_exposed_with_the_listeners_unless_asked_for(kind: str) -> None:
    outside = {"service": {"type": kind}}
    manifests = with_http(outside)
    assert names_of_ports(manifests) == ["pulsar"]
    assert manifests.get("Service", HTTP_NAME)["spec"]["type"] == "ClusterIP"
    values = deep_merge(outside, {"service": {"ports": {"http": 80}, "nodePorts": {"http": 30080}}})
    manifests = with_http(values, inClientsService=True)
    assert names_of_ports(manifests) == ["pulsar", "http"]
    assert manifests.get("Service")["spec"]["ports"][1]["nodePort"] == 30080
    assert HTTP_NAME not in manifests.names("Service")


def test_ports_of_two_services_may_be_equal() -> None:
    values = {"service": {"ports": {"pulsarssl": 443, "http": 443}}, "tls": TLS}
    with_http(values)
    with pytest.raises(Refused, match=r"service\.ports: 443 is the port of two listeners"):
        with_http(values, inClientsService=True)


def test_the_network_policy_admits_clients_to_http_or_peers_of_its_own() -> None:
    (rule,) = rules_for(with_http(), 8081)
    assert rule == {"ports": [{"port": 8081, "protocol": "TCP"}]}
    clients = {"networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}
    (rule,) = rules_for(with_http(clients), 8081)
    pod = with_http(clients).get("Pod", f"{NAME}-test")["metadata"]["labels"].items()
    assert rule["from"][:-1] == clients["networkPolicy"]["clients"]
    assert rule["from"][-1]["podSelector"]["matchLabels"].items() <= pod
    manifests = with_http({"networkPolicy": {"http": PEERS}, "test": {"http": False}})
    (rule,) = rules_for(manifests, 8081)
    assert rule == {"ports": [{"port": 8081, "protocol": "TCP"}], "from": PEERS}
    (rule,) = rules_for(manifests, 6650)
    assert "from" not in rule


def test_listeners_of_ones_own_have_ports_and_routes() -> None:
    manifests = render(
        config={**OWN_LISTENERS, **OWN_URL}, http={"ingress": INGRESS}, gateway={"tlsRoutes": {"http-2": TLS_ROUTE}}
    )
    assert names_of_ports(manifests, HTTP_NAME) == ["http", "http-2"]
    assert [len(rules_for(manifests, port)) for port in (8081, 8443)] == [1, 1]
    assert backends(manifests, "TLSRoute", f"{NAME}-http-2") == [{"name": HTTP_NAME, "port": 8443}]


def test_the_proxy_protocol_is_at_the_listeners_of_the_clients_service() -> None:
    announced = {"proxy_protocol": "required", "proxy_protocol_sources": ["10.0.0.0/28"]}
    values = {
        "proxyProtocol": {"mode": "required", "sources": ["10.0.0.0/28"]},
        "tls": {"enabled": True, "keepPlain": True, "existingSecret": "tls"},
        "sni": {"enabled": True},
    }
    for one in with_http(values).configuration["listener"]:
        assert one.items() >= announced.items()
    assert "proxy_protocol" not in listener(with_http(values))
    assert listener(with_http(values, inClientsService=True)).items() >= announced.items()
    assert "proxy_protocol" not in with_http().configuration["listener"][0]


def test_the_test_of_the_release_speaks_no_binary_protocol_to_http() -> None:
    only_sni = {"config": {"listener": [{"bind": "[::]:6652", "routing": "sni"}]}}
    assert with_http(only_sni).names("Pod") == []
    assert smoke(with_http())[0]["SERVICE_URL"] == smoke(render())[0]["SERVICE_URL"]


# ---- TLS


def test_https_is_as_tls_of_the_other_listeners_but_for_tickets() -> None:
    tls = {**TLS, "clientCa": {"secret": "ca"}, "minimumVersion": "1.3", "groups": ["P-384"]}
    manifests = with_http({"tls": tls})
    assert listener(manifests)["tls"] == manifests.configuration["listener"][0]["tls"]
    manifests = with_http({"tls": {**TLS, "minimumVersion": "1.3", "sessionTickets": True}})
    assert manifests.configuration["listener"][0]["tls"]["session_tickets"] is True
    assert "session_tickets" not in listener(manifests)["tls"]
    assert "tls" not in listener(with_http({"tls": TLS}, plain=True))


def test_https_has_a_certificate_of_its_own_with_and_without_tls() -> None:
    own = {"certificate": f"{SECRETS}/http-tls/tls.crt", "key": f"{SECRETS}/http-tls/tls.key"}
    alone = with_http(existingSecret="web")
    assert listener(alone)["tls"] == own
    assert mounted(alone) == {f"{SECRETS}/http-tls": ("web", ["tls.crt", "tls.key"])}
    assert "tls" not in alone.configuration["listener"][0]
    both = with_http({"tls": {**TLS, "clientCa": {"secret": "ca"}}}, existingSecret="web")
    assert listener(both)["tls"] == {**own, "client_ca": f"{SECRETS}/client-ca/ca.crt"}
    assert both.configuration["listener"][0]["tls"]["certificate"] == f"{SECRETS}/tls/tls.crt"


def test_a_certificate_by_cert_manager_has_the_names_of_the_service_for_http() -> None:
    tls = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}
    wanted = f"{HTTP_NAME}.{NAMESPACE}.svc.cluster.local"
    assert wanted in with_http({"tls": tls}).get("Certificate")["spec"]["dnsNames"]
    for other in (
        with_http({"tls": tls}, plain=True),
        with_http({"tls": tls}, existingSecret="web"),
        with_http({"tls": tls}, inClientsService=True),
        render(tls=tls),
    ):
        assert wanted not in other.get("Certificate")["spec"]["dnsNames"]


def test_the_check_before_an_upgrade_waits_for_no_certificate_of_cert_manager() -> None:
    tls = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}

    def checked(manifests: Manifests) -> str:
        return manifests.get("ConfigMap", f"{NAME}-config-check")["data"]["proxy.toml"]  # type: ignore[no-any-return]

    assert f"{SECRETS}/tls/" not in checked(with_http({"tls": tls}))
    assert f"{SECRETS}/http-tls/" in checked(with_http({"tls": tls}, existingSecret="web"))


# ---- upstreams


def test_the_web_service_url_is_derived_from_a_pulsar_release() -> None:
    def url(**values: Any) -> str:
        return with_http(values).configuration["brokers"]["web_service_url"]  # type: ignore[no-any-return]

    assert url() == f"http://pulsar-broker.{NAMESPACE}.svc.cluster.local:8080"
    elsewhere = {"pulsarRelease": "prod", "namespace": "other", "tls": True}
    assert (
        url(brokers=elsewhere, brokerTls={"ca": {"secret": "ca"}})
        == "https://prod-pulsar-broker.other.svc.cluster.local:8443"
    )
    assert url(config={"brokers": {"web_service_url": "http://own:1"}}) == "http://own:1"
    with pytest.raises(Refused, match=r"config\.brokers\.web_service_url: is empty.*; write http://HOST:PORT"):
        url(config={"brokers": {"service_url": "pulsar://b:6650"}})


def egress(**values: Any) -> list[tuple[list[int], Any]]:
    """Ports and peers of the rules behind that for DNS."""
    rules = with_http(values).get("NetworkPolicy")["spec"]["egress"][1:]
    return [([one["port"] for one in rule["ports"]], rule.get("to")) for rule in rules]


def test_pods_reach_the_upstreams_of_http() -> None:
    brokers = [{"podSelector": {"matchLabels": {"component": "broker"}}}]
    assert egress() == [([6650, 6651, 8080], brokers)]
    functions = {"http": {"function_worker_url": "http://f,[2001:db8::1]:6750", "websocket_url": "https://w/"}}
    assert egress(config=functions) == [([6650, 6651, 8080], brokers), ([443, 6750, 80], None)]
    routes = {"http": {"routes": [{"path": "/a", "url": "https://t:8000"}]}}
    own = deep_merge(deep_merge(OWN_URL, {"brokers": {"allowed_ports": [9000], "port_pairs": []}}), routes)
    assert egress(config=own) == [([6650, 9000], None), ([8000, 8080, 9000], None)]
    without = render(config=functions).get("NetworkPolicy")["spec"]["egress"]
    assert len(without) == 2, "without a listener nothing is passed on"


def test_tls_towards_brokers_may_be_that_of_http_alone() -> None:
    config = {"brokers": {"service_url": "pulsar://b", "web_service_url": "https://b"}}
    manifests = with_http({"config": config, "brokerTls": {"ca": {"secret": "ca"}}})
    assert manifests.configuration["brokers"]["tls"] == {"trust": f"{SECRETS}/broker-ca/ca.crt"}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tls": {**TLS, "minimumVersion": "1.3", "sessionTickets": True}},
        {"brokers": {"tls": True}},
        {"bindAddress": "[::]"},
    ],
)
def test_the_program_takes_what_is_derived_for_http(values: dict[str, Any]) -> None:
    config = msgspec.convert(with_http(values).configuration, Config)
    check_http(config)
    assert http_upstreams(config)[FUNCTIONS].hosts


# ---- Ingress and routes


def test_an_ingress_leads_to_the_named_paths_of_its_host() -> None:
    manifests = with_http(ingress=INGRESS)
    (rule,) = manifests.get("Ingress", HTTP_NAME)["spec"]["rules"]
    assert rule["host"] == "pulsar.example.org"
    assert [(path["path"], path["pathType"]) for path in rule["http"]["paths"]] == [
        ("/admin", "Prefix"),
        ("/lookup", "Prefix"),
    ]
    for name, in_clients_service in ((HTTP_NAME, False), (NAME, True)):
        manifests = with_http(ingress=INGRESS, inClientsService=in_clients_service)
        for path in manifests.get("Ingress", HTTP_NAME)["spec"]["rules"][0]["http"]["paths"]:
            assert path["backend"]["service"] == {"name": name, "port": {"name": "http"}}
    with pytest.raises(Refused, match=r"http\.ingress\.hostname: is empty.*; name the host"):
        with_http(ingress={"enabled": True})


def backends(manifests: Manifests, kind: str, name: str) -> list[Any]:
    """Where a route leads."""
    (rule,) = manifests.get(kind, name)["spec"]["rules"]
    return rule["backendRefs"]  # type: ignore[no-any-return]


def test_routes_lead_to_the_ports_of_the_services() -> None:
    values = {
        "tls": {**TLS, "keepPlain": True},
        "sni": {"enabled": True},
        "service": {"ports": {"pulsarssl": 443, "http": 80}},
        "gateway": {
            "httpRoutes": {"http": TLS_ROUTE},
            "tcpRoutes": {"pulsar": ROUTE, "http": ROUTE},
            "tlsRoutes": {"pulsarssl": TLS_ROUTE, "pulsarsni": TLS_ROUTE, "http": TLS_ROUTE},
        },
    }
    manifests = with_http(values)
    found = {
        (kind, name): backends(manifests, kind, name)
        for kind in ("HTTPRoute", "TCPRoute", "TLSRoute")
        for name in manifests.names(kind)
    }
    http, binary = [{"name": HTTP_NAME, "port": 80}], [{"name": NAME, "port": 443}]
    assert found == {
        ("HTTPRoute", HTTP_NAME): http,
        ("TCPRoute", HTTP_NAME): http,
        ("TCPRoute", f"{NAME}-pulsar"): [{"name": NAME, "port": 6650}],
        ("TLSRoute", HTTP_NAME): http,
        ("TLSRoute", f"{NAME}-pulsarssl"): binary,
        ("TLSRoute", f"{NAME}-pulsarsni"): [{"name": NAME, "port": 6652}],
    }
    spec = manifests.get("HTTPRoute", HTTP_NAME)["spec"]
    assert (spec["parentRefs"], spec["hostnames"]) == (EDGE, TLS_ROUTE["hostnames"])
    paths = [match["path"] for match in spec["rules"][0]["matches"]]
    assert paths == [{"type": "PathPrefix", "value": path} for path in ("/admin", "/lookup")]


@pytest.mark.parametrize("table", ["httpRoutes", "tcpRoutes", "tlsRoutes"])
@pytest.mark.parametrize("port", ["admin", "8080", "pulsar-2"])
def test_no_route_leads_to_the_admin_port_or_to_none(table: str, port: str) -> None:
    route = ROUTE if table == "tcpRoutes" else TLS_ROUTE
    with pytest.raises(
        Refused, match=rf"gateway\.{table}: no port of a listener has the name {port}; there are http, pulsar"
    ):
        with_http({"gateway": {table: {port: route}}})


@pytest.mark.parametrize(
    ("gateway", "says"),
    [
        ({"httpRoutes": {"pulsar": ROUTE}}, "gateway.httpRoutes: pulsar is the port of Pulsar's binary protocol; use"),
        ({"tlsRoutes": {"pulsar": TLS_ROUTE}}, "gateway.tlsRoutes: the listener pulsar has no TLS; use"),
        ({"tlsRoutes": {"http": TLS_ROUTE}}, "gateway.tlsRoutes: the listener http has no TLS; use"),
    ],
)
def test_a_route_that_is_not_for_its_listener_is_refused(gateway: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        with_http({"gateway": gateway})
    assert says in str(refused.value)


# ---- pods


def test_a_listener_that_changes_makes_new_pods_and_limits_make_none() -> None:
    def digest(values: dict[str, Any], **http: Any) -> Any:
        return with_http(values, **http).pod["metadata"]["annotations"]["checksum/config"]

    assert digest({}) != render().pod["metadata"]["annotations"]["checksum/config"]
    assert digest({"ports": {"http": 8082}}) != digest({})
    assert digest({}, existingSecret="web") != digest({})
    assert digest({"config": {"http": {"max_requests": 10}}}) == digest({})


def test_memory_is_shared_as_the_page_says() -> None:
    def connections(**values: Any) -> str:
        manifests = with_http(values)
        config = msgspec.convert(manifests.configuration, Config)
        limit = manifests.container["resources"]["limits"]["memory"]
        assert limit == "1Gi"
        found = fit_to_container(config, (), ContainerLimits(None, 1 << 30)).config.limits.max_connections
        return f"{found // 100 * 100:,}"

    page = " ".join((ROOT / "docs/kubernetes.md").read_text().split())
    smaller = {"http": {"max_connections": 512, "max_requests": 128}}
    assert f"pod {connections()} connections to plain listeners instead of 10,000" in page
    assert f"or {connections(tls=TLS)} with TLS for all" in page
    assert "with 512 as `config.http.max_connections` and 128 as `.max_requests` still 10,000" in page
    assert connections(config=smaller) == "10,000"


def test_a_port_of_the_node_leads_to_http() -> None:
    manifests = with_http({"workload": {"kind": "DaemonSet", "daemonSet": {"hostPorts": {"http": 8081}}}})
    (port,) = [port for port in manifests.container["ports"] if port["name"] == "http"]
    assert port["hostPort"] == 8081


def test_the_notes_say_who_may_administer_and_what_can_be_read() -> None:
    token = {"proxyToken": {"enabled": True, "secret": {"name": "t"}, "withoutClientAuthentication": True}}
    says = "Everybody who reaches it may administer what the proxy's role may"
    assert says in notes(http={"enabled": True}, auth=token)
    assert says not in notes(http={"enabled": True})
    plain = "It is plain: tokens of clients can be read on the way"
    assert plain in notes(http={"enabled": True})
    assert plain not in notes(http={"enabled": True, "existingSecret": "web"})


# ---- helm test


def test_the_test_asks_by_http_where_there_is_http() -> None:
    def asked(values: dict[str, Any] | None = None, **http: Any) -> tuple[str | None, str | None]:
        environment, _ = smoke(with_http(values, **http))
        return environment.get("HTTP_URL"), environment.get("HTTP_CERTIFICATE_HOST")

    own = f"{HTTP_NAME}.{NAMESPACE}"
    assert asked() == (f"http://{own}:8081", own)
    assert asked(inClientsService=True)[0] == f"http://{NAME}.{NAMESPACE}:8081"
    assert asked({"tls": TLS}) == (f"https://{own}:8081", own)
    assert asked({"tls": TLS, "test": {"host": "pulsar.example.org"}}) == (f"https://{own}:8081", "pulsar.example.org")
    assert asked({"config": {**OWN_URL, **OWN_LISTENERS}}, enabled=False)[0] == f"http://{own}:8081"
    assert asked({"test": {"http": False}}) == (None, None)
    assert "HTTP_URL" not in smoke(render())[0]


def test_the_test_trusts_the_authority_of_a_certificate_for_http_alone() -> None:
    environment, secrets = smoke(with_http(existingSecret="web"))
    assert (environment["CA_FILE"], secrets["tls"]["secretName"]) == ("/test/tls/ca.crt", "web")
    assert smoke(with_http({"tls": TLS}, existingSecret="web"))[1]["tls"]["secretName"] == "tls"
    assert "CA_FILE" not in smoke(with_http({"test": {"http": False}}, existingSecret="web"))[0]
