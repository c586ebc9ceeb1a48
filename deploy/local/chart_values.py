"""The tables of the Helm chart's values, from which local.chart_schema makes values.schema.json.

`config` is the proxy's configuration itself, so a new key there is valid here. Objects that are copied to the manifests
(tolerations, affinity, …) have Kubernetes' own definitions (local.kubernetes_rules), strings a format.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from local.chart_analytics import Analytics
from local.chart_types import (
    Address,
    AddressOrEmpty,
    Affinity,
    Annotations,
    Behavior,
    Cidr,
    ClusterIp,
    Container,
    Count,
    CountOrPercent,
    DaemonSetStrategy,
    DataKey,
    DataKeyOrEmpty,
    DeploymentStrategy,
    DnsConfig,
    Duration,
    EgressRule,
    EnvFrom,
    EnvVar,
    HostAlias,
    HostName,
    HostNameOrEmpty,
    ImageValues,
    Label,
    Labels,
    Lifecycle,
    Metric,
    Name,
    Natural,
    NodePort,
    NonEmpty,
    Object,
    PathPrefix,
    Peer,
    PodSecurityContext,
    Port,
    PortName,
    Qualified,
    Reference,
    Relabeling,
    Resources,
    RouteHostName,
    SecretName,
    SecurityContext,
    ServiceName,
    Size,
    SpreadConstraint,
    Text,
    Toleration,
    Values,
    Volume,
    VolumeMount,
    WhenUnsatisfiable,
)
from proxy.config.types import Config
from proxy.config.types.base import TlsCiphers, TlsGroups, TlsVersion


class PortNames(Values, frozen=True):
    pulsar: PortName = ""
    pulsarssl: PortName = ""
    pulsarsni: PortName = ""
    http: PortName = ""


class Ports(Values, frozen=True):
    pulsar: Port = 0
    pulsarssl: Port = 0
    pulsarsni: Port = 0
    http: Port = 0
    admin: Port = 0
    names: PortNames = PortNames()


class KeyOfSecret(Values, frozen=True):
    secret: Name = ""
    key: DataKey = ""


class NameAndKey(Values, frozen=True):
    name: Name = ""
    key: DataKeyOrEmpty = ""


class IssuerRef(Values, frozen=True):
    name: Name = ""
    kind: NonEmpty = ""
    group: HostName = ""


class CertManager(Values, frozen=True):
    enabled: bool = False
    issuer_ref: IssuerRef = IssuerRef()
    service_names: bool = True
    dns_names: list[HostName] = []
    ip_addresses: list[Address] = []
    duration: Duration = ""
    renew_before: Duration = ""


class Tls(Values, frozen=True):
    enabled: bool = False
    keep_plain: bool = False
    existing_secret: Name = ""
    certificates: Annotated[list[SecretName], Meta(max_length=100)] = []
    minimum_version: TlsVersion = "1.2"
    session_tickets: bool = False
    ciphers: TlsCiphers = ""
    groups: TlsGroups = ()
    require_client_certificate: bool = False
    client_ca: KeyOfSecret = KeyOfSecret()
    client_crl: KeyOfSecret = KeyOfSecret()
    cert_manager: CertManager = CertManager()


class Sni(Values, frozen=True):
    enabled: bool = False


class ProxyProtocol(Values, frozen=True):
    mode: Literal["off", "optional", "required"] = "off"
    sources: tuple[Cidr, ...] = ()


class HttpIngress(Values, frozen=True):
    enabled: bool = False
    class_name: Name = ""
    annotations: Annotations = {}
    hostname: HostNameOrEmpty = ""
    tls_secret: Name = ""


class Http(Values, frozen=True):
    enabled: bool = False
    existing_secret: Name = ""
    plain: bool = False
    in_clients_service: bool = False
    paths: Annotated[list[PathPrefix], Meta(min_length=1, max_length=64)] = []
    ingress: HttpIngress = HttpIngress()


class ParentRef(Values, frozen=True):
    name: SecretName
    namespace: Label = ""
    section_name: Name = ""
    port: Port = 0
    group: HostNameOrEmpty = ""
    kind: NonEmpty = ""


ParentRefs = Annotated[list[ParentRef], Meta(min_length=1, max_length=32)]


class HttpRoute(Values, frozen=True):
    parent_refs: ParentRefs
    hostnames: Annotated[list[RouteHostName], Meta(max_length=16)] = []


class TcpRoute(Values, frozen=True):
    parent_refs: ParentRefs


class TlsRoute(Values, frozen=True):
    parent_refs: ParentRefs
    hostnames: Annotated[list[RouteHostName], Meta(min_length=1, max_length=16)]


class RouteVersions(Values, frozen=True):
    tcp_route: Literal["v1", "v1alpha2"] = "v1"
    tls_route: Literal["v1", "v1alpha2"] = "v1"


class Gateway(Values, frozen=True):
    http_routes: dict[str, HttpRoute] = {}
    tcp_routes: dict[str, TcpRoute] = {}
    tls_routes: dict[str, TlsRoute] = {}
    annotations: Annotations = {}
    versions: RouteVersions = RouteVersions()


class Brokers(Values, frozen=True):
    pulsar_release: Label = ""
    namespace: Label = ""
    tls: bool = False


class BrokerTls(Values, frozen=True):
    ca: KeyOfSecret = KeyOfSecret()
    certificate_secret: Name = ""


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
    pulsar_release: Label = ""
    token: TokenAuth = TokenAuth()
    deny_list: KeyOfSecret = KeyOfSecret()
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
    update_strategy: DaemonSetStrategy = {}


class Workload(Values, frozen=True):
    kind: Literal["Deployment", "DaemonSet"] = "Deployment"
    daemon_set: DaemonSet = DaemonSet()


class Volumes(Values, frozen=True):
    size_limit: Size = ""


class ServiceAccount(Values, frozen=True):
    create: bool = True
    name: Name = ""
    annotations: Annotations = {}
    bind_issuer_discovery: bool = False


class HealthCheck(Values, frozen=True):
    interval_seconds: Natural = 0
    failure_threshold: Count = 1


class Service(Values, frozen=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: Annotations = {}
    labels: Labels = {}
    ports: dict[str, Port] = {}
    node_ports: dict[str, NodePort] = {}
    cluster_ip: ClusterIp = msgspec.field(default="", name="clusterIP")
    load_balancer_class: Qualified = ""
    load_balancer_ip: AddressOrEmpty = msgspec.field(default="", name="loadBalancerIP")
    load_balancer_source_ranges: list[Cidr] = []
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
    metrics: list[Metric] = []
    behavior: Behavior = {}


class Keda(Values, frozen=True):
    enabled: bool = False
    server_address: Text = ""
    query: Text = ""
    target_average: Count = 1
    polling_interval: Count = 1
    metadata: Labels = {}
    authentication_ref: Object = {}
    triggers: list[Object] = []


class Vpa(Values, frozen=True):
    enabled: bool = False


class Pdb(Values, frozen=True):
    enabled: bool = True
    max_unavailable: CountOrPercent = 1
    min_available: CountOrPercent = ""
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow", "IfHealthyBudget"] = "AlwaysAllow"


class ConfigCheck(Values, frozen=True):
    enabled: bool = True
    connect: bool = True
    retries: Natural = 0
    timeout_seconds: Count = 1


class TopologySpread(Values, frozen=True):
    zones: WhenUnsatisfiable = ""
    hosts: WhenUnsatisfiable = ""


class NetworkPolicy(Values, frozen=True):
    enabled: bool = True
    clients: list[Peer] = []
    http: list[Peer] = []
    admin: list[Peer] = []
    egress_mode: Literal["configured", "open"] = "configured"
    egress: list[EgressRule] = []


class Ingress(Values, frozen=True):
    enabled: bool = False
    class_name: Name = ""
    annotations: Annotations = {}
    hostname: HostNameOrEmpty = ""
    paths: list[Literal["/metrics", "/status", "/readyz", "/healthz"]] = []
    tls_secret: Name = ""


class Monitor(Values, frozen=True):
    enabled: bool = False
    labels: Labels = {}
    interval: Duration = ""
    scrape_timeout: Duration = ""
    relabelings: list[Relabeling] = []
    metric_relabelings: list[Relabeling] = []


class Rules(Values, frozen=True):
    enabled: bool = False
    compatibility: bool = False
    labels: Labels = {}


class Dashboard(Values, frozen=True):
    enabled: bool = False
    labels: Labels = {}
    annotations: Annotations = {}


class Test(Values, frozen=True):
    enabled: bool = True
    http: bool = True
    command: list[NonEmpty] = []
    topic: NonEmpty = ""
    host: Text = ""
    token_secret: Name = ""
    token_key: DataKey = ""
    ca_secret: Name = ""
    ca_key: DataKey = ""
    client_certificate_secret: Name = ""
    timeout_seconds: Count = 1
    attempts: Count = 1


class ChartValues(Values, frozen=True):
    enabled: bool = True
    """For a parent chart's `condition`; Helm passes it down, no template reads it."""
    name_override: Label = ""
    fullname_override: ServiceName = ""
    common_labels: Labels = {}
    common_annotations: Annotations = {}
    image: ImageValues = ImageValues()
    image_pull_secrets: list[Reference] = []
    command: list[NonEmpty] = []
    config: Config = Config()
    bind_address: Literal["0.0.0.0", "[::]"] = "0.0.0.0"
    ports: Ports = Ports()
    tls: Tls = Tls()
    sni: Sni = Sni()
    proxy_protocol: ProxyProtocol = ProxyProtocol()
    http: Http = Http()
    gateway: Gateway = Gateway()
    brokers: Brokers = Brokers()
    broker_tls: BrokerTls = BrokerTls()
    auth: Auth = Auth()
    admin_token: KeyOfSecret = KeyOfSecret()
    workload: Workload = Workload()
    replica_count: Natural = 1
    update_strategy: DeploymentStrategy = {}
    min_ready_seconds: Natural = 0
    revision_history_limit: Natural = 0
    progress_deadline_seconds: Count = 1
    rollout_on_config_change: Literal["needed", "always", "never"] = "always"
    config_check: ConfigCheck = ConfigCheck()
    termination_grace_period_seconds: Count = 1
    lifecycle: Lifecycle = {}
    probes: Probes = Probes()
    resources: Resources = {}
    pod_security_context: PodSecurityContext = {}
    security_context: SecurityContext = {}
    volumes: Volumes = Volumes()
    service_account: ServiceAccount = ServiceAccount()
    service: Service = Service()
    autoscaling: Autoscaling = Autoscaling()
    keda: Keda = Keda()
    vpa: Vpa = Vpa()
    pdb: Pdb = Pdb()
    topology_spread: TopologySpread = TopologySpread()
    topology_spread_constraints: list[SpreadConstraint] = []
    node_selector: Labels = {}
    tolerations: list[Toleration] = []
    affinity: Affinity = {}
    priority_class_name: Name = ""
    runtime_class_name: Name = ""
    scheduler_name: Name = ""
    host_aliases: list[HostAlias] = []
    network_policy: NetworkPolicy = NetworkPolicy()
    ingress: Ingress = Ingress()
    service_monitor: Monitor = Monitor()
    pod_monitor: Monitor = Monitor()
    prometheus_rule: Rules = Rules()
    grafana_dashboard: Dashboard = Dashboard()
    deployment_annotations: Annotations = {}
    pod_annotations: Annotations = {}
    pod_labels: Labels = {}
    extra_env: list[EnvVar] = []
    extra_env_from: list[EnvFrom] = []
    extra_volumes: list[Volume] = []
    extra_volume_mounts: list[VolumeMount] = []
    extra_containers: list[Container] = []
    init_containers: list[Container] = []
    extra_objects: list[Object | NonEmpty] = []
    cluster_domain: HostName = ""
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] = "ClusterFirst"
    dns_config: DnsConfig = {}
    test: Test = Test()
    analytics: Analytics = Analytics()
    global_: Object = msgspec.field(default_factory=dict, name="global")
    """Global values that Helm passes down from a parent chart."""
