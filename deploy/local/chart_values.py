"""The types of the Helm chart's values, from which values.schema.json is generated: ``python -m local.chart_values``.

`config` is the proxy's configuration itself, so a new key there is valid here. Objects that are copied to the manifests
(tolerations, affinity, …) have Kubernetes' own types, which the API server checks.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from analytics.receiver.config import Config as ReceiverConfig
from proxy.config.types import Config

Text = str
NonEmpty = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
NodePort = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Duration = Annotated[str, Meta(pattern="^([0-9]+(ms|s|m|h))+$")]
PortName = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]{0,12}[a-z0-9])?$")]
Image = Annotated[str, Meta(pattern="^(sha256:[0-9a-f]{64})?$")]
CountOrPercent = int | Annotated[str, Meta(pattern="^([0-9]+%)?$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
WhenUnsatisfiable = Literal["", "ScheduleAnyway", "DoNotSchedule"]
Labels = dict[str, str]
Object = dict[str, Any]
Objects = list[dict[str, Any]]


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base of all tables of values: an unknown key is an error."""


class ImageValues(Values, frozen=True):
    repository: NonEmpty = ""
    tag: Text = ""
    digest: Image = ""
    pull_policy: PullPolicy = "IfNotPresent"


class PortNames(Values, frozen=True):
    pulsar: PortName = ""
    pulsarssl: PortName = ""


class Ports(Values, frozen=True):
    pulsar: Port = 0
    pulsarssl: Port = 0
    admin: Port = 0
    names: PortNames = PortNames()


class KeyOfSecret(Values, frozen=True):
    secret: Text = ""
    key: NonEmpty = ""


class NameAndKey(Values, frozen=True):
    name: Text = ""
    key: Text = ""


class IssuerRef(Values, frozen=True):
    name: Text = ""
    kind: NonEmpty = ""
    group: NonEmpty = ""


class CertManager(Values, frozen=True):
    enabled: bool = False
    issuer_ref: IssuerRef = IssuerRef()
    service_names: bool = True
    dns_names: list[NonEmpty] = []
    ip_addresses: list[NonEmpty] = []
    duration: Duration = ""
    renew_before: Duration = ""


class Tls(Values, frozen=True):
    enabled: bool = False
    keep_plain: bool = False
    existing_secret: Text = ""
    require_client_certificate: bool = False
    client_ca: KeyOfSecret = KeyOfSecret()
    cert_manager: CertManager = CertManager()


class Brokers(Values, frozen=True):
    pulsar_release: Text = ""
    namespace: Text = ""
    tls: bool = False


class BrokerTls(Values, frozen=True):
    ca: KeyOfSecret = KeyOfSecret()
    certificate_secret: Text = ""


class TokenAuth(Values, frozen=True):
    enabled: bool = False
    algorithm: Literal["asymmetric", "symmetric"] = "asymmetric"
    key_secret: NameAndKey = NameAndKey()


class ProxyToken(Values, frozen=True):
    enabled: bool = False
    without_client_authentication: bool = False
    role: NonEmpty = ""
    secret: NameAndKey = NameAndKey()


class Auth(Values, frozen=True):
    pulsar_release: Text = ""
    token: TokenAuth = TokenAuth()
    proxy_token: ProxyToken = ProxyToken()


class Probe(Values, frozen=True):
    enabled: bool = True
    initial_delay_seconds: Natural = 0
    period_seconds: Count = 1
    timeout_seconds: Count = 1
    failure_threshold: Count = 1
    success_threshold: Count = 1
    termination_grace_period_seconds: Count = 1


class Probes(Values, frozen=True):
    startup: Probe = Probe()
    readiness: Probe = Probe()
    liveness: Probe = Probe()


class DaemonSet(Values, frozen=True):
    host_ports: dict[str, Port] = {}
    host_network: bool = False
    open_admin_port: bool = False
    update_strategy: Object = {}


class Workload(Values, frozen=True):
    kind: Literal["Deployment", "DaemonSet"] = "Deployment"
    daemon_set: DaemonSet = DaemonSet()


class Volumes(Values, frozen=True):
    size_limit: NonEmpty = ""


class ServiceAccount(Values, frozen=True):
    create: bool = True
    name: Text = ""
    annotations: Labels = {}


class HealthCheck(Values, frozen=True):
    interval_seconds: Natural = 0
    failure_threshold: Count = 1


