"""What all steps share: the broker on the node, the namespace, the chart's values, the ways in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from local import images
from local.standalone import Standalone

from tests.e2e.lab.certificates import Authority
from tests.e2e.lab.dns import NameServer
from tests.e2e.lab.security import NAMESPACE
from tests.kubernetes.node import Namespace, Object, run
from tests.kubernetes.workload import Observation, observed

NODE_ADDRESS = "10.77.0.1"
PORT, TLS_PORT = 30650, 30651
BROKER_TLS_PORT = 6651
CHART_NAMESPACE, RELEASE = "pulsar", "pulsar-trio-proxy"
HTTP_SERVICE = f"{RELEASE}-http"
HTTP_HOST = f"{HTTP_SERVICE}.{CHART_NAMESPACE}"
REPLICAS = 3
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/pulsar-trio-proxy"
HELM_PATIENCE = "--timeout=10m"
Values = dict[str, Any]
NO_STORAGE: Values = {"requests": {"ephemeral-storage": None}, "limits": {"ephemeral-storage": None}}
"""The node's kubelet does not account for its disk (localStorageCapacityIsolation): a request would find no node."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """Return values with those of `over` in their place, table by table."""
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result


def reference(image: images.Image) -> dict[str, str]:
    """Return an image's name and tag as the chart wants them; it is on the node already."""
    repository, _, tag = image.name.rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}


ANALYTICS: Values = {
    "image": reference(images.ANALYTICS),
    "receiver": {"enabled": True, "resources": NO_STORAGE},
    "rollup": {"enabled": True, "resources": NO_STORAGE},
}
"""What steps with the analytics merge their values into; elsewhere the chart would refuse values without an effect."""


class Scene:
    """A secured broker, and a release of the chart in a namespace that enforces `restricted`."""

    def __init__(self, directory: Path, broker: Standalone, names: NameServer, authority: Authority) -> None:
        self.directory = directory
        self.broker = broker
        self.names = names
        self.namespace = Namespace(CHART_NAMESPACE, RELEASE)
        self.authority = authority
        self.values = self._values()

    def _values(self) -> Values:
        return {
            "image": reference(images.PROXY),
            "replicaCount": REPLICAS,
            "config": {
                "cluster": {"forwarders": 1},
                "brokers": {"service_url": f"pulsar://{NODE_ADDRESS}:{self.broker.broker_port}"},
                "metrics": {"count_messages": True},
            },
            "auth": {
                "pulsarRelease": "lab",
                "token": {"enabled": True, "algorithm": "symmetric"},
                "proxyToken": {"enabled": True},
            },
            "tls": {"enabled": True, "keepPlain": True, "existingSecret": "proxy-tls"},
            "service": {"type": "NodePort", "nodePorts": {"pulsar": PORT, "pulsarssl": TLS_PORT}},
            # Three pods, a broker and all clients share two cores here.
            "resources": merged(
                NO_STORAGE, {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "768Mi"}}
            ),
            "test": {"tokenSecret": "client-token", "topic": f"non-persistent://{NAMESPACE}/helm-test"},
        }

    def token(self, role: str = "alice") -> str:
        """Return a role's token."""
        return self.broker.token(role)

    def create_namespace(self) -> None:
        """Create the namespace and the Secrets that the release finds in it."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        manifest = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": self.namespace.name, "labels": labels},
        }
        run(["kubectl", "apply", "-f", "-"], json.dumps(manifest))
        pair = self.authority.server("proxy", NODE_ADDRESS, HTTP_HOST)
        self.secret("lab-authority", **{"ca.crt": Path(self.authority.file)})
        self.secret("lab-token-symmetric-key", SECRETKEY=self.broker.secret_key)
        self.secret("lab-token-proxy-admin", TOKEN=self.broker.token_file("proxy"))
        self.secret("client-token", TOKEN=self.broker.token_file("alice"))
        self.namespace.kubectl(
            "create", "secret", "tls", "proxy-tls", f"--cert={pair.certificate}", f"--key={pair.key}"
        )

    def secret(self, name: str, **files: Path) -> None:
        """Create a Secret of files."""
        arguments = [f"--from-file={key}={path}" for key, path in files.items()]
        self.namespace.kubectl("create", "secret", "generic", name, *arguments)

    def install(self, **over: Any) -> list[Object]:
        """Install or upgrade the release with some other values; returns the pods when all is settled."""
        return self.apply(merged(self.values, over))

    def apply(self, values: Values, chart: Path = CHART, options: Sequence[str] = ()) -> list[Object]:
        """Install or upgrade the release of a chart with exactly these values; returns the pods when all is settled."""
        path = self.write_values(values)
        # Helm 4 applies on the server, and refuses to overwrite what another has patched: as a step here does.
        always = ("--install", "--force-conflicts", "--wait", HELM_PATIENCE)
        self.namespace.helm("upgrade", RELEASE, str(chart), "-f", str(path), *always, *options)
        self._name_service(RELEASE)
        if values.get("http", {}).get("enabled"):
            self._name_service(HTTP_SERVICE)
        return self.namespace.wait_until_settled(values["replicaCount"])

    def _name_service(self, service: str) -> None:
        self.names.add(f"{service}.{self.namespace.name}.svc.cluster.local", "A", self.address_of(service))

    def address_of(self, service: str) -> str:
        """Return the address of a Service in the cluster."""
        return str(self.namespace.get("service", service)["spec"]["clusterIP"])

    def write_values(self, values: Values) -> Path:
        """Write values into a file for Helm; returns its path."""
        path = self.directory / "values.json"  # JSON is YAML
        path.write_text(json.dumps(values))
        return path

    def observed(self, name: str, clients: int, **options: object) -> AbstractContextManager[Observation]:
        """Run so many clients, and newcomers, through the node's port for as long as the block."""
        return observed(self.directory, name, NODE_ADDRESS, PORT, self.token(), clients=clients, **options)

    def topic(self, name: str) -> str:
        """Return a new topic's name."""
        return f"persistent://{NAMESPACE}/{name}-{time.time_ns()}"
