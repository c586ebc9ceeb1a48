"""What the chart promises: how pods end, what they may do, who reaches them, their secrets, what is refused."""

import json
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, NAME, NAMESPACE, Refused, deep_merge, needs_tools, render
from tests.deploy.metric_names import ROOT

pytestmark = needs_tools

SECRETS = "/var/run/secrets/pulsar-trio-proxy"
TLS = {"enabled": True, "existingSecret": "tls"}
ANALYTICS: dict[str, Any] = {"receiver": {"enabled": True}, "rollup": {"enabled": True}}


def mounted(manifests: Any) -> dict[str, tuple[str, list[str]]]:
    """Folder of each mounted Secret → its name and the keys that are taken."""
    volumes = {volume["name"]: volume for volume in manifests.pod["spec"]["volumes"]}
    return {
        mount["mountPath"]: (secret["secretName"], [item["key"] for item in secret["items"]])
        for mount in manifests.container["volumeMounts"]
        if (secret := volumes[mount["name"]].get("secret"))
    }


def pod_specs(manifests: Any) -> dict[str, Any]:
    """The pods of all kinds, by their object's name."""
    found = {}
    for one in manifests.all:
        match one["kind"]:
            case "Pod":
                found[one["metadata"]["name"]] = one["spec"]
            case "Deployment" | "DaemonSet" | "StatefulSet" | "Job":
                found[one["metadata"]["name"]] = one["spec"]["template"]["spec"]
            case "CronJob":
                found[one["metadata"]["name"]] = one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return found


# ---- how pods come and go


