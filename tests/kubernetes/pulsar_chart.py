"""A release `pulsar` as apache/pulsar-helm-chart 4.7.0 makes it, with the lab's broker behind it.

Names, labels, ports, selectors and Secrets are named as there. Of the brokers there are only the two Services
and a pod's name, which lead to the lab's broker; the proxies are Pulsar's own, in pods of a StatefulSet. These are not
that chart's: the image (the analytics' one, which has Java, with the Pulsar distribution mounted), the command that
starts Java (without its script), shorter pauses of the probes, and the security context, since the namespace enforces
`restricted`.
"""

from __future__ import annotations

import base64
from pathlib import Path

from local import images
from local.distribution import pulsar_home

from tests.e2e.lab.waiting import eventually
from tests.kubernetes.node import SOON_S, Namespace, Object
from tests.kubernetes.scene import BROKER_TLS_PORT, NODE_ADDRESS, Scene

RELEASE = "pulsar"
BROKER, HEADLESS, PROXY = "pulsar-broker", "pulsar-broker-headless", "pulsar-proxy"
PORT, SERVICE_PORT = 6650, 6655
"""The broker's port on the node, and the port behind its Service: there, lookups are answered with the pod's name."""
LABELS = {"app": RELEASE, "release": RELEASE, "component": "proxy"}
REPLICAS = 2
USER = 10001

_PULSAR, _CONFIG, _KEYS, _TOKENS = "/pulsar", "/config", "/pulsar-keys", "/pulsar-tokens"
_JAVA = (
    "java",
    *("-Xms64m", "-Xmx128m", "-XX:MaxDirectMemorySize=128m", "-XX:+UseSerialGC", "-XX:-UseContainerSupport"),
    *("-Dlog4j.configurationFile=log4j2.yaml", "-Dpulsar.log.appender=Console", "-Dpulsar.log.dir=/tmp"),
    *("-Dio.netty.tryReflectionSetAccessible=true", "--add-opens=java.base/java.nio=ALL-UNNAMED"),
    *("--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED", "--add-opens=java.base/sun.net=ALL-UNNAMED"),
    "-cp",
)


def java_command(home: str, config: str) -> list[str]:
    """Return the command that runs Pulsar's proxy of a distribution."""
    paths = f"{home}/conf:{home}/lib/*"
    return [*_JAVA, paths, "org.apache.pulsar.proxy.server.ProxyServiceStarter", "--config", config]


def zone(namespace: str) -> str:
    """Return the domain of a namespace's Services."""
    return f"{namespace}.svc.cluster.local"


def broker_settings(namespace: str) -> dict[str, str]:
    """Return settings of broker.conf by which one broker answers under two names: on its port with the node's address,
    and on SERVICE_PORT with the name of a pod of that chart.
    """
    pod = f"{BROKER}-0.{HEADLESS}.{zone(namespace)}"
    return {
        "bindAddress": "0.0.0.0",
        "advertisedAddress": "",
        "advertisedListeners": (
            f"node:pulsar://{NODE_ADDRESS}:{PORT},node:pulsar+ssl://{NODE_ADDRESS}:{BROKER_TLS_PORT},"
            f"kubernetes:pulsar://{pod}:{PORT}"
        ),
        "internalListenerName": "node",
        "bindAddresses": f"kubernetes:pulsar://0.0.0.0:{SERVICE_PORT}",
    }


def proxy_settings(keys: str = _KEYS, tokens: str = _TOKENS) -> dict[str, str]:
    """Return the settings of proxy.conf that the chart makes, with tokens signed by a shared secret."""
    return {
        "clusterName": RELEASE,
        "statusFilePath": "/tmp/status",
        "webServicePort": "8080",
        "servicePort": str(PORT),
        "brokerServiceURL": f"pulsar://{BROKER}:{PORT}",
        "brokerWebServiceURL": f"http://{BROKER}:8080",
        "authenticationEnabled": "true",
        "authorizationEnabled": "false",
        "forwardAuthorizationCredentials": "true",
        "superUserRoles": "admin,proxy",
        "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"file://{tokens}/TOKEN",
        "tokenSecretKey": f"file://{keys}/SECRETKEY",
        "httpNumThreads": "8",
    }


