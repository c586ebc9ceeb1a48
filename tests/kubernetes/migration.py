"""Steps with brokers as apache/pulsar-helm-chart has them: the first command of the documentation, and the migration.

What they run is read from docs/kubernetes.md, so that the page cannot say anything else. Added to it are the lab's
images, its small requests, and tokens, without which the lab's broker serves no client.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml
from local import images
from local.distribution import pulsar_home

from proto.pulsar_pb2 import BaseCommand
from tests.docs.blocks import Block, blocks, commands
from tests.e2e.lab.programs import python_program
from tests.e2e.lab.security import NAMESPACE
from tests.e2e.lab.waiting import eventually
from tests.e2e.lab.wire import WireClient
from tests.kubernetes.node import SOON_S, CommandError, Namespace, run
from tests.kubernetes.pulsar_chart import HEADLESS, LABELS, PORT, PROXY, REPLICAS, PulsarRelease, wait_until_gone, zone
from tests.kubernetes.scene import CHART, HELM_PATIENCE, Scene, Values, merged, reference
from tests.kubernetes.workload import Observation, observed

PAGE = "docs/kubernetes.md"
RELEASE = "proxy"
NAME = f"{RELEASE}-pulsar-trio-proxy"
FIRST, MIGRATION = "Kubernetes", "Moving without a break"
"""Sections of the page."""
CLIENTS = 30


def blocks_of(section: str) -> list[Block]:
    """Return the blocks of a section of the page."""
    return [block for block in blocks(PAGE) if block.section == section]


def words_of(found: list[Block], beginning: str) -> list[str]:
    """Return the words of the only command in some blocks that begins so."""
    texts = [command.text for block in found for command in commands(block) if command.text.startswith(beginning)]
    (text,) = texts
    return shlex.split(text.replace("\\\n", " "), comments=True)


def values_of(found: list[Block]) -> Values:
    """Return the values of the chart in some blocks; there is one such block."""
    (values,) = (yaml.safe_load(block.text) for block in found if block.language == "yaml")
    assert isinstance(values, dict)
    return values


def patch_of(found: list[Block], *, back: bool) -> list[str]:
    """Return the command that has the old Service lead to new pods alone, or to all pods again."""
    beginning = 'kubectl -n pulsar patch service pulsar-proxy -p \'{"spec":{"selector":{"app.kubernetes.io/name":'
    return words_of(found, beginning + ("null" if back else '"'))


def _lab_values(scene: Scene) -> Values:
    """Return what the lab needs beside the values of the page."""
    return {
        "image": reference(images.PROXY),
        "replicaCount": REPLICAS,
        "config": {"cluster": {"forwarders": 1}},
        "auth": {"token": {"enabled": True, "algorithm": "symmetric"}, "proxyToken": {"enabled": True}},
        "resources": scene.values["resources"],
        "test": scene.values["test"],
    }


def _write(scene: Scene, name: str, values: Values) -> Path:
    path = scene.directory / f"{name}.json"  # JSON is YAML
    path.write_text(json.dumps(values))
    return path


# ---- the first command


def first_command(scene: Scene) -> list[str]:
    """`helm install` and `helm test` of the page: relays go to pods' names below the headless Service."""
    release, ours = PulsarRelease(scene), Namespace(scene.namespace.name, RELEASE)
    release.add_brokers()
    shown = blocks_of(FIRST)
    install, test = words_of(shown, "helm install"), words_of(shown, "helm test")
    values = _write(scene, "first-command", _lab_values(scene))
    repository = f"image.repository={reference(images.PROXY)['repository']}"
    install = [*install, "--set", repository, "--values", str(values), "--wait", HELM_PATIENCE]
    try:
        run(install)
        address = release.address(NAME)
        scene.names.add(f"{NAME}.{zone(ours.name)}", "A", address)
        notes = ours.helm("get", "notes", RELEASE)
        pattern = f"pulsar-broker-*.{HEADLESS}.{zone(ours.name)}"
        assert f"Brokers: pulsar://pulsar-broker.{zone(ours.name)}:{PORT}\n" in notes, notes
        assert pattern in notes, notes
        assert "Succeeded" in run([*test, HELM_PATIENCE])
        program = python_program(scene.directory, pulsar_home())
        options = {"token": scene.token(), "count": 2000, "timeout_s": 90}
        result = program.succeed("produce_consume", f"pulsar://{address}:{PORT}", scene.topic("first"), **options)
        assert (result["missing"], result["in_order"]) == (0, True), result
        refused = _refused_target(scene, ours, install, test)
    finally:
        ours.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", HELM_PATIENCE)
    return [
        f"{' '.join(words_of(shown, 'helm install'))}: installed, its test succeeded",
        f"relays to {pattern}: {result['received']} messages, in order",
        f"with another rule, helm test says: {refused}",
    ]


def _refused_target(scene: Scene, ours: Namespace, install: list[str], test: list[str]) -> str:
    """Have the proxy refuse the brokers' names; return what `helm test` says then."""
    rule = {
        "config": {"brokers": {"allowed_hosts": ["*.brokers.example.org"]}},
        "podAnnotations": {"lab/rule": "other"},
    }
    path = _write(scene, "first-command-refused", rule)
    # Not --reuse-values, which keeps a null, by which the lab's values remove a default, as a value.
    run(["upgrade" if word == "install" else word for word in [*install, "--values", str(path)]])
    ours.wait_until_settled(REPLICAS)
    try:
        text = run([*test, HELM_PATIENCE])
    except CommandError:
        said = ours.kubectl("logs", f"{NAME}-test").strip().splitlines()[-1]
    else:
        raise AssertionError(f"helm test succeeded without a relay: {text}")
    assert "config.brokers.allowed_hosts: " in said, said
    assert said.endswith(f'add "*.{HEADLESS}.{zone(ours.name)}"'), said
    return said


