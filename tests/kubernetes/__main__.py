"""Run the steps on the node: `make e2e-kubernetes`, which starts this inside the node's namespaces."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from local.distribution import pulsar_home
from local.standalone import BrokerOptions, Standalone

from tests.e2e.lab.certificates import Authority
from tests.e2e.lab.dns import NameServer
from tests.e2e.lab.security import grant
from tests.kubernetes import changes, steps
from tests.kubernetes.accounting import accounting
from tests.kubernetes.migration import first_command, migration
from tests.kubernetes.pulsar_chart import broker_settings
from tests.kubernetes.results import chosen
from tests.kubernetes.scene import BROKER_TLS_PORT, CHART_NAMESPACE, NODE_ADDRESS, Scene
from tests.kubernetes.spark import spark_executors

STEPS: dict[str, Callable[[Scene], list[str]]] = {
    "install": steps.install,
    "helm-test": steps.helm_test,
    "http": steps.http,
    "clients": steps.clients,
    "rollout": steps.rollout,
    "eviction": steps.eviction,
    "forwarder-kill": steps.forwarder_kill,
    "oom": steps.oom,
    "configmap": steps.configmap,
    "rendered-as-live": changes.rendered_as_live,
    "refused-upgrade": changes.refused_upgrade,
    "wrong-changes": changes.wrong_changes,
    "upgrade-from-previous": changes.upgrade_from_previous,
    "scale-out": steps.scale_out,
    "first-command": first_command,
    "migration": migration,
    "accounting": accounting,
    "spark-executors": spark_executors,
}
BROKER_PORT, WEB_PORT, DNS_PORT = 6650, 8080, 53


def run_steps(scene: Scene, names: list[str]) -> list[str]:
    """Run steps one after the other; returns the names of those that failed. Without `install` nothing else runs."""
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        began_s = time.monotonic()
        try:
            lines = STEPS[name](scene)
        except Exception:  # noqa: BLE001 -- whatever it is, the step has failed, and the next one tells more
            traceback.print_exc(file=sys.stdout)
            print(scene.namespace.diagnosis(), flush=True)
            print(f"== {name} FAILED after {time.monotonic() - began_s:.0f} s", flush=True)
            failed.append(name)
            if name == "install":
                failed.extend(names[1:])  # without it nothing else can run
                break
        else:
            for line in lines:
                print(f"   {line}", flush=True)
            print(f"== {name} ok, {time.monotonic() - began_s:.0f} s", flush=True)
    return failed


def main() -> int:
    """Start a broker on the node, run the steps, say which failed."""
    parser = argparse.ArgumentParser(prog="tests.kubernetes")
    parser.add_argument("steps", nargs="*")
    try:
        chosen_steps = chosen(parser.parse_args().steps, tuple(STEPS))
    except ValueError as error:
        parser.error(str(error))
    directory = Path(tempfile.mkdtemp(prefix="ptp-kubernetes-"))
    directory.chmod(0o755)
    began_s = time.monotonic()
    authority = Authority(directory, "lab")
    pair = authority.server("broker", NODE_ADDRESS)
    conf = {
        **broker_settings(CHART_NAMESPACE),
        "brokerDeleteInactiveTopicsEnabled": "false",
        "brokerServicePortTls": str(BROKER_TLS_PORT),
        "tlsCertificateFilePath": pair.certificate,
        "tlsKeyFilePath": pair.key,
    }
    standalone = Standalone(
        pulsar_home(),
        directory / "broker",
        secured=True,
        conf=conf,
        options=BrokerOptions(
            broker_port=BROKER_PORT,
            web_port=WEB_PORT,
            # The node's cgroups are mounted where Java does not look for its own.
            jvm_options=["-XX:-UseContainerSupport"],
            ready_timeout_s=600,
        ),
    )
    with standalone as broker, NameServer(NODE_ADDRESS, DNS_PORT) as names:  # where pods ask for names
        grant(broker)
        print(f"the broker is up after {time.monotonic() - began_s:.0f} s; files in {directory}", flush=True)
        failed = run_steps(Scene(directory, broker, names, authority), chosen_steps)
    print(
        f"{len(chosen_steps) - len(failed)} of {len(chosen_steps)} steps ok, {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    if failed:
        print(f"failed: {', '.join(failed)}; files in {directory}", flush=True)
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
