"""Many values in one run of Helm: a chart without templates, each of whose values has a definition of its own."""

import json
import re
from pathlib import Path
from typing import Any

from tests.deploy.chart import CHART, helms

SCHEMA: Any = json.loads((CHART / "values.schema.json").read_text())

Case = tuple[str, Any]
"""The name of a definition, and a value."""
Refusal = dict[str, str]
"""The reasons by the key, relative to the value; an object's missing and unknown fields are below its own key."""


def refusals(cases: list[Case], definitions: dict[str, Any], directory: Path) -> list[Refusal]:
    """What each Helm's validator has against these values, case by case; an error if they differ."""
    properties = {f"c{number}": {"$ref": f"#/$defs/{name}"} for number, (name, _) in enumerate(cases)}
    schema = {"$schema": SCHEMA["$schema"], "$defs": definitions, "type": "object", "properties": properties}
    (directory / "values.schema.json").write_text(json.dumps(schema))
    (directory / "Chart.yaml").write_text("{apiVersion: v2, name: cases, version: 0.1.0}")
    values = {f"c{number}": value for number, (_, value) in enumerate(cases)}
    (directory / "cases.json").write_text(json.dumps(values))
    outcomes = helms("template", "r", directory, "--values", directory / "cases.json")
    first, *others = [_by_case(outcome.stderr, len(cases)) for outcome in outcomes.values()]
    for other in others:  # their keys: the order of names within a reason is by chance
        assert [set(one) for one in other] == [set(one) for one in first]
    return first


def _by_case(message: str, count: int) -> list[Refusal]:
    found: list[Refusal] = [{} for _ in range(count)]
    if message:
        assert "specifications of the schema" in message, message
    for number, pointer, reason in re.findall(r"at '/c([0-9]+)([^']*)': (.*)", message):
        key = pointer.removeprefix("/").replace("/", ".")
        below = re.findall(r"'([^']*)'", reason) if re.search("(property|properties) '", reason) else []
        for one in (key, *(f"{key}.{field}".removeprefix(".") for field in below)):
            found[int(number)][one] = f"{found[int(number)].get(one, '')}{reason}\n"
    return found
