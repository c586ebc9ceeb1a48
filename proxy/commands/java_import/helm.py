"""Values of charts for Java's proxy (apache/pulsar-helm-chart, streamnative/charts) as values of this project's chart.

They are read as JSON (`helm get values RELEASE -o json`), for which no further library is needed. The table has a line
for each value that is known; the keys of proxy.conf in `proxy.configData` go through the table of `keys`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.commands.java_import.conversion import import_values
from proxy.commands.java_import.properties import ENVIRONMENT_PREFIX
from proxy.commands.java_import.result import printable_json
from proxy.common.errors import ConfigError
from proxy.common.shape import convert
from proxy.common.suggestions import quote_name
from proxy.config.types import Config

GRACE_S_MIN = 75
HTTP_PORT, ADMIN_PORT = 8081, 8080
"""This chart's defaults."""
_DERIVED = {"brokerServiceURL": "pulsar://brokers", "brokerWebServiceURL": "http://brokers"}
"""URLs that the other chart writes into its proxy.conf by itself, as this one does."""
_CHART_TABLES = frozenset(
    {"plain listener", "TLS listener", "listener.tls", "admin", "brokers.credentials"}
    | {"plain http_listener", "TLS http_listener", "http_listener.tls"}
)
"""What this chart derives from values of its own."""
_JAVA_VARIABLES = ("PULSAR_MEM", "PULSAR_GC", "PULSAR_EXTRA_OPTS", "PULSAR_LOG", "BOOKIE_", "OPTS")


class Value(NamedTuple):
    """A value of the other charts: where it goes, or why it does not."""

    target: str = ""
    reason: str = ""
    lost: bool = False
    note: str = ""


def _lost(reason: str) -> Value:
    return Value(reason=reason, lost=True)


_RESOURCES = "they were sized for a JVM; this chart's own defaults are in docs/installation.md"

VALUES: dict[str, Value] = {
    "proxy.replicaCount": Value("replicaCount"),
    "proxy.autoscaling.enabled": Value("autoscaling.enabled"),
    "proxy.autoscaling.minReplicas": Value("autoscaling.minReplicas"),
    "proxy.autoscaling.maxReplicas": Value("autoscaling.maxReplicas"),
    "proxy.autoscaling.metrics": Value("autoscaling.metrics"),
    "proxy.autoscaling.behavior": Value("autoscaling.behavior"),
    "proxy.updateStrategy": Value(reason="it is a StatefulSet's; this chart has a Deployment"),
    "proxy.podManagementPolicy": Value(reason="it is a StatefulSet's; this chart has a Deployment"),
    "proxy.pdb.usePolicy": Value("pdb.enabled"),
    "proxy.pdb.maxUnavailable": Value("pdb.maxUnavailable"),
    "proxy.resources": Value("resources", note=_RESOURCES),
    "proxy.nodeSelector": Value("nodeSelector"),
    "proxy.tolerations": Value("tolerations"),
    "proxy.topologySpreadConstraints": Value("topologySpreadConstraints"),
    "proxy.priorityClassName": Value("priorityClassName"),
    "proxy.annotations": Value("podAnnotations"),
    "proxy.appAnnotations": Value("deploymentAnnotations"),
    "proxy.labels": Value("podLabels"),
    "proxy.service_account.annotations": Value("serviceAccount.annotations"),
    "proxy.serviceAccount.create": Value("serviceAccount.create"),
    "proxy.serviceAccount.name": Value("serviceAccount.name"),
    "proxy.serviceAccount.annotations": Value("serviceAccount.annotations"),
    "proxy.securityContext": Value("podSecurityContext"),
    "proxy.probe": Value(reason="the probes of this chart are its own: other paths, other times"),
    "proxy.waitZookeeperTimeout": Value(reason="the proxy waits for no other service: /readyz tells"),
    "proxy.waitOxiaTimeout": Value(reason="the proxy waits for no other service: /readyz tells"),
    "proxy.waitBrokerTimeout": Value(reason="the proxy waits for no other service: /readyz tells"),
    "proxy.restartPodsOnConfigMapChange": Value(reason="a changed configuration is applied; see rolloutOnConfigChange"),
    "proxy.component": Value(reason="it names the other chart's pods"),
    "proxy.extraEnvs": Value("extraEnv", note="variables of Pulsar's image have no meaning in this one"),
    "proxy.extraVolumes": Value("extraVolumes"),
    "proxy.extraVolumeMounts": Value("extraVolumeMounts"),
    "proxy.initContainers": Value("initContainers"),
    "proxy.additionalCommand": _lost("it is a command of Pulsar's image"),
    "proxy.podMonitor.enabled": Value("podMonitor.enabled"),
    "proxy.podMonitor.interval": Value("podMonitor.interval"),
    "proxy.podMonitor.scrapeTimeout": Value("podMonitor.scrapeTimeout"),
    "proxy.podMonitor.metricRelabelings": _lost(
        "metrics have other names; usage needs pulsar_proxy_principal_…_created"
    ),
    "proxy.podMonitor.dropUnderscoreCreatedMetrics": Value(reason="usage needs pulsar_proxy_principal_…_created"),
    "proxy.service.type": Value("service.type"),
    "proxy.service.annotations": Value("service.annotations"),
    "proxy.service.loadBalancerIP": Value("service.loadBalancerIP"),
    "proxy.service.loadBalancerClass": Value("service.loadBalancerClass"),
    "proxy.service.externalTrafficPolicy": Value("service.externalTrafficPolicy"),
    "proxy.service.loadBalancerSourceRanges": Value("service.loadBalancerSourceRanges"),
    "proxy.service.nodePorts.pulsar": Value("service.nodePorts.pulsar"),
    "proxy.service.nodePorts.pulsarssl": Value("service.nodePorts.pulsarssl"),
    "proxy.service.nodePorts.http": Value("service.nodePorts.http"),
    "proxy.service.nodePorts.https": Value("service.nodePorts.http"),
    "proxy.ports.pulsar": Value("service.ports.pulsar"),
    "proxy.ports.pulsarssl": Value("service.ports.pulsarssl"),
    "proxy.ports.http": Value("service.ports.http"),
    "proxy.ports.https": Value("service.ports.http"),
    "proxy.ports.containerPorts.pulsar": Value("ports.pulsar"),
    "proxy.ports.containerPorts.pulsarssl": Value("ports.pulsarssl"),
    "proxy.ports.containerPorts.http": Value("ports.http"),
    "proxy.ports.containerPorts.https": Value("ports.http"),
    "proxy.ingress.annotations": Value("http.ingress.annotations"),
    "proxy.ingress.ingressClassName": Value("http.ingress.className"),
    "proxy.ingress.hostname": Value("http.ingress.hostname"),
    "proxy.ingress.pathType": Value(reason="paths are prefixes, of whole segments"),
    "auth.superUsers.proxy": Value("auth.proxyToken.role"),
}


