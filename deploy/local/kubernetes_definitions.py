"""Kubernetes' own definitions of the objects that the chart's values may hold, such as tolerations and volumes.

`kubernetes_definitions.json` has them without descriptions, closed: a field that Kubernetes does not know is an error.
``python -m local.kubernetes_definitions`` makes it of the OpenAPI descriptions in Kubernetes' Go module. It is
committed, so that `make generate` needs no Go; a test compares it with the module.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from local import go_tools

Schema = dict[str, Any]

FILE = Path(__file__).with_suffix(".json")
REFERENCE = "#/$defs/"
ROOTS = (
    "apps.v1.DaemonSetUpdateStrategy",
    "apps.v1.DeploymentStrategy",
    "autoscaling.v2.HorizontalPodAutoscalerBehavior",
    "autoscaling.v2.MetricSpec",
    "core.v1.Affinity",
    "core.v1.Container",
    "core.v1.EnvFromSource",
    "core.v1.EnvVar",
    "core.v1.HostAlias",
    "core.v1.Lifecycle",
    "core.v1.LocalObjectReference",
    "core.v1.PodDNSConfig",
    "core.v1.PodSecurityContext",
    "core.v1.ResourceRequirements",
    "core.v1.SecurityContext",
    "core.v1.Toleration",
    "core.v1.TopologySpreadConstraint",
    "core.v1.Volume",
    "core.v1.VolumeMount",
    "networking.v1.NetworkPolicyEgressRule",
    "networking.v1.NetworkPolicyPeer",
)
"""The definitions that values have; what they refer to follows."""
OWN = {"api.resource.Quantity", "meta.v1.ObjectMeta", "util.intstr.IntOrString"}
"""Definitions that local.value_formats makes, narrower than Kubernetes does."""

_REFERENCE_THERE = "#/components/schemas/"
_APIS = ("apis__apps__v1", "apis__autoscaling__v2", "apis__networking.k8s.io__v1")
_KEYWORDS = {"type", "enum", "pattern", "required"}


def load() -> dict[str, Schema]:
    """Return the definitions by name."""
    found: dict[str, Schema] = json.loads(FILE.read_text())
    return found


def extract() -> dict[str, Schema]:
    """Return the definitions of the newest Kubernetes that `go_tools` has; fetches modules."""
    found = {}
    for api in _APIS:
        path = go_tools.module_directory(_newest_kubernetes()) / f"api/openapi-spec/v3/{api}_openapi.json"
        schemas = json.loads(path.read_text())["components"]["schemas"]
        found.update({_short(name): _simple(closed(schema)) for name, schema in schemas.items()})
    found = {name: schema for name, schema in found.items() if name not in OWN}
    return {name: found[name] for name in sorted(reachable(ROOTS, found))}


def _newest_kubernetes() -> str:
    modules = [one for one in go_tools.MODULES if one.startswith("k8s.io/kubernetes@v")]
    return max(modules, key=lambda module: [int(part) for part in module.partition("@v")[2].split(".")])


def _short(name: str) -> str:
    """Return a definition's name without the beginning that most have: `core.v1.Toleration`."""
    return ".".join(name.split(".")[-3:])


def _simple(node: Schema) -> Schema:
    """Return a schema without texts, defaults, formats and extensions, its references to `$defs`."""
    if "allOf" in node:
        (node,) = node["allOf"]
    if "$ref" in node:
        return {"$ref": REFERENCE + _short(node["$ref"].removeprefix(_REFERENCE_THERE))}
    tree = {key: value for key, value in node.items() if key in _KEYWORDS}
    if "properties" in node:
        tree["properties"] = {name: _simple(schema) for name, schema in node["properties"].items()}
    if "items" in node:
        tree["items"] = _simple(node["items"])
    if "additionalProperties" in node:
        more = node["additionalProperties"]
        tree["additionalProperties"] = more if isinstance(more, bool) else _simple(more)
    return tree


def closed(node: Any) -> Any:
    """Return a schema whose objects have no other fields than those that it names."""
    if isinstance(node, list):
        return [closed(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    tree = {key: closed(value) for key, value in node.items()}
    if node.get("x-kubernetes-int-or-string"):
        tree.pop("type", None)
        tree["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    names_fields = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if names_fields and "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        tree["additionalProperties"] = False
    return tree


def reachable(roots: Any, schemas: dict[str, Schema], prefix: str = REFERENCE) -> set[str]:
    """Return the names of definitions that are in `schemas` and that the roots are or refer to."""
    found: set[str] = set()
    to_do = list(roots)
    while to_do:
        name = to_do.pop()
        if name in schemas and name not in found:
            found.add(name)
            to_do.extend(references(schemas[name], prefix))
    return found


def references(node: Any, prefix: str = REFERENCE) -> Iterator[str]:
    """Return the names of the definitions that a schema refers to."""
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference.removeprefix(prefix)
        for value in node.values():
            yield from references(value, prefix)
    elif isinstance(node, list):
        for value in node:
            yield from references(value, prefix)


def text(definitions: dict[str, Schema]) -> str:
    """Return the definitions as the file has them: a line for each."""
    lines = [f"{json.dumps(name)}: {json.dumps(definitions[name], sort_keys=True)}" for name in sorted(definitions)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(extract()))
