"""The Helm chart's generated JSON: ``python -m local.chart_schema schema`` prints values.schema.json, ``defaults`` the
proxy's own defaults, ``values`` those of values.yaml.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from local.chart_values import ChartValues
from local.kubernetes_definitions import REFERENCE, Schema, reachable, references
from local.kubernetes_rules import definitions
from proxy.config.types import Config


def schema() -> Schema:
    """Return the JSON schema of the values, without defaults: values.yaml has those."""
    (root,), tables = msgspec.json.schema_components([ChartValues], ref_template=REFERENCE + "{name}")
    found = definitions()
    used = {name: found[name] for name in reachable(references(tables), found)}
    assert not set(used) & set(tables), "a table and a definition have the same name"
    tree = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": {**tables, **used}}
    return _simple(tree)  # type: ignore[no-any-return]


def _simple(node: Any) -> Any:
    """Remove `default` from a schema, and what msgspec writes beside a reference; no property has these names."""
    if isinstance(node, list):
        return [_simple(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node and "$schema" not in node:
        return {"$ref": node["$ref"]}
    return {key: _simple(value) for key, value in node.items() if key != "default"}


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