def test_a_rollout_never_has_fewer_pods_and_waits_for_each() -> None:
    deployment = render().get("Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    probes = render().container
    assert probes["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert probes["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}
    assert probes["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}


def test_the_grace_period_holds_delay_and_drain() -> None:
    manifests = render()
    shutdown, limits = manifests.configuration["shutdown"], manifests.configuration["limits"]
    needed_s = (shutdown["delay_ms"] + limits["drain_timeout_ms"]) / 1000 + 15
    assert manifests.pod["spec"]["terminationGracePeriodSeconds"] >= needed_s
    assert render(terminationGracePeriodSeconds=55).pod["spec"]["terminationGracePeriodSeconds"] == 55


@pytest.mark.parametrize(
    "values",
    [
        {"terminationGracePeriodSeconds": 54},
        {"config": {"limits": {"drain_timeout_ms": 51_000}}},
        {"config": {"limits": {"drain_timeout_ms": 50_001}}},
        {"config": {"shutdown": {"delay_ms": 30_001}}},
        {"config": {"shutdown": {"delay_ms": 31_000}, "limits": {"drain_timeout_ms": None}}},  # the program's default
    ],
)
def test_a_grace_period_that_is_too_short_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"terminationGracePeriodSeconds: .* is too short"):
        render(**values)


def test_nodes_can_be_drained_of_pods_that_are_not_ready() -> None:
    spec = render().get("PodDisruptionBudget")["spec"]
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["maxUnavailable"] == 1
    assert spec["selector"] == render().get("Deployment")["spec"]["selector"]
    assert (
        render(pdb={"maxUnavailable": "", "minAvailable": "50%"}).get("PodDisruptionBudget")["spec"]["minAvailable"]
        == "50%"
    )


def test_pods_are_spread_over_zones_and_hosts() -> None:
    constraints = render().pod["spec"]["topologySpreadConstraints"]
    assert {one["topologyKey"] for one in constraints} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    labels = render().pod["metadata"]["labels"]
    for one in constraints:
        assert one["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_autoscaler_owns_the_number_of_pods() -> None:
    manifests = render(autoscaling={"enabled": True, "connections": {"targetAverage": 2000}})
    assert "replicas" not in manifests.get("Deployment")["spec"]
    spec = manifests.get("HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"]["name"] == NAME
    assert [metric["type"] for metric in spec["metrics"]] == ["Resource", "Pods"]
    assert spec["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]


@pytest.mark.parametrize(
    ("mode", "values", "restarts"),
    [
        ("always", {"log": {"level": "debug"}}, True),
        ("needed", {"limits": {"max_connections": 9000}}, False),
        ("needed", {"log": {"level": "info"}, "limits": {"max_command_bytes": 131_072}}, False),  # the defaults
        ("needed", {"log": {"level": "debug"}}, True),
        ("needed", {"limits": {"max_command_bytes": 65_536}}, True),
        ("needed", {"limits": {"max_broker_frame_bytes": 6_000_000}}, True),
        ("needed", {"cluster": {"forwarders": 3}}, True),
        ("needed", {"listener": [{"bind": "0.0.0.0:6650"}, {"bind": "0.0.0.0:6660"}]}, True),
        ("needed", {"listener": [{"bind": "0.0.0.0:6650", "routing": "sni"}]}, True),
        ("needed", {"listener": [{"bind": "0.0.0.0:6650", "routing": "pulsar"}]}, False),
        ("needed", {"admin": {"bind": "0.0.0.0:9090"}}, True),
        ("needed", {"relay": {"crash_safe": False}}, True),
        ("never", {"cluster": {"forwarders": 3}}, False),
    ],
)
def test_a_changed_configuration_makes_new_pods_when_it_must(mode: str, values: dict[str, Any], restarts: bool) -> None:
    def digest(config: dict[str, Any]) -> str | None:
        metadata = render(rolloutOnConfigChange=mode, config=config).pod["metadata"]
        return metadata.get("annotations", {}).get("checksum/config")  # type: ignore[no-any-return]

    assert (digest(values) != digest({})) is restarts


def test_without_a_watch_every_change_makes_new_pods() -> None:
    def digest(**limits: int) -> Any:
        config = {"reload": {"watch_interval_ms": 0}, "limits": limits}
        return render(config=config).pod["metadata"]["annotations"]["checksum/config"]

    assert digest(max_connections=9000) != digest(max_connections=8000)


def test_a_strategy_without_rolling_has_no_rolling_update() -> None:
    assert render(updateStrategy={"type": "Recreate"}).get("Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_the_selector_stays_when_versions_and_labels_change() -> None:
    before, after = render(), render(podLabels={"a": "b"}, commonLabels={"c": "d"}, nameOverride="")
    assert before.get("Deployment")["spec"]["selector"] == after.get("Deployment")["spec"]["selector"]
    assert "helm.sh/chart" not in before.pod["metadata"]["labels"], "a new chart alone would make new pods"
    for own in ("app.kubernetes.io/name", "app.kubernetes.io/component"):
        with pytest.raises(Refused, match="podLabels"):
            render(podLabels={own: "x"})


# ---- permissions of pods


def test_every_pod_passes_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, and a read-only root beside."""
    specs = pod_specs(render(analytics=ANALYTICS))
    assert len(specs) == 5
    for name, spec in specs.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert "memory" in container["resources"]["limits"], name
        assert all(
            volume.keys() & {"configMap", "emptyDir", "secret", "persistentVolumeClaim"} for volume in spec["volumes"]
        )


def test_writable_directories_are_mounted_from_empty_dir_volumes() -> None:
    manifests = render()
    mounts = {mount["mountPath"]: mount["name"] for mount in manifests.container["volumeMounts"]}
    empty = {volume["name"] for volume in manifests.pod["spec"]["volumes"] if "emptyDir" in volume}
    runtime_dir = manifests.configuration["cluster"]["runtime_dir"]
    assert {mounts["/tmp"], mounts["/run/pulsar-trio-proxy"]} == empty
    # Not the volume itself: its folder is root's, and the proxy wants one that is its own.
    assert runtime_dir.startswith("/run/pulsar-trio-proxy/")
    assert len(runtime_dir) <= 80


def test_the_service_account_has_no_token() -> None:
    assert render().get("ServiceAccount")["automountServiceAccountToken"] is False
    own = render(serviceAccount={"create": False, "name": "mine"})
    assert own.names("ServiceAccount") == []
    assert own.pod["spec"]["serviceAccountName"] == "mine"


ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def kubernetes_tokens(enabled: bool = True, **table: Any) -> Any:
    oidc = {"allowed_audiences": ["pulsar"], "kubernetes": table}
    return render(config={"authentication": {"enabled": enabled, "oidc": oidc}})


def account_of(pod: Any) -> tuple[Any, list[str]]:
    """The volume of the pod's own token, and where its containers have it."""
    [volume] = [one for one in pod["volumes"] if one["name"] == "service-account"] or [None]
    mounts = [one for container in pod["containers"] for one in container["volumeMounts"]]
    return volume, [one["mountPath"] for one in mounts if one["name"] == "service-account" and one["readOnly"]]


def test_the_pods_token_is_mounted_where_kubernetes_tokens_are_checked_and_only_there() -> None:
    manifests = kubernetes_tokens()
    assert manifests.configuration["authentication"]["oidc"]["kubernetes"] == {}
    check = manifests.get("Job", f"{NAME}-config-check")["spec"]["template"]["spec"]
    for pod in (manifests.pod["spec"], check):
        volume, mounts = account_of(pod)
        token, authority = volume["projected"]["sources"]
        assert token == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
        assert authority["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        assert mounts == [ACCOUNT]
        assert pod["automountServiceAccountToken"] is False, "further containers have none"
    for other in (render(), kubernetes_tokens(enabled=False), kubernetes_tokens(token_file="/mine/token")):
        assert account_of(other.pod["spec"]) == (None, [])


def test_the_account_is_bound_to_kubernetes_discovery_on_demand() -> None:
    assert render().names("ClusterRoleBinding") == []
    manifests = render(serviceAccount={"bindIssuerDiscovery": True})
    [name] = manifests.names("ClusterRoleBinding")
    binding, account = manifests.get("ClusterRoleBinding", name), manifests.get("ServiceAccount")
    assert "namespace" not in binding["metadata"]
    assert binding["roleRef"]["name"] == "system:service-account-issuer-discovery"
    namespace = account["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}]
    assert name == f"{namespace}-{NAME}-issuer-discovery", "of each release its own"


# ---- network policies


def admin_rules(manifests: Any, name: str = NAME, port: int = 8080) -> list[Any]:
    rules = manifests.get("NetworkPolicy", name)["spec"].get("ingress", [])
    return [rule for rule in rules if any(one["port"] == port for one in rule["ports"])]


def test_the_admin_port_is_open_to_prometheus_alone() -> None:
    (rule,) = admin_rules(render())
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}]
    assert [port["port"] for port in rule["ports"]] == [8080]


def test_without_peers_no_client_reaches_the_admin_port() -> None:
    assert admin_rules(render(networkPolicy={"admin": []})) == []
    receiver = render(analytics={"receiver": {"enabled": True, "peers": []}})
    policy = receiver.get("NetworkPolicy", f"{NAME}-receiver")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "ingress" not in policy


def test_clients_may_be_restricted() -> None:
    clients = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    (rule,) = admin_rules(render(networkPolicy={"clients": clients}, test={"enabled": False}), port=6650)
    assert rule["from"] == clients
    (open_rule,) = admin_rules(render(), port=6650)
    assert "from" not in open_rule


def test_the_tests_pod_is_let_in_beside_the_clients() -> None:
    clients = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    manifests = render(networkPolicy={"clients": clients})
    (rule,) = admin_rules(manifests, port=6650)
    assert rule["from"][:-1] == clients
    labels = rule["from"][-1]["podSelector"]["matchLabels"]
    assert labels.items() <= manifests.get("Pod", f"{NAME}-test")["metadata"]["labels"].items()
    assert not labels.items() <= manifests.pod["metadata"]["labels"].items()


@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_clients_addresses_are_kept_from_outside(kind: str) -> None:
    assert render(service={"type": kind}).get("Service")["spec"]["externalTrafficPolicy"] == "Local"
    other = render(service={"type": kind, "externalTrafficPolicy": "Cluster"})
    assert other.get("Service")["spec"]["externalTrafficPolicy"] == "Cluster"
    assert "externalTrafficPolicy" not in render().get("Service")["spec"]


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_admin_port_is_in_no_service_to_the_outside(kind: str) -> None:
    manifests = render(service={"type": kind})
    assert [port["name"] for port in manifests.get("Service")["spec"]["ports"]] == ["pulsar"]
    admin = manifests.get("Service", f"{NAME}-admin")["spec"]
    assert (admin["type"], admin["clusterIP"]) == ("ClusterIP", "None")


@pytest.mark.conforms("pip-1.3")
@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_service_is_of_the_kind_that_is_asked_for(kind: str) -> None:
    service = render(service={"type": kind}).get("Service")["spec"]
    assert service["type"] == kind
    assert service["selector"] == render().get("Deployment")["spec"]["selector"]["matchLabels"]


def test_ports_of_service_and_pod_lead_to_listeners() -> None:
    manifests = render(
        tls={**TLS, "keepPlain": True},
        ports={"pulsar": 16650, "names": {"pulsar": "sts-pulsar", "pulsarssl": "sts-pulsarssl"}},
        service={"type": "NodePort", "ports": {"pulsarssl": 443}, "nodePorts": {"pulsar": 30650}},
    )
    ports = {port["name"]: port for port in manifests.get("Service")["spec"]["ports"]}
    named = {port["name"]: port["containerPort"] for port in manifests.container["ports"]}
    binds = [listener["bind"] for listener in manifests.configuration["listener"]]
    assert binds == ["0.0.0.0:16650", "0.0.0.0:6651"]
    assert named == {"sts-pulsar": 16650, "sts-pulsarssl": 6651, "admin": 8080}
    assert (ports["pulsar"]["port"], ports["pulsar"]["targetPort"], ports["pulsar"]["nodePort"]) == (
        6650,
        "sts-pulsar",
        30650,
    )
    assert (ports["pulsarssl"]["port"], ports["pulsarssl"]["targetPort"]) == (443, "sts-pulsarssl")
    assert "nodePort" not in ports["pulsarssl"]


def test_listeners_of_ones_own_have_ports_too() -> None:
    listeners = [
        {"bind": "[::]:7000"},
        {"bind": "[::]:7001"},
        {"bind": "[::]:7002", "tls": {"certificate": "c", "key": "k"}},
    ]
    manifests = render(config={"listener": listeners, "admin": {"bind": "[::]:7003"}})
    named = {port["name"]: port["containerPort"] for port in manifests.container["ports"]}
    assert named == {"pulsar": 7000, "pulsar-2": 7001, "pulsarssl": 7002, "admin": 7003}
    ports = {port["name"]: port["targetPort"] for port in manifests.get("Service")["spec"]["ports"]}
    assert ports == {"pulsar": "pulsar", "pulsar-2": "pulsar-2", "pulsarssl": "pulsarssl"}
    assert [one["ports"][0]["port"] for one in admin_rules(manifests, port=7003)] == [7003]


@pytest.mark.parametrize("tls", [{}, {"tls": TLS}])
def test_a_listener_with_routing_by_sni(tls: dict[str, Any]) -> None:
    """Its port has the same name whatever else there is, is open to clients, and no certificate is mounted for it."""
    before, manifests = render(**tls), render(**tls, sni={"enabled": True}, ports={"pulsarsni": 7443})
    first, listener = manifests.configuration["listener"]
    assert [first] == before.configuration["listener"]
    assert listener == {"bind": "0.0.0.0:7443", "routing": "sni"}
    named = {port["name"]: port["containerPort"] for port in manifests.container["ports"]}
    assert named["pulsarsni"] == 7443
    port = next(one for one in manifests.get("Service")["spec"]["ports"] if one["name"] == "pulsarsni")
    assert (port["port"], port["targetPort"]) == (6652, "pulsarsni")
    clients, *_ = manifests.get("NetworkPolicy")["spec"]["ingress"]
    assert 7443 in [one["port"] for one in clients["ports"]]
    assert manifests.pod["spec"]["volumes"] == before.pod["spec"]["volumes"]
    assert smoke(manifests) == smoke(before)


def test_listeners_of_ones_own_with_routing_by_sni_are_not_for_the_test() -> None:
    listeners = [
        {"bind": "[::]:7001", "routing": "sni"},
        {"bind": "[::]:7002", "routing": "sni"},
        {"bind": "[::]:7000"},
    ]
    manifests = render(config={"listener": listeners})
    ports = {port["name"]: port["port"] for port in manifests.get("Service")["spec"]["ports"]}
    assert ports == {"pulsarsni": 6652, "pulsarsni-2": 7002, "pulsar": 6650}
    assert smoke(manifests)[0]["SERVICE_URL"] == f"pulsar://{NAME}.{NAMESPACE}:6650"
    assert f"{NAME}-test" not in render(config={"listener": listeners[:2]}).names("Pod")


def test_an_ingress_needs_a_token_and_shows_only_what_is_asked_for() -> None:
    ingress = {"enabled": True, "paths": ["/status"], "hostname": "proxy.example.org"}
    with pytest.raises(Refused, match="adminToken"):
        render(ingress=ingress)
    with pytest.raises(Refused, match=r"ingress\.paths"):
        render(ingress={"enabled": True}, adminToken={"secret": "admin"})
    (rule,) = render(ingress=ingress, adminToken={"secret": "admin"}).get("Ingress")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/status", "Exact")
    assert path["backend"]["service"] == {"name": f"{NAME}-admin", "port": {"name": "admin"}}


@pytest.mark.parametrize(
    ("ingress", "further"),
    [({}, []), ({"hostname": "proxy.example.org"}, ["proxy.example.org"]), ({"hostname": ""}, ["*"])],
)
def test_the_admin_port_answers_for_its_service_and_the_ingress(ingress: dict[str, str], further: list[str]) -> None:
    values: dict[str, Any] = {"clusterDomain": "k8s.example", "adminToken": {"secret": "admin"}}
    if ingress:
        values["ingress"] = {"enabled": True, "paths": ["/status"], **ingress}
    service = render(**values).get("Service", f"{NAME}-admin")["metadata"]
    name, qualified = service["name"], f"{service['name']}.{service['namespace']}"
    own = [name, qualified, f"{qualified}.svc", f"{qualified}.svc.k8s.example"]
    assert render(**values).configuration["admin"]["allowed_hosts"] == own + further


# ---- secrets


def test_the_secrets_of_the_pulsar_chart_are_mounted_as_they_are() -> None:
    auth = {"pulsarRelease": "pulsar", "token": {"enabled": True}, "proxyToken": {"enabled": True}}
    manifests = render(auth=auth)
    assert mounted(manifests) == {
        f"{SECRETS}/token-key": ("pulsar-token-asymmetric-key", ["PUBLICKEY"]),
        f"{SECRETS}/proxy-token": ("pulsar-token-proxy-admin", ["TOKEN"]),
    }
    assert manifests.configuration["authentication"] == {
        "enabled": True,
        "token": {"public_key": f"{SECRETS}/token-key/PUBLICKEY"},
    }
    credentials = manifests.configuration["brokers"]["credentials"]
    assert credentials == {"method": "token", "file": f"{SECRETS}/proxy-token/TOKEN"}


def test_a_shared_secret() -> None:
    manifests = render(auth={"pulsarRelease": "pulsar", "token": {"enabled": True, "algorithm": "symmetric"}})
    assert mounted(manifests) == {f"{SECRETS}/token-key": ("pulsar-token-symmetric-key", ["SECRETKEY"])}
    assert manifests.configuration["authentication"]["token"] == {"secret_key": f"{SECRETS}/token-key/SECRETKEY"}


def test_tls_from_a_secret_with_clients_certificates() -> None:
    manifests = render(tls={**TLS, "clientCa": {"secret": "ca", "key": "authority"}, "requireClientCertificate": True})
    (listener,) = manifests.configuration["listener"]
    assert listener["tls"] == {
        "certificate": f"{SECRETS}/tls/tls.crt",
        "key": f"{SECRETS}/tls/tls.key",
        "client_ca": f"{SECRETS}/client-ca/authority",
        "require_client_certificate": True,
    }
    assert mounted(manifests)[f"{SECRETS}/tls"] == ("tls", ["tls.crt", "tls.key"])
    assert mounted(manifests)[f"{SECRETS}/client-ca"] == ("ca", ["authority"])


def test_tls_with_certificates_by_name_and_a_crl() -> None:
    tls = {
        "certificates": ["a", "b"],
        "ciphers": "ECDHE+AESGCM",
        "groups": ["P-384"],
        "clientCa": {"secret": "ca"},
        "clientCrl": {"secret": "crl", "key": "list"},
    }
    manifests = render(tls={**TLS, **tls})
    (listener,) = manifests.configuration["listener"]
    assert listener["tls"] == {
        "certificate": f"{SECRETS}/tls/tls.crt",
        "key": f"{SECRETS}/tls/tls.key",
        "certificates": [
            {"certificate": f"{SECRETS}/tls-{number}/tls.crt", "key": f"{SECRETS}/tls-{number}/tls.key"}
            for number in (0, 1)
        ],
        "client_ca": f"{SECRETS}/client-ca/ca.crt",
        "client_crl": f"{SECRETS}/client-crl/list",
        "ciphers": "ECDHE+AESGCM",
        "groups": ["P-384"],
    }
    assert mounted(manifests) == {
        f"{SECRETS}/tls": ("tls", ["tls.crt", "tls.key"]),
        f"{SECRETS}/tls-0": ("a", ["tls.crt", "tls.key"]),
        f"{SECRETS}/tls-1": ("b", ["tls.crt", "tls.key"]),
        f"{SECRETS}/client-ca": ("ca", ["ca.crt"]),
        f"{SECRETS}/client-crl": ("crl", ["list"]),
    }
    (listener,) = render(tls={**TLS, "minimumVersion": "1.3"}).configuration["listener"]
    assert listener["tls"]["minimum_version"] == "1.3"
    assert "session_tickets" not in listener["tls"]
    (listener,) = render(tls={**TLS, "minimumVersion": "1.3", "sessionTickets": True}).configuration["listener"]
    assert listener["tls"]["session_tickets"] is True


def test_tls_by_cert_manager() -> None:
    issuer = {"enabled": True, "issuerRef": {"name": "ca"}, "dnsNames": ["proxy.example.org"]}
    manifests = render(tls={"enabled": True, "certManager": issuer})
    spec = manifests.get("Certificate")["spec"]
    assert mounted(manifests)[f"{SECRETS}/tls"] == (spec["secretName"], ["tls.crt", "tls.key"])
    assert {f"{NAME}.{NAMESPACE}.svc.cluster.local", "proxy.example.org"} <= set(spec["dnsNames"])


def test_a_certificate_of_a_public_authority_has_no_names_of_the_cluster() -> None:
    issuer = {"enabled": True, "issuerRef": {"name": "acme"}, "serviceNames": False}
    named = render(tls={"enabled": True, "certManager": {**issuer, "dnsNames": ["proxy.example.org"]}})
    assert named.get("Certificate")["spec"]["dnsNames"] == ["proxy.example.org"]
    addressed = render(tls={"enabled": True, "certManager": {**issuer, "ipAddresses": ["192.0.2.1"]}})
    assert "dnsNames" not in addressed.get("Certificate")["spec"]
    with pytest.raises(Refused, match=r"tls\.certManager\.dnsNames"):
        render(tls={"enabled": True, "certManager": issuer})


def smoke(manifests: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Environment and Secrets, by volume, of the pod of `helm test`."""
    spec = manifests.get("Pod", f"{NAME}-test")["spec"]
    (container,) = spec["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    return environment, {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}


def test_the_test_takes_the_systems_authorities_where_the_secret_has_none() -> None:
    environment, secrets = smoke(render(tls=TLS))
    assert environment["CA_FILE"] == "/test/tls/ca.crt"
    assert (secrets["tls"]["secretName"], secrets["tls"]["optional"]) == ("tls", True)
    assert smoke(render(tls=TLS, test={"caSecret": "ca"}))[1]["tls"]["optional"] is False
    listener = {"bind": "[::]:7002", "tls": {"certificate": "c", "key": "k"}}
    environment, secrets = smoke(render(config={"listener": [listener]}))
    assert environment["SERVICE_URL"].startswith("pulsar+ssl://")
    assert "CA_FILE" not in environment
    assert secrets == {}


def test_the_test_shows_a_certificate() -> None:
    environment, secrets = smoke(render(tls=TLS, test={"clientCertificateSecret": "client"}))
    assert environment["CERTIFICATE_FILE"] == "/test/certificate/tls.crt"
    assert environment["KEY_FILE"] == "/test/certificate/tls.key"
    assert secrets["certificate"]["secretName"] == "client"
    assert "certificate" not in smoke(render(tls=TLS))[1]


def test_a_token_of_the_proxy_needs_clients_that_authenticate_themselves() -> None:
    token = {"enabled": True, "secret": {"name": "t"}}
    with pytest.raises(Refused, match=r"auth\.proxyToken\.withoutClientAuthentication"):
        render(auth={"proxyToken": token})
    for values in (
        {"auth": {"proxyToken": {**token, "withoutClientAuthentication": True}}},
        {"auth": {"proxyToken": token}, "config": {"authentication": {"enabled": True, "tls": {}}}},
    ):
        assert render(**values).configuration["brokers"]["credentials"]["method"] == "token"


def test_tls_towards_brokers() -> None:
    manifests = render(
        brokerTls={"ca": {"secret": "ca"}, "certificateSecret": "own"},
        config={"brokers": {"service_url": "pulsar+ssl://b:6651", "tls": {"verify_hostname": False}}},
    )
    assert manifests.configuration["brokers"]["tls"] == {
        "trust": f"{SECRETS}/broker-ca/ca.crt",
        "certificate": f"{SECRETS}/broker-tls/tls.crt",
        "key": f"{SECRETS}/broker-tls/tls.key",
        "verify_hostname": False,
    }


def test_no_secret_is_in_a_config_map() -> None:
    auth = {"pulsarRelease": "pulsar", "token": {"enabled": True}, "proxyToken": {"enabled": True}}
    manifests = render(auth=auth, tls=TLS, adminToken={"secret": "admin"})
    assert manifests.names("Secret") == []
    assert manifests.configuration["admin"]["token_file"] == f"{SECRETS}/admin-token/token"
    secrets = [volume["secret"] for volume in manifests.pod["spec"]["volumes"] if "secret" in volume]
    assert len(secrets) == 4
    assert {secret["defaultMode"] for secret in secrets} == {0o440}


def test_the_deny_list_is_mounted() -> None:
    auth = {"pulsarRelease": "pulsar", "token": {"enabled": True}, "denyList": {"secret": "leaked"}}
    manifests = render(auth=auth)
    authentication = manifests.configuration["authentication"]
    assert authentication["enabled"] is True
    assert authentication["deny_file"] == f"{SECRETS}/deny-list/denied"
    secrets = [volume["secret"] for volume in manifests.pod["spec"]["volumes"] if "secret" in volume]
    assert "leaked" in {secret["secretName"] for secret in secrets}


def test_config_counts_before_what_is_derived() -> None:
    manifests = render(
        auth={"pulsarRelease": "pulsar", "token": {"enabled": True}},
        config={
            "authentication": {"enabled": False, "token": {"role_claim": "role"}},
            "metrics": {"count_messages": True},
        },
    )
    assert manifests.configuration["authentication"]["enabled"] is False
    assert manifests.configuration["authentication"]["token"].keys() == {"public_key", "role_claim"}
    assert manifests.configuration["metrics"] == {"count_messages": True}


# ---- monitoring


@pytest.mark.parametrize(("kind", "key"), [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")])
def test_monitors_label_as_the_pulsar_chart_does(kind: str, key: str) -> None:
    manifests = render(**{f"{kind[0].lower()}{kind[1:]}": {"enabled": True}}, adminToken={"secret": "admin"})
    spec = manifests.get(kind)["spec"]
    (endpoint,) = spec[key]
    relabelings = {one["targetLabel"]: one["sourceLabels"] for one in endpoint["relabelings"]}
    assert relabelings == {
        "job": ["__meta_kubernetes_pod_label_component"],
        "kubernetes_pod_name": ["__meta_kubernetes_pod_name"],
    }
    labels = manifests.pod["metadata"]["labels"]
    assert labels["component"] == "proxy"
    assert set(spec["podTargetLabels"]) <= labels.keys()
    assert endpoint["port"] == "admin"
    assert endpoint["authorization"] == {"credentials": {"name": "admin", "key": "token"}}
    if kind == "ServiceMonitor":
        service = manifests.get("Service", f"{NAME}-admin")["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= service.items()
        assert not spec["selector"]["matchLabels"].items() <= manifests.get("Service")["metadata"]["labels"].items()


def test_the_receivers_job_is_the_one_that_the_alerts_name() -> None:
    manifests = render(analytics={"receiver": {"enabled": True, "serviceMonitor": True}})
    spec = manifests.get("ServiceMonitor", f"{NAME}-receiver")["spec"]
    labels = manifests.get("Service", f"{NAME}-receiver")["metadata"]["labels"]
    assert labels[spec["jobLabel"]] == "pulsar-proxy-analytics-receiver"
    assert 'job="pulsar-proxy-analytics-receiver"' in (ROOT / "deploy/prometheus/alerts.yml").read_text()


def test_rules_and_dashboard_are_those_of_the_tree() -> None:
    manifests = render(prometheusRule={"enabled": True, "compatibility": True}, grafanaDashboard={"enabled": True})
    wanted = [
        group
        for path in sorted((ROOT / "deploy/prometheus").glob("*.yml"))
        if path.name != "prometheus.yml"
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert manifests.get("PrometheusRule")["spec"]["groups"] == wanted
    assert "jvm_info" not in str(render(prometheusRule={"enabled": True}).get("PrometheusRule"))
    dashboard = manifests.get("ConfigMap", f"{NAME}-dashboard")["data"]["pulsar-proxy.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy/grafana/pulsar-proxy.json").read_text())


# ---- analytics


def test_the_rollup_sees_the_receivers_volume_and_never_overlaps() -> None:
    manifests = render(analytics=ANALYTICS)
    spec = manifests.get("CronJob", f"{NAME}-rollup")["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    receiver = manifests.get("StatefulSet", f"{NAME}-receiver")
    (template,) = receiver["spec"]["volumeClaimTemplates"]
    assert claims == [f"{template['metadata']['name']}-{NAME}-receiver-0"]
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= receiver["spec"]["template"]["metadata"]["labels"].items()
    (pipeline,) = pod["containers"]
    assert pipeline["command"] == ["spark-submit"]
    begin = pipeline["args"].index("pipeline")
    assert pipeline["args"][begin + 1 : begin + 6] == [
        "--once",
        "--spool",
        "/data/spool",
        "--tables",
        "file:///data/tables",
    ]


def test_the_receiver_is_one_and_keeps_its_volume() -> None:
    spec = render(analytics=ANALYTICS).get("StatefulSet", f"{NAME}-receiver")["spec"]
    assert spec["replicas"] == 1
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    own = deep_merge(ANALYTICS, {"receiver": {"persistence": {"existingClaim": "mine"}}})
    spec = render(analytics=own).get("StatefulSet", f"{NAME}-receiver")["spec"]
    assert "volumeClaimTemplates" not in spec


# ---- the configuration


def test_a_folder_of_ones_own_is_taken_where_it_is_mounted() -> None:
    mounts = [{"name": "v", "mountPath": "/var/lib/proxy"}]
    config = {"cluster": {"runtime_dir": "/var/lib/proxy/cluster"}}
    manifests = render(config=config, extraVolumeMounts=mounts, extraVolumes=[{"name": "v", "emptyDir": {}}])
    assert manifests.configuration["cluster"]["runtime_dir"] == "/var/lib/proxy/cluster"


def test_no_configuration_at_all_is_the_programs_own() -> None:
    assert "limits" not in render(config=None, terminationGracePeriodSeconds=600).configuration


def test_a_chart_above_may_say_enabled_and_global() -> None:
    assert render(enabled=True, **{"global": {"imageRegistry": "r"}}).all == render().all


def test_templates_take_no_text_apart_by_patterns() -> None:
    for path in (CHART / "templates").rglob("*"):
        if path.is_file():
            assert "regex" not in path.read_text(), path.name
