"""The steps with changes of the release: wrong ones, refused ones, and the upgrade from the release before this one."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from local import previous_release
from local.tokens import make_token

from tests.e2e.lab.certificates import Authority
from tests.e2e.lab.waiting import eventually
from tests.kubernetes.node import SOON_S, CommandError, Namespace, restarts
from tests.kubernetes.scene import (
    BROKER_TLS_PORT,
    CHART,
    HELM_PATIENCE,
    NODE_ADDRESS,
    RELEASE,
    REPLICAS,
    Scene,
    Values,
    merged,
    reference,
)

CLIENTS = 30
UNREACHABLE = "10.77.0.99"
WATCHED_S = 20.0
"""How long clients are watched after all pods have seen a wrong change."""

_CONFIG_FILE = "/etc/pulsar-trio-proxy/proxy.toml"
_SECRETS = "/var/run/secrets/pulsar-trio-proxy"

# ---- wrong values


def refused_upgrade(scene: Scene) -> list[str]:
    """`helm upgrade` fails, before anything is changed, at a value that only the program or a broker refuses."""
    namespace, lines = scene.namespace, []
    before = {pod["metadata"]["uid"] for pod in namespace.wait_until_settled(REPLICAS)}
    text = namespace.get("configmap", RELEASE)["data"]["proxy.toml"]
    cases: dict[str, tuple[Values, str]] = {
        "a value that only the program refuses": ({"brokers": {"targets": ["no rule"]}}, "targets"),
        "an address without a broker": ({"brokers": {"service_url": f"pulsar://{UNREACHABLE}:6650"}}, UNREACHABLE),
    }
    for what, (config, word) in cases.items():
        try:
            scene.install(config=config)
        except CommandError as error:
            refusal = str(error)
        else:
            raise AssertionError(f"{what}: helm upgrade succeeded")
        job = namespace.get("job", f"{RELEASE}-config-check")
        (condition,) = (one for one in job["status"]["conditions"] if one["type"] == "Failed")
        events = namespace.kubectl("get", "events", "--field-selector", f"involvedObject.name={RELEASE}-config-check")
        assert condition["reason"] in events, events
        message = _termination_message(namespace, f"job-name={RELEASE}-config-check")
        assert word in message, (message, refusal)
        lines.append(f"{what}: {condition['type']} ({condition['reason']}), {message.splitlines()[-1]}")
        assert namespace.get("configmap", RELEASE)["data"]["proxy.toml"] == text, "the configuration was changed"
    scene.install()
    assert {pod["metadata"]["uid"] for pod in namespace.wait_until_settled(REPLICAS)} == before
    return lines


def _termination_message(namespace: Namespace, selector: str) -> str:
    for pod in namespace.pods(selector):
        for status in pod["status"].get("containerStatuses", []):
            if message := status["state"].get("terminated", {}).get("message"):
                return str(message)
    return ""


def wrong_changes(scene: Scene) -> list[str]:
    """Under clients: a wrong address, port, token or authority in all pods takes none out, and ends no relay."""
    scene.secret("lab-broker-ca", **{"ca.crt": Path(scene.authority.file)})
    tls: Values = {
        "config": {"brokers": {"service_url": f"pulsar+ssl://{NODE_ADDRESS}:{BROKER_TLS_PORT}"}},
        "brokerTls": {"ca": {"secret": "lab-broker-ca"}},
    }
    scene.install(**tls)

    good_token = scene.broker.token("proxy").encode()
    token = make_token(b"a key that is not this broker's, and long enough", "proxy")
    stranger = Authority(scene.directory, "stranger")
    lines = []
    with scene.observed("wrong", CLIENTS) as observation:

        def watch() -> None:
            until = time.monotonic() + WATCHED_S
            while time.monotonic() < until:
                assert len(scene.namespace.ready_pods()) == REPLICAS, "a pod is not ready"
                time.sleep(1)
            observation.check_newcomers()

        def url(address: str) -> Callable[[], object]:
            config = {"brokers": {"service_url": f"pulsar+ssl://{address}"}}
            values = merged(scene.values, merged(tls, {"config": config}))
            # Without the Job that would refuse it, as other tools than Helm do.
            return lambda: scene.apply(values, options=("--no-hooks",))

        before = {pod["metadata"]["uid"]: restarts(pod) for pod in scene.namespace.pods()}
        cases: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
            "address": (url(f"{UNREACHABLE}:6651"), lambda: scene.install(**tls), _CONFIG_FILE),
            "port": (url(f"{NODE_ADDRESS}:6999"), lambda: scene.install(**tls), _CONFIG_FILE),
            "token": (
                lambda: _set_secret(scene, "lab-token-proxy-admin", TOKEN=token.encode()),
                lambda: _set_secret(scene, "lab-token-proxy-admin", TOKEN=good_token),
                f"{_SECRETS}/proxy-token/TOKEN",
            ),
            "authority": (
                lambda: _set_secret(scene, "lab-broker-ca", **{"ca.crt": Path(stranger.file).read_bytes()}),
                lambda: _set_secret(scene, "lab-broker-ca", **{"ca.crt": Path(scene.authority.file).read_bytes()}),
                f"{_SECRETS}/broker-ca/ca.crt",
            ),
        }
        for what, (spoil, mend, file) in cases.items():
            with _seen_by_all_pods(scene, file):
                spoil()
            watch()
            told = scene.namespace.kubectl("logs", "-l", scene.namespace.selector, "-c", "proxy", "--tail=200")
            assert "in force" in told, f"no pod logs that it keeps what is in force:\n{told[-2000:]}"
            with _seen_by_all_pods(scene, file):
                mend()
            watch()
            lines.append(f"wrong {what}: {REPLICAS} pods stayed ready for {WATCHED_S:.0f} s, and after the mend")
        after = {pod["metadata"]["uid"]: restarts(pod) for pod in scene.namespace.pods()}
        assert after == before, "pods were replaced or restarted"
        ended = len(observation.fleet.progress()["ends_s"])
        lines.append(f"{ended} relays ended; {observation.check_result()}")
        assert not ended, lines
    scene.install()
    scene.namespace.kubectl("delete", "secret", "lab-broker-ca")
    return lines


def _set_secret(scene: Scene, name: str, **content: bytes) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    scene.namespace.kubectl("patch", "secret", name, "--type=merge", "-p", json.dumps({"data": data}))


@contextmanager
def _seen_by_all_pods(scene: Scene, file: str) -> Iterator[None]:
    """Wait at the end of the block until a mounted file has changed in all pods."""
    script = f"import hashlib; print(hashlib.sha256(open({file!r}, 'rb').read()).hexdigest())"

    def contents() -> dict[str, str]:
        return {
            pod["metadata"]["name"]: scene.namespace.execute(pod, "python3", "-c", script)
            for pod in scene.namespace.pods()
        }

    before = contents()
    yield
    eventually(
        lambda: all(content != before.get(name) for name, content in contents().items()),
        what=f"{file} changes in all pods",
        within_s=SOON_S,
        every_s=2,
    )


# ---- the chart as it is applied


def rendered_as_live(scene: Scene) -> list[str]:
    """`helm template` writes what is in the cluster: the API server would change nothing."""
    path = scene.write_values(scene.values)
    text = scene.namespace.helm("template", RELEASE, str(CHART), "-f", str(path), "--no-hooks", "--skip-tests")
    command = ["kubectl", "--namespace", scene.namespace.name, "diff", "--server-side", "--force-conflicts", "-f", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-1000:]}"
    return ["kubectl diff of helm template's output and the live objects: no difference"]


# ---- the release before this one


def upgrade_from_previous(scene: Scene) -> list[str]:
    """The chart and the image of the release before this one, upgraded to this tree's under clients, and back."""
    version, chart = previous_release.VERSION, scene.directory / "previous-chart"
    previous_release.extract(previous_release.CHART, chart)
    namespace = scene.namespace
    old_values = merged(scene.values, {"image": reference(previous_release.IMAGE)})
    namespace.helm("uninstall", RELEASE, "--wait", HELM_PATIENCE)
    scene.apply(old_values, chart)
    lines = []
    with scene.observed("upgrade", CLIENTS) as observation:
        events: dict[str, Callable[[], object]] = {
            f"{version} to this": scene.install,
            f"helm rollback to {version}": lambda: namespace.helm("rollback", RELEASE, "--wait", HELM_PATIENCE),
            "to this again": scene.install,
        }
        for what, happen in events.items():
            observation.mark()
            happen()
            used = {pod["spec"]["containers"][0]["image"] for pod in namespace.wait_until_settled(REPLICAS)}
            observation.fleet.wait_for_messages()
            lines.append(f"{observation.event(what)}; image {', '.join(sorted(used))}")
        lines.append(observation.check_result())
    return lines