# ---- the migration


class Change(NamedTuple):
    """One step of the page, and the way back."""

    name: str
    do: Callable[[], None]
    undo: Callable[[], None]


class Migration:
    """The steps of "Moving without a break"."""

    def __init__(self, scene: Scene, release: PulsarRelease) -> None:
        self._scene = scene
        self._release = release
        self._shown = blocks_of(MIGRATION)
        self.ours = Namespace(scene.namespace.name, RELEASE)
        self._values = _write(scene, "migration", merged(values_of(self._shown), _lab_values(scene)))

    def changes(self) -> list[Change]:
        """Return the steps that the page tells to take, in its order."""
        return [
            Change("the old disruption budget is removed", self._release.remove_budget, self._release.add_budget),
            Change("the new chart is installed", self._install, self.uninstall),
            Change("the old Service leads to new pods alone", self._leave_old_pods, self._take_old_pods_back),
            Change(
                "the old proxies end",
                lambda: self._release.scale_proxies(0),
                lambda: self._release.scale_proxies(REPLICAS),
            ),
        ]

    def check_selector(self) -> str:
        """Look at the old selector as the page says; return it."""
        text = run(words_of(self._shown, "kubectl -n pulsar get"))
        assert json.loads(text) == LABELS, text
        return text

    def _install(self) -> None:
        options = ("--install", "--values", str(self._values), "--wait", HELM_PATIENCE)
        self.ours.helm("upgrade", RELEASE, str(CHART), *options)
        self.ours.wait_until_settled(REPLICAS)
        # The old Service has them, too: newcomers, which each look up a topic, come to every new pod.
        for pod in self.ours.pods():
            before = self._accepted(pod["metadata"]["name"])
            eventually(
                lambda name=pod["metadata"]["name"], before=before: self._accepted(name) > before,
                what="the old Service sends clients to a new pod",
                within_s=SOON_S,
                every_s=1,
            )

    def _accepted(self, name: str) -> float:
        """Return how many connections a new pod has accepted."""
        pod = self.ours.get("pod", name)
        return self.ours.metrics(pod).total("pulsar_proxy_new_connections_total")

    def uninstall(self) -> None:
        """Remove the new chart's release; return when its pods are gone."""
        self.ours.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", HELM_PATIENCE)
        wait_until_gone(self.ours)

    def _leave_old_pods(self) -> None:
        run(patch_of(self._shown, back=False))
        self._wait_for_endpoints(REPLICAS)

    def _take_old_pods_back(self) -> None:
        run(patch_of(self._shown, back=True))
        self._wait_for_endpoints(2 * REPLICAS)

    def _wait_for_endpoints(self, count: int) -> None:
        """Wait until the old Service leads to so many pods."""

        def addresses() -> list[str]:
            answer = self._release.namespace.kubectl(
                "get", "endpointslices", "-l", f"kubernetes.io/service-name={PROXY}", "-o", "json"
            )
            return [
                address
                for found in json.loads(answer)["items"]
                if any(port["name"] == "pulsar" for port in found["ports"] or ())
                for endpoint in found["endpoints"] or ()
                if endpoint["conditions"].get("ready")
                for address in endpoint["addresses"]
            ]

        eventually(
            lambda: len(set(addresses())) == count,
            what=f"the old Service leads to {count} pods",
            within_s=SOON_S,
            every_s=0.5,
        )


def migration(scene: Scene) -> list[str]:
    """Pulsar's own proxies are replaced behind their Service under 30 clients; all steps are undone once."""
    release = PulsarRelease(scene)
    release.add_brokers()
    move = Migration(scene, release)
    try:
        release.add_proxies()
        lines = [f"the old Service selects {move.check_selector()}"]
        address = release.address(PROXY)
        with observed(scene.directory, "migration", address, PORT, scene.token(), clients=CLIENTS) as observation:
            changes = move.changes()
            lines += [_observe(change.name, change.do, observation) for change in changes]
            _check_relays(move.ours)
            lines += [_observe(f"back: {change.name}", change.undo, observation) for change in reversed(changes)]
            lines += [_observe(f"again: {change.name}", change.do, observation) for change in changes]
            _check_relays(move.ours)
            lines.append(observation.check_result())
        release.remove_proxies()
        lines.append(_own_service(scene, release))
    finally:
        move.uninstall()
        release.remove_proxies()
    return lines


def _observe(what: str, happen: Callable[[], None], observation: Observation) -> str:
    """Take a step; after it, every client must be connected, and no newcomer have been refused. Return a line."""
    before = len(observation.fleet.progress()["ends_s"])
    happen()
    observation.fleet.wait_for_messages()
    ended = len(observation.fleet.progress()["ends_s"]) - before
    return f"{what}: {ended} relays ended; {observation.check_newcomers()} so far"


def _check_relays(ours: Namespace) -> None:
    """Check that the relays of all clients are in new pods: there are no others."""
    counts = [ours.metrics(pod).total("pulsar_proxy_active_connections") for pod in ours.ready_pods()]
    assert sum(counts) >= CLIENTS, counts


def _own_service(scene: Scene, release: PulsarRelease) -> str:
    """A client of the new chart's own Service is served after the old one is gone."""
    with WireClient(PORT, release.address(NAME), timeout_s=60) as client:
        client.send_connect(token=scene.token())
        assert client.receive(60).type == BaseCommand.CONNECTED
        answer = client.partitions(f"persistent://{NAMESPACE}/migrated")
        assert answer.type == BaseCommand.PARTITIONED_METADATA_RESPONSE
    return "the old Service is deleted; the new one serves clients"
