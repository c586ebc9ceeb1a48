"""What the steps `first-command` and `migration` find in docs/kubernetes.md, without a node."""

import json

from tests.deploy.chart import needs_tools, render
from tests.kubernetes.migration import FIRST, MIGRATION, RELEASE, blocks_of, patch_of, values_of, words_of
from tests.kubernetes.pulsar_chart import LABELS, PROXY
from tests.kubernetes.scene import CHART_NAMESPACE


def test_the_first_commands_are_those_of_the_lab() -> None:
    shown = blocks_of(FIRST)
    for command in ("install", "test"):
        words = words_of(shown, f"helm {command}")
        assert words[:3] == ["helm", command, RELEASE]
        assert words[words.index("--namespace") + 1] == CHART_NAMESPACE


def test_the_old_service_is_looked_at_and_patched_forth_and_back() -> None:
    shown = blocks_of(MIGRATION)
    assert words_of(shown, "kubectl -n pulsar get")[2:6] == [CHART_NAMESPACE, "get", "service", PROXY]
    patches = [json.loads(patch_of(shown, back=back)[-1]) for back in (False, True)]
    assert [patch["spec"]["selector"] for patch in patches] == [
        {"app.kubernetes.io/name": "pulsar-trio-proxy"},
        {"app.kubernetes.io/name": None},
    ]


@needs_tools
def test_the_old_service_selects_the_new_pods_and_their_ports() -> None:
    """And by the patched selector, too, which old pods do not have."""
    manifests = render(**values_of(blocks_of(MIGRATION)))
    labels = manifests.pod["metadata"]["labels"]
    patched = json.loads(patch_of(blocks_of(MIGRATION), back=False)[-1])["spec"]["selector"]
    assert {**LABELS, **patched}.items() <= labels.items()
    assert not patched.items() <= LABELS.items()
    assert "sts-pulsar" in [port["name"] for port in manifests.container["ports"]]
    assert manifests.configuration["brokers"]["service_url"].startswith("pulsar://pulsar-broker.")
