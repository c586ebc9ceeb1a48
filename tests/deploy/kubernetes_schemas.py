"""JSON schemas for kubeconform, made of what Kubernetes and the operators ship: no address is asked.

Objects are closed: a field that the API does not have is an error, as with `kubectl apply --validate=strict`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from local import go_tools
from local.kubernetes_definitions import closed, reachable

LOCATION = "{{ .Group }}_{{ .ResourceAPIVersion }}_{{ .ResourceKind }}.json"
_PROMETHEUS, _CERT_MANAGER, _KEDA, _VPA, _GATEWAY = go_tools.MODULES[-5:]
_SPECIFICATIONS = "api/openapi-spec/v3"
_APIS = (
    "api__v1",
    "apis__apps__v1",
    "apis__autoscaling__v2",
    "apis__batch__v1",
    "apis__networking.k8s.io__v1",
    "apis__policy__v1",
    "apis__rbac.authorization.k8s.io__v1",
)
_KINDS = {
    "ClusterRoleBinding", "ConfigMap", "CronJob", "DaemonSet", "Deployment", "HorizontalPodAutoscaler", "Ingress",
    "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Role", "RoleBinding", "Secret", "Service",
    "ServiceAccount", "StatefulSet",
}  # fmt: skip
_CRDS = {
    _PROMETHEUS: tuple(
        f"example/prometheus-operator-crd/monitoring.coreos.com_{plural}.yaml"
        for plural in ("podmonitors", "prometheusrules", "servicemonitors")
    ),
    _CERT_MANAGER: ("deploy/crds/cert-manager.io_certificates.yaml",),
    _KEDA: ("config/crd/bases/keda.sh_scaledobjects.yaml",),
    _VPA: ("deploy/vpa-v1-crd-gen.yaml",),
    _GATEWAY: tuple(
        f"config/crd/standard/gateway.networking.k8s.io_{plural}.yaml"
        for plural in ("httproutes", "tcproutes", "tlsroutes")
    ),
}
_REFERENCE = "#/components/schemas/"


def write_schemas(out: Path, kubernetes: str) -> None:
    """A file for each kind that the chart may have, as this version of Kubernetes knows it."""
    root = go_tools.module_directory(go_tools.KUBERNETES[kubernetes]) / _SPECIFICATIONS
    for api in _APIS:
        for name, schema in _of_api(json.loads((root / f"{api}_openapi.json").read_text())):
            (out / name).write_text(json.dumps(schema))
    for module, paths in _CRDS.items():
        for path in paths:
            for definition in yaml.safe_load_all((go_tools.module_directory(module) / path).read_text()):
                for name, schema in _of_definition(definition):
                    (out / name).write_text(json.dumps(schema))


def _of_api(specification: Any) -> Iterator[tuple[str, Any]]:
    schemas = specification["components"]["schemas"]
    for name, schema in schemas.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            if kind["kind"] in _KINDS:
                reached = {one: closed(schemas[one]) for one in reachable([name], schemas, _REFERENCE)}
                tree = {"$ref": f"{_REFERENCE}{name}", "components": {"schemas": reached}}
                yield file_name(kind["group"], kind["version"], kind["kind"]), tree


def _of_definition(definition: Any) -> Iterator[tuple[str, Any]]:
    spec = definition["spec"]
    for version in spec["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object"}
        yield file_name(spec["group"], version["name"], spec["names"]["kind"]), closed(schema)


def file_name(group: str, version: str, kind: str) -> str:
    """The name under which kubeconform looks for it, by LOCATION; it takes the version for the group of `v1`."""
    return f"{group or version}_{version}_{kind.lower()}.json"