class Service(Values, frozen=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: Labels = {}
    labels: Labels = {}
    ports: dict[str, Port] = {}
    node_ports: dict[str, NodePort] = {}
    cluster_ip: Text = msgspec.field(default="", name="clusterIP")
    load_balancer_class: Text = ""
    load_balancer_ip: Text = msgspec.field(default="", name="loadBalancerIP")
    load_balancer_source_ranges: list[NonEmpty] = []
    allocate_load_balancer_node_ports: bool = True
    external_traffic_policy: Literal["", "Local", "Cluster"] = ""
    health_check: HealthCheck = HealthCheck()
    health_check_node_port: NodePort = 0
    internal_traffic_policy: Literal["", "Local", "Cluster"] = ""
    traffic_distribution: Literal["", "PreferClose", "PreferSameZone", "PreferSameNode"] = ""
    ip_family_policy: Literal["", "SingleStack", "PreferDualStack", "RequireDualStack"] = ""
    ip_families: Annotated[list[Literal["IPv4", "IPv6"]], Meta(max_length=2)] = []


class Cpu(Values, frozen=True):
    target_utilization: Natural = 0


class Connections(Values, frozen=True):
    target_average: Natural = 0
    metric: NonEmpty = ""


class Autoscaling(Values, frozen=True):
    enabled: bool = False
    min_replicas: Count = 1
    max_replicas: Count = 1
    cpu: Cpu = Cpu()
    connections: Connections = Connections()
    metrics: Objects = []
    behavior: Object = {}


class Keda(Values, frozen=True):
    enabled: bool = False
    server_address: Text = ""
    query: Text = ""
    target_average: Count = 1
    polling_interval: Count = 1
    metadata: Labels = {}
    authentication_ref: Object = {}
    triggers: Objects = []


class Vpa(Values, frozen=True):
    enabled: bool = False


class Pdb(Values, frozen=True):
    enabled: bool = True
    max_unavailable: CountOrPercent = 1
    min_available: CountOrPercent = ""
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow", "IfHealthyBudget"] = "AlwaysAllow"


class TopologySpread(Values, frozen=True):
    zones: WhenUnsatisfiable = ""
    hosts: WhenUnsatisfiable = ""


class NetworkPolicy(Values, frozen=True):
    enabled: bool = True
    clients: Objects = []
    admin: Objects = []
    egress: Objects = []


class Ingress(Values, frozen=True):
    enabled: bool = False
    class_name: Text = ""
    annotations: Labels = {}
    hostname: Text = ""
    paths: list[Literal["/metrics", "/status", "/readyz", "/healthz"]] = []
    tls_secret: Text = ""


class Monitor(Values, frozen=True):
    enabled: bool = False
    labels: Labels = {}
    interval: Duration = ""
    scrape_timeout: Duration = ""
    relabelings: Objects = []
    metric_relabelings: Objects = []


class Rules(Values, frozen=True):
    enabled: bool = False
    compatibility: bool = False
    labels: Labels = {}


class Dashboard(Values, frozen=True):
    enabled: bool = False
    labels: Labels = {}
    annotations: Labels = {}


class Test(Values, frozen=True):
    enabled: bool = True
    command: list[NonEmpty] = []
    topic: NonEmpty = ""
    host: Text = ""
    token_secret: Text = ""
    token_key: NonEmpty = ""
    ca_secret: Text = ""
    ca_key: NonEmpty = ""
    client_certificate_secret: Text = ""
    timeout_seconds: Count = 1
    attempts: Count = 1


class Persistence(Values, frozen=True):
    size: NonEmpty = ""
    storage_class_name: Text = ""
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany"]] = []
    existing_claim: Text = ""


class Receiver(Values, frozen=True):
    enabled: bool = False
    config: ReceiverConfig = ReceiverConfig()
    command: list[NonEmpty] = []
    token_secret: Text = ""
    token_key: NonEmpty = ""
    tls_secret: Text = ""
    peers: Objects = []
    service_monitor: bool = False
    persistence: Persistence = Persistence()
    pod_annotations: Labels = {}
    pod_labels: Labels = {}
    extra_env: Objects = []
    resources: Object = {}
    termination_grace_period_seconds: Count = 1
    node_selector: Labels = {}
    tolerations: Objects = []
    affinity: Object = {}
    priority_class_name: Text = ""
    runtime_class_name: Text = ""


class Rollup(Values, frozen=True):
    enabled: bool = False
    schedule: NonEmpty = ""
    tables: NonEmpty = ""
    command: list[NonEmpty] = []
    spark_arguments: list[str] = []
    program: Text = ""
    active_deadline_seconds: Count = 1
    extra_env: Objects = []
    pod_annotations: Labels = {}
    pod_labels: Labels = {}
    resources: Object = {}
    scratch_size: NonEmpty = ""
    node_selector: Labels = {}
    tolerations: Objects = []
    priority_class_name: Text = ""
    runtime_class_name: Text = ""


class Analytics(Values, frozen=True):
    image: ImageValues = ImageValues()
    receiver: Receiver = Receiver()
    rollup: Rollup = Rollup()


class ChartValues(Values, frozen=True):
    enabled: bool = True
    """For a parent chart's `condition`; Helm passes it down, no template reads it."""
    name_override: Text = ""
    fullname_override: Text = ""
    common_labels: Labels = {}
    common_annotations: Labels = {}
    image: ImageValues = ImageValues()
    image_pull_secrets: Objects = []
    command: list[NonEmpty] = []
    config: Config = Config()
    bind_address: Literal["0.0.0.0", "[::]"] = "0.0.0.0"
    ports: Ports = Ports()
    tls: Tls = Tls()
    brokers: Brokers = Brokers()
    broker_tls: BrokerTls = BrokerTls()
    auth: Auth = Auth()
    admin_token: KeyOfSecret = KeyOfSecret()
    workload: Workload = Workload()
    replica_count: Natural = 1
    update_strategy: Object = {}
    min_ready_seconds: Natural = 0
    revision_history_limit: Natural = 0
    progress_deadline_seconds: Count = 1
    rollout_on_config_change: Literal["needed", "always", "never"] = "always"
    termination_grace_period_seconds: Count = 1
    lifecycle: Object = {}
    probes: Probes = Probes()
    resources: Object = {}
    pod_security_context: Object = {}
    security_context: Object = {}
    volumes: Volumes = Volumes()
    service_account: ServiceAccount = ServiceAccount()
    service: Service = Service()
    autoscaling: Autoscaling = Autoscaling()
    keda: Keda = Keda()
    vpa: Vpa = Vpa()
    pdb: Pdb = Pdb()
    topology_spread: TopologySpread = TopologySpread()
    topology_spread_constraints: Objects = []
    node_selector: Labels = {}
    tolerations: Objects = []
    affinity: Object = {}
    priority_class_name: Text = ""
    runtime_class_name: Text = ""
    scheduler_name: Text = ""
    host_aliases: Objects = []
    network_policy: NetworkPolicy = NetworkPolicy()
    ingress: Ingress = Ingress()
    service_monitor: Monitor = Monitor()
    pod_monitor: Monitor = Monitor()
    prometheus_rule: Rules = Rules()
    grafana_dashboard: Dashboard = Dashboard()
    deployment_annotations: Labels = {}
    pod_annotations: Labels = {}
    pod_labels: Labels = {}
    extra_env: Objects = []
    extra_env_from: Objects = []
    extra_volumes: Objects = []
    extra_volume_mounts: Objects = []
    extra_containers: Objects = []
    init_containers: Objects = []
    extra_objects: list[Object | NonEmpty] = []
    cluster_domain: NonEmpty = ""
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] = "ClusterFirst"
    dns_config: Object = {}
    test: Test = Test()
    analytics: Analytics = Analytics()
    global_: Object = msgspec.field(default_factory=dict, name="global")
    """Global values that Helm passes down from a parent chart."""


def schema() -> dict[str, Any]:
    """Return the JSON schema of the values, without defaults: values.yaml has those."""
    (root,), definitions = msgspec.json.schema_components([ChartValues], ref_template="#/$defs/{name}")
    tree = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}
    return _without_defaults(tree)  # type: ignore[no-any-return]


def _without_defaults(node: Any) -> Any:
    """Remove `default` from a schema; no property has this name."""
    if isinstance(node, list):
        return [_without_defaults(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {key: _without_defaults(value) for key, value in node.items() if key != "default"}


def defaults() -> dict[str, Any]:
    """Return the proxy's own defaults, for templates that compute with them."""
    found = msgspec.to_builtins(Config())
    assert isinstance(found, dict)
    return found


def chart_defaults() -> dict[str, Any]:
    """Return what values.yaml says: a template sees values only after a user's have been merged into them."""
    found = msgspec.yaml.decode(Path("deploy/helm/pulsar-trio-proxy/values.yaml").read_bytes())
    assert isinstance(found, dict)
    return found


def main() -> None:
    """Print the schema, the proxy's defaults, or the chart's."""
    tree = {"schema": schema, "defaults": defaults, "values": chart_defaults}[sys.argv[1]]()
    print(json.dumps(tree, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