@dataclass
class HelmResult:
    """Values of this chart, and what became of those of the other one."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    needless: list[tuple[str, str]] = field(default_factory=list)

    def put(self, target: str, value: Any, origin: str) -> None:
        """Set a value by its path."""
        node = self.values
        *tables, key = target.split(".")
        for table in tables:
            node = node.setdefault(table, {})
        node[key] = value
        self.origins.setdefault(target, []).append(origin)

    def to_yaml(self, source: str) -> str:
        """Return the values as YAML; scalars and lists as JSON, which is YAML, too."""
        lines = [f"# Made by `pulsar-trio-proxy import --helm` from {quote_name(source)}.", *_yaml(self, self.values)]
        for title, entries in (
            ("Not carried over:", self.lost),
            ("Look at these:", self.notes),
            ("Needs nothing here:", self.needless),
        ):
            if entries:
                lines += ["", f"# {title}", *(f"# * {name}: {reason}" for name, reason in entries)]
        return "\n".join(lines) + "\n"


def _yaml(result: HelmResult, node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in node.items():
        below = f"{path}{key}"
        if below in result.origins:
            yield f"{indent}# {', '.join(result.origins[below])}"
            yield f"{indent}{key}: {printable_json(value)}"
        else:
            yield f"{indent}{key}:"
            yield from _yaml(result, value, f"{below}.")


def import_helm(data: bytes, release: str) -> HelmResult:
    """Turn the JSON of the other chart's values into this chart's. Raises ConfigError."""
    try:
        tree = json.loads(data)
        json.dumps(tree, ensure_ascii=False).encode()  # JSON may have halves of characters, which no file holds
    except (ValueError, RecursionError):
        raise ConfigError("is no JSON; `helm get values RELEASE -o json` writes it") from None
    if not isinstance(tree, dict):
        raise ConfigError("holds no values: a JSON object is wanted")
    result = HelmResult()
    tls = bool(_mapping(tree, "tls").get("enabled") and _mapping(tree, "tls", "proxy").get("enabled"))
    proxy = _without_unused_ports(result, _mapping(tree, "proxy"), tls=tls)
    _walk(result, proxy, "proxy", release)
    _http(result)
    _tls(result, tree)
    _authentication(result, tree)
    if "service_url" not in result.values.get("config", {}).get("brokers", {}):
        result.notes.append(("brokers", "set brokers.pulsarRelease to the name of the other chart's release"))
    convert(result.values.get("config", {}), Config)
    return result


def _without_unused_ports(result: HelmResult, proxy: Mapping[str, Any], *, tls: bool) -> Mapping[str, Any]:
    """Return the proxy's values without the ports of listeners that it does not have: with TLS it has no plain ones,
    except in the pod one for metrics, which is the admin port here; and without those of an Ingress that is off.
    """
    unused = ("pulsar", "http") if tls else ("pulsarssl", "https")
    copied = json.loads(json.dumps(proxy))
    containers = _mapping(copied, "ports", "containerPorts")
    if tls and isinstance(containers, dict) and (admin := containers.pop("http", None)):
        result.put("ports.admin", admin, "proxy.ports.containerPorts.http")
    for path in (("ports",), ("ports", "containerPorts"), ("service", "nodePorts")):
        ports = _mapping(copied, *path)
        for name in unused:
            if isinstance(ports, dict) and ports.pop(name, None):
                reason = f"there is no such port {'with' if tls else 'without'} tls.proxy.enabled"
                result.needless.append((".".join(("proxy", *path, name)), reason))
    return _mapping({"proxy": copied}, "proxy")


def _mapping(tree: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _walk(result: HelmResult, node: Any, path: str, release: str) -> None:
    """Convert all values below a path of the other chart's; a line of the table takes all that is below its path."""
    group = _GROUPS.get(path)
    known = VALUES.get(path)
    if group is not None:
        group(result, node, release)
    elif known is not None and not (isinstance(node, dict) and _has_lines_below(path)):
        _apply(result, known, path, node)
    elif isinstance(node, dict) and (path == "proxy" or _has_lines_below(path)):
        for key, value in node.items():
            _walk(result, value, f"{path}.{key}", release)
    else:
        shown = path if path.isascii() and path.isprintable() else quote_name(path)
        fallback = next((value for name, value in VALUES.items() if path.startswith(f"{name}.")), None)
        _apply(result, fallback or _lost("there is no such value here"), shown, node)


