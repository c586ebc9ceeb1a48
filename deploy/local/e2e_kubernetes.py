"""`make e2e-kubernetes`: a real node, the images, the chart in it, then the steps of tests/kubernetes.

The first run builds Kubernetes (about ten minutes on two idle cores), each run the images unless `--keep-images` says
otherwise. `ARGS="install rollout"` runs single steps; `install` is always the first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from local import images, machine, previous_release
from local.console import exit_on_error, print_status
from local.distribution import pulsar_home
from local.environment import Environment
from local.kubernetes import Lab

NEEDS = (*machine.TEST, *machine.IMAGES, machine.GO, machine.GCC)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options; what follows them is for the steps."""
    parser = argparse.ArgumentParser(prog="make e2e-kubernetes", description=__doc__)
    parser.add_argument("--keep-images", action="store_true", help="take the images of an earlier run where there are")
    parser.add_argument("--keep-node", action="store_true", help="leave the node running at the end")
    parser.add_argument("steps", nargs="*", help="the steps to run; all if none is named")
    return parser.parse_args(arguments)


def prepare(lab: Lab, *, keep_images: bool) -> Environment:
    """Prepare what the steps need: packages, the environment, Pulsar, Kubernetes, the images in files."""
    if os.geteuid() != 0:
        raise machine.MachineError("A node needs namespaces and cgroups of its own: run this as root.")
    machine.ensure(NEEDS)
    environment = Environment()
    environment.prepare("test")
    pulsar_home()
    lab.build()
    if not images.image_id(previous_release.IMAGE.name):
        previous_release.build_image()
        keep_images = False  # this tree's have lost their names to it
    for image in images.IMAGES:
        if keep_images and images.image_id(image.name):
            continue
        images.build_image(image)
    for image in (*images.IMAGES, previous_release.IMAGE):
        images.export_image(image, lab.images)
    return environment


def main() -> int:
    """Prepare, start the node, run the steps on it, stop it."""
    options = parse(sys.argv[1:])
    lab = Lab()
    with exit_on_error("e2e-kubernetes"):
        environment = prepare(lab, keep_images=options.keep_images)
        started_at = time.monotonic()
        lab.start_node()
    print(f"the node is up after {time.monotonic() - started_at:.0f} s", flush=True)
    command = [str(environment.python), "-m", "tests.kubernetes", *options.steps]
    variables = os.environ | {"PYTHONPATH": str(environment.root / "deploy")}
    try:
        return lab.run_on_node(command, variables)
    finally:
        if not options.keep_node:
            lab.stop_node()
        else:
            print_status("The node still runs; deploy/kubernetes-lab/cluster.sh down ends it")


if __name__ == "__main__":
    sys.exit(main())
