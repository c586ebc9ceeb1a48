"""Manifests of one's own in the release."""

from typing import Any

import pytest

from tests.deploy.chart import NAME, NAMESPACE, Refused, needs_tools, render

pytestmark = needs_tools


def config_map(name: str, **data: str) -> dict[str, Any]:
    """A manifest."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_maps_and_strings_are_evaluated() -> None:
    text = 'apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ include "pulsar-trio-proxy.fullname" . }}-b\n'
    manifests = render(extraObjects=[config_map("a", of="{{ .Release.Namespace }}"), text])
    assert manifests.get("ConfigMap", "a")["data"] == {"of": NAMESPACE}
    assert f"{NAME}-b" in manifests.names("ConfigMap")
    assert len(manifests.all) == len(render().all) + 2


@pytest.mark.parametrize("missing", ["apiVersion", "kind", "metadata"])
def test_an_extra_object_without_a_required_field_is_refused(missing: str) -> None:
    manifest = config_map("a")
    del manifest[missing]
    with pytest.raises(Refused, match=r"extraObjects\[1\]: has no apiVersion, kind or metadata\.name"):
        render(extraObjects=[config_map("b"), manifest])


def test_a_text_that_is_no_yaml_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match=r"extraObjects\[0\]: .*yaml"):
        render(extraObjects=["a: ["])