def _has_lines_below(path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in (*VALUES, *_GROUPS))


def _apply(result: HelmResult, known: Value, path: str, value: Any) -> None:
    if known.target and not value and isinstance(value, str | None):
        return  # as if it were not there
    if known.target:
        result.put(known.target, value, path)
        if known.note:
            result.notes.append((path, known.note))
    elif known.lost and value:  # what is false or empty asks for nothing
        result.lost.append((path, known.reason))
    else:
        result.needless.append((path, known.reason))


# ---- what needs several values


def _grace(result: HelmResult, value: Any, _release: str) -> None:
    path = "proxy.gracePeriod"
    if isinstance(value, int) and value >= GRACE_S_MIN:
        result.put("terminationGracePeriodSeconds", value, path)
    else:
        result.needless.append((path, f"a drain needs more: terminationGracePeriodSeconds is {GRACE_S_MIN}"))


def _affinity(result: HelmResult, value: Any, _release: str) -> None:
    """Turn the other charts' rule against two pods on one host into a spread over hosts."""
    path = "proxy.affinity"
    rules = value if isinstance(value, dict) else {}
    if rules.get("anti_affinity", True):
        required = str(rules.get("type", "required")).startswith("required")
        result.put("topologySpread.hosts", "DoNotSchedule" if required else "ScheduleAnyway", path)
    else:
        result.put("topologySpread.hosts", "", path)
    further = sorted(set(rules) - {"anti_affinity", "type", "anti_affinity_topology_key"})
    if further or rules.get("anti_affinity_topology_key", "kubernetes.io/hostname") != "kubernetes.io/hostname":
        result.lost.append((path, "write its further rules as affinity or topologySpreadConstraints"))


def _config_data(result: HelmResult, value: Any, release: str) -> None:
    """Put the keys of proxy.conf through the same table as `import` does; this chart derives listeners and the like."""
    path = "proxy.configData"
    data = value if isinstance(value, dict) else {}
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX): text if isinstance(text, str) else json.dumps(text)
        for name, text in data.items()
    }
    for name in [name for name in given if name.startswith(_JAVA_VARIABLES)]:
        del given[name]
        result.needless.append((f"{path}.{name}" if name.isprintable() else path, "it is about Java"))
    imported = import_values({**_DERIVED, **given}, release)
    for table, entries in imported.tables.items():
        for entry in entries:
            names = [name for name in entry.names if name in given]
            if not names or entry.value is None:
                continue
            if table in _CHART_TABLES:
                result.lost.append(
                    (f"{path}.{names[0]}", "this chart has values for it: ports, tls, auth, adminToken, proxyProtocol")
                )
            else:
                result.put(f"config.{table}.{entry.key}", entry.value, f"{path}.{names[0]}")
    quoted = {*given, *(quote_name(name) for name in given)}
    result.lost += [(f"{path}.{name}", reason) for name, reason in imported.lost if name in quoted]
    result.needless += [(f"{path}.{name}", reason) for name, reason in imported.needless if name in quoted]


