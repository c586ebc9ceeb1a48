"""`make images`: build the two container images with buildah, from deploy/image/Dockerfile.

Equal source gives equal images: times are those of the commit (or `SOURCE_DATE_EPOCH`), nothing comes from buildah's
cache, versions are those of constraints.txt. `ARGS=--twice` builds each a second time and compares.

Where the base image's registry is out of reach, a stand-in for it is made of Debian's packages: the same Debian and
OpenSSL, with Debian's Python 3.13.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from local import machine
from local.console import Progress, print_status
from local.environment import ROOT
from local.process import run_reporting

BASE = "docker.io/library/python:3.13-slim-trixie"
STAND_IN = "lab.local/stand-in-base:trixie"
_DEBIAN = "trixie"
_PACKAGES = "python3,python3-venv,ca-certificates"
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_DOCKERFILE = Path("deploy/image/Dockerfile")


class ImageError(Exception):
    """An image could not be built; the text holds the end of the builder's output."""


@dataclass(frozen=True)
class Image:
    """One of the Dockerfile's targets, and the name of its local image."""

    target: str
    name: str


PROXY = Image("proxy", "lab.local/pulsar-trio-proxy:dev")
ANALYTICS = Image("analytics", "lab.local/pulsar-trio-proxy-analytics:dev")
IMAGES = (PROXY, ANALYTICS)


def ensure_base(progress: Progress = print_status) -> str:
    """Return the name of the base image to build on, after it was pulled or the stand-in was made."""
    if image_id(BASE):
        return BASE
    if image_id(STAND_IN):
        return STAND_IN
    if _pull(progress):
        return BASE
    progress(f"{BASE} cannot be pulled: making a stand-in from Debian's packages")
    with tempfile.TemporaryDirectory(prefix="ptp-base-") as directory:
        root = Path(directory) / "root.tar"
        _run(
            ["mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", _DEBIAN, str(root)],
            "Making the stand-in base",
            progress,
        )
        container = _output(["buildah", "from", "scratch"])
        _run(["buildah", "add", "--quiet", container, str(root), "/"], "Importing the stand-in base", progress)
        _run(["buildah", "commit", "--quiet", "--rm", container, STAND_IN], "Importing the stand-in base", progress)
    return STAND_IN


def _pull(progress: Progress) -> bool:
    command = ["timeout", "120", "buildah", "pull", "--quiet", "--retry=0", BASE]
    return run_reporting(command, lambda s: f"Pulling {BASE}: {s:.0f} s", progress) is None


def build_command(image: Image, base: str, epoch_s: int, id_file: Path) -> list[str]:
    """Return the command that builds an image and writes its id to `id_file`."""
    command = ["buildah", "bud", "--no-cache", "--pull-never", "--isolation", "chroot", "--network", "host"]
    if _AUTHORITIES.exists():  # package indexes behind a gateway of one's own
        command += ["--volume", f"{_AUTHORITIES}:{_AUTHORITIES}:ro"]
    command += ["--build-arg", f"BASE={base}", "--build-arg", f"SOURCE_DATE_EPOCH={epoch_s}"]
    command += ["--timestamp", str(epoch_s), "--target", image.target, "--file", str(_DOCKERFILE)]
    return [*command, "--tag", image.name, "--iidfile", str(id_file), "."]


def build_image(image: Image, progress: Progress = print_status, epoch_s: int | None = None) -> str:
    """Build an image; return its id, which is the digest of its content and configuration."""
    base = ensure_base(progress)
    epoch_s = source_date_epoch_s() if epoch_s is None else epoch_s
    with tempfile.TemporaryDirectory(prefix="ptp-image-") as directory:
        id_file = Path(directory) / "id"
        _run(build_command(image, base, epoch_s, id_file), f"Building {image.name}", progress)
        return id_file.read_text().strip()


def source_date_epoch_s() -> int:
    """Return the time that the images' files get: `SOURCE_DATE_EPOCH`, else that of the commit, else 0."""
    configured = os.environ.get("SOURCE_DATE_EPOCH", "")
    if configured.isdecimal():
        return int(configured)
    try:
        return int(_output(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]))
    except (ImageError, ValueError):
        return 0


def image_id(name: str) -> str:
    """Return the id of an image that buildah has; empty if it has none of that name."""
    try:
        return _output(["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", name])
    except ImageError:
        return ""


def export_image(image: Image, directory: Path, progress: Progress = print_status) -> Path:
    """Write an image to a file that containerd imports; return the file's path."""
    path = directory / f"{image.target}.image.tar"
    path.unlink(missing_ok=True)
    _run(["buildah", "push", "--quiet", image.name, f"docker-archive:{path}:{image.name}"], f"Writing {path}", progress)
    return path


def _run(command: list[str], doing: str, progress: Progress) -> None:
    failure = run_reporting(command, lambda s: f"{doing}: {s:.0f} s", progress, cwd=ROOT)
    if failure:
        raise ImageError(f"{doing} failed:\n{failure}")


def _output(command: list[str]) -> str:
    try:
        result = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"{' '.join(command)}: {error}") from None
    return result.stdout.strip()


def main() -> int:
    """Build the images; with `--twice`, compare two builds of each."""
    parser = argparse.ArgumentParser(prog="make images")
    parser.add_argument("--twice", action="store_true", help="build each image twice and compare the digests")
    parser.add_argument("targets", nargs="*", help="proxy, analytics; both if none is named")
    options = parser.parse_args()
    chosen = [image for image in IMAGES if not options.targets or image.target in options.targets]
    different = []
    try:
        machine.ensure(machine.IMAGES)
        epoch_s = source_date_epoch_s()
        for image in chosen:
            first = build_image(image, epoch_s=epoch_s)
            print(f"{image.name} {first}", flush=True)
            if options.twice and (second := build_image(image, epoch_s=epoch_s)) != first:
                print(f"{image.name} {second}: another digest than the first build's", flush=True)
                different.append(image.name)
    except (machine.MachineError, ImageError) as error:
        print(f"\nmake images: {error}", file=sys.stderr)
        return 1
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