class PulsarRelease:
    """The objects of the release in the scene's namespace."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.namespace = scene.namespace
        self.proxies = Namespace(scene.namespace.name, RELEASE)
        # Pods of the new chart have the same labels, and one of their own.
        selector = ",".join(f"{key}={value}" for key, value in LABELS.items())
        self.proxies.selector = f"{selector},!app.kubernetes.io/name"

    def add_brokers(self) -> None:
        """Create or change the brokers' Services, their names in DNS, and the Secrets with tokens."""
        broker = self._scene.broker
        self.namespace.apply(
            _secret(f"{RELEASE}-token-symmetric-key", "SECRETKEY", broker.secret_key),
            _secret(f"{RELEASE}-token-proxy-admin", "TOKEN", broker.token_file("proxy")),
            *_service_of_broker(BROKER, SERVICE_PORT, {}),
            *_service_of_broker(HEADLESS, PORT, {"clusterIP": "None", "publishNotReadyAddresses": True}),
        )
        domain = zone(self.namespace.name)
        self._scene.names.add(f"{BROKER}.{domain}", "A", self.address(BROKER))
        for name in (f"{HEADLESS}.{domain}", f"{BROKER}-0.{HEADLESS}.{domain}"):
            self._scene.names.add(name, "A", NODE_ADDRESS)

    def address(self, service: str) -> str:
        """Return a Service's address in the cluster."""
        return str(self.namespace.get("service", service)["spec"]["clusterIP"])

    def add_proxies(self) -> None:
        """Create the proxies, their Service and disruption budget; return when all are ready."""
        self.namespace.apply(*_distribution(self.namespace.name), _proxy_config(), _proxy_service(), _proxies())
        self.add_budget()
        self.proxies.wait_until_settled(REPLICAS)

    def add_budget(self) -> None:
        """Create the proxies' disruption budget (`proxy.pdb.usePolicy: true`)."""
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}
        self.namespace.apply(_object("policy/v1", "PodDisruptionBudget", PROXY, spec=spec))

    def remove_budget(self) -> None:
        """Delete the proxies' disruption budget (`proxy.pdb.usePolicy: false`)."""
        self.namespace.kubectl("delete", "poddisruptionbudget", PROXY)

    def scale_proxies(self, replicas: int) -> None:
        """Set the number of proxies (`proxy.replicaCount`); return when there are exactly so many."""
        self.namespace.kubectl("scale", "statefulset", PROXY, f"--replicas={replicas}")
        if replicas:
            self.proxies.wait_until_settled(replicas)
        else:
            wait_until_gone(self.proxies)

    def remove_proxies(self) -> None:
        """Delete the proxies, their Service and configuration (`components.proxy: false`)."""
        names = (f"statefulset/{PROXY}", f"service/{PROXY}", f"configmap/{PROXY}", f"persistentvolumeclaim/{PROXY}")
        self.namespace.kubectl("delete", *names, "--ignore-not-found")
        self.namespace.kubectl("delete", f"persistentvolume/{PROXY}", "--ignore-not-found")
        self.namespace.kubectl("delete", f"poddisruptionbudget/{PROXY}", "--ignore-not-found")


def wait_until_gone(namespace: Namespace) -> None:
    """Wait until no pod of a selector is left, not even one that is about to go."""

    def gone() -> bool:
        return not namespace.kubectl("get", "pods", "-l", namespace.selector, "-o", "name").strip()

    eventually(gone, what=f"no pod with {namespace.selector} is left", within_s=SOON_S, every_s=1)


def _object(api: str, kind: str, name: str, labels: dict[str, str] | None = None, **parts: object) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels or {}}, **parts}


def _secret(name: str, key: str, file: Path) -> Object:
    return _object("v1", "Secret", name, data={key: base64.b64encode(file.read_bytes()).decode()})


def _service_of_broker(name: str, port: int, spec: Object) -> tuple[Object, Object]:
    """Return a Service without selector, and where it leads: to a port of the node."""
    labels = {**LABELS, "component": "broker"}
    ports = [{"name": "pulsar", "port": PORT, "targetPort": port}]
    slice_ = _object(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        f"{name}-lab",
        {"kubernetes.io/service-name": name},
        addressType="IPv4",
        ports=[{"name": "pulsar", "port": port, "protocol": "TCP"}],
        endpoints=[{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
    )
    return _object("v1", "Service", name, labels, spec={"ports": ports, **spec}), slice_


def _distribution(namespace: str) -> tuple[Object, Object]:
    """Return a volume with the Pulsar distribution of the node, and its claim."""
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    volume = {
        **common,
        "capacity": size,
        "hostPath": {"path": str(pulsar_home()), "type": "Directory"},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": PROXY},
    }
    claim = {**common, "volumeName": PROXY, "resources": {"requests": size}}
    return (
        _object("v1", "PersistentVolume", PROXY, spec=volume),
        _object("v1", "PersistentVolumeClaim", PROXY, spec=claim),
    )


def _proxy_config() -> Object:
    # A Java properties file, where the last of equal keys wins.
    settings = "\n".join(f"{key}={value}" for key, value in proxy_settings().items())
    text = f"{(pulsar_home() / 'conf/proxy.conf').read_text()}\n{settings}\n"
    return _object("v1", "ConfigMap", PROXY, LABELS, data={"proxy.conf": text})


def _proxy_service() -> Object:
    ports = [
        {"name": "http", "port": 80, "targetPort": "sts-http"},
        {"name": "pulsar", "port": PORT, "targetPort": "sts-pulsar"},
    ]
    return _object("v1", "Service", PROXY, LABELS, spec={"ports": ports, "selector": LABELS})


def _proxies() -> Object:
    probe = {"httpGet": {"path": "/status.html", "port": 8080}, "periodSeconds": 3, "timeoutSeconds": 5}
    mounts = {"distribution": _PULSAR, "config": _CONFIG, "token-keys": _KEYS, "proxy-token": _TOKENS}
    container = {
        "name": PROXY,
        "image": images.ANALYTICS.name,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", 'echo OK > /tmp/status && exec "$@"', "sh"],
        "args": java_command(_PULSAR, f"{_CONFIG}/proxy.conf"),
        "ports": [{"name": "sts-http", "containerPort": 8080}, {"name": "sts-pulsar", "containerPort": PORT}],
        "readinessProbe": {**probe, "failureThreshold": 10},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()],
    }
    volumes = [
        {"name": "distribution", "persistentVolumeClaim": {"claimName": PROXY, "readOnly": True}},
        {"name": "config", "configMap": {"name": PROXY}},
        {"name": "token-keys", "secret": {"secretName": f"{RELEASE}-token-symmetric-key"}},
        {"name": "proxy-token", "secret": {"secretName": f"{RELEASE}-token-proxy-admin"}},
    ]
    user = {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "securityContext": user,
        "terminationGracePeriodSeconds": 30,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }
    return _object(
        "apps/v1",
        "StatefulSet",
        PROXY,
        LABELS,
        spec={
            "serviceName": PROXY,
            "replicas": REPLICAS,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": {**LABELS, "cluster": RELEASE}}, "spec": spec},
        },
    )