def _ingress(result: HelmResult, value: Any, release: str) -> None:
    """Convert the Ingress, which in both charts leads to HTTP alone."""
    path = "proxy.ingress"
    rules = dict(value) if isinstance(value, dict) else {}
    if not rules.pop("enabled", False):
        result.needless.append((path, "it is not enabled"))
        return
    result.put("http.ingress.enabled", True, f"{path}.enabled")
    tls = _mapping(rules, "tls")
    rules.pop("tls", None)
    if tls.get("enabled"):
        if tls.get("secretName"):
            result.put("http.ingress.tlsSecret", tls["secretName"], f"{path}.tls.secretName")
        else:
            result.notes.append((f"{path}.tls", "it names no Secret: the controller's own certificate counts"))
    place = rules.pop("path", "/")
    if place == "/":
        result.notes.append((path, "http.paths says what of / is reachable: /admin and /lookup"))
    else:
        result.put("http.paths", [place], f"{path}.path")
    if not rules.get("hostname"):
        result.lost.append((path, "name the host in http.ingress.hostname: without one, all hosts would lead there"))
    for key, one in rules.items():
        _walk(result, one, f"{path}.{key}", release)


def _http(result: HelmResult) -> None:
    """Enable HTTP where the values are about it; the other chart always has it, at the Service for clients."""
    values = result.values
    config = _mapping(values, "config")
    named = [
        _mapping(values, *path).get("http") for path in (("ports",), ("service", "ports"), ("service", "nodePorts"))
    ]
    if not (
        any(named)
        or _mapping(values, "http")
        or config.get("http")
        or _mapping(config, "brokers").get("web_service_url")
    ):
        result.notes.append(
            ("proxy", "HTTP, which the other chart always serves, is off: see http.enabled and http.inClientsService")
        )
        return
    result.put("http.enabled", True, "ports, Ingress or configuration of HTTP")
    result.put("http.inClientsService", True, "the other chart's Service leads to HTTP, too")
    ports = {"http": HTTP_PORT, "admin": ADMIN_PORT, **_mapping(values, "ports")}
    if ports["http"] == ports["admin"]:
        moved = "http" if "admin" in _mapping(values, "ports") else "admin"
        result.put(
            f"ports.{moved}", HTTP_PORT if ports["http"] != HTTP_PORT else ADMIN_PORT, "the other one has its port"
        )


_GROUPS: dict[str, Callable[[HelmResult, Any, str], None]] = {
    "proxy.gracePeriod": _grace,
    "proxy.affinity": _affinity,
    "proxy.configData": _config_data,
    "proxy.ingress": _ingress,
}


def _tls(result: HelmResult, tree: Mapping[str, Any]) -> None:
    enabled = bool(_mapping(tree, "tls").get("enabled"))
    proxy = _mapping(tree, "tls", "proxy")
    if enabled and _mapping(tree, "tls", "broker").get("enabled"):
        result.put("brokers.tls", True, "tls.broker.enabled")
        result.lost.append(
            ("tls.broker", "name the Secret with the authority of its certificate in brokerTls.ca.secret")
        )
    if not (enabled and proxy.get("enabled")):
        return
    result.put("tls.enabled", True, "tls.proxy.enabled")
    for key in ("dnsNames", "ipAddresses"):
        if proxy.get(key):
            result.needless.append((f"tls.proxy.{key}", f"the certificate has them; see tls.certManager.{key}"))
    result.lost.append(
        ("tls.proxy.cert_name", "name its Secret in tls.existingSecret (<release>-<cert_name>), or use tls.certManager")
    )


def _authentication(result: HelmResult, tree: Mapping[str, Any]) -> None:
    """Use the Secrets that the other chart has, and name what is no token: authentication is never silently off."""
    authentication = _mapping(tree, "auth", "authentication")
    if not authentication.get("enabled"):
        return
    jwt, openid = _mapping(authentication, "jwt"), _mapping(authentication, "openid")
    if jwt.get("enabled") or authentication.get("provider") == "jwt":
        path = "auth.authentication.jwt"
        symmetric = jwt.get("usingSecretKey") or _mapping(tree, "auth").get("usingSecretKey")
        result.put("auth.token.enabled", True, path)
        result.put("auth.token.algorithm", "symmetric" if symmetric else "asymmetric", path)
        result.put("auth.proxyToken.enabled", True, path)
        role = _mapping(tree, "auth", "superUsers").get("proxy")
        if role:
            _apply(result, VALUES["auth.superUsers.proxy"], "auth.superUsers.proxy", role)
    else:
        result.put("config.authentication.enabled", True, "auth.authentication.enabled")
        result.lost.append(("auth.authentication", "only tokens by key are known: write config.authentication"))
    if openid.get("enabled"):
        result.lost.append(("auth.authentication.openid", "write config.authentication.oidc"))
