"""`make images`: build the two container images with buildah, from deploy/image/Dockerfile.

Equal source gives equal images: times are those of the commit (or `SOURCE_DATE_EPOCH`), nothing comes from buildah's
cache, versions are those of constraints.txt. `ARGS=--twice` builds each a second time and compares. `ARGS=--archives`
writes dist/*.oci.tar, with the image of each architecture, and the bills of materials in them. Nothing is emulated, and
no program of another architecture runs.

Where the base image's registry is out of reach, a stand-in for it is made of Debian's packages: the same Debian and
OpenSSL, with Debian's Python 3.13.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image import python_application

from local import base_image, image_check, machine, provenance
from local.console import MakeError, Progress, exit_on_error, print_status
from local.environment import ROOT
from local.oci_archive import SUFFIX
from local.process import run_reporting

STAND_IN = "lab.local/stand-in-base:trixie"
_DEBIAN = "trixie"
_PACKAGES = "python3,python3-venv,ca-certificates"
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_DOCKERFILE = Path("deploy/image/Dockerfile")
_DIST = ROOT / "dist"
NATIVE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""This machine's architecture, in the words of image platforms."""


class ImageError(MakeError):
    """An image could not be built; the text holds the end of the builder's output."""


@dataclass(frozen=True)
class Image:
    """One of the Dockerfile's targets, the name of its local image, the architectures that its archive has."""

    target: str
    name: str
    architectures: tuple[str, ...]

    def tag(self, architecture: str) -> str:
        """Return the name of the local image of an architecture."""
        return self.name if architecture == NATIVE else f"{self.name}-{architecture}"

    @property
    def repository(self) -> str:
        """The image's name without a registry and a tag."""
        return self.name.rpartition("/")[2].partition(":")[0]

    @property
    def archive(self) -> str:
        """The name of the archive's file."""
        return f"{self.repository}{SUFFIX}"


PROXY = Image("proxy", "lab.local/pulsar-trio-proxy:dev", ("amd64", "arm64"))
ANALYTICS = Image("analytics", "lab.local/pulsar-trio-proxy-analytics:dev", (NATIVE,))
"""Its last stage runs apt and Java's maintainer scripts, which need the target's processor."""
IMAGES = (PROXY, ANALYTICS)


def ensure_base(progress: Progress = print_status) -> str:
    """Return the name of the base image to build on, after it was pulled or the stand-in was made."""
    base = base_image.without_tag(base_image.read())
    if image_id(base):
        return base
    if image_id(STAND_IN):
        return STAND_IN
    if _pull(base, progress):
        return base
    progress(f"{base} cannot be pulled: making a stand-in from Debian's packages")
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


def ensure_pinned_base(progress: Progress = print_status) -> None:
    """Pull the base image that the Dockerfile names, so that builds take no other.

    BaseError unless it has a digest; ImageError where it cannot be pulled.
    """
    reference = base_image.read()
    base_image.require_pinned(reference, str(_DOCKERFILE))
    base = base_image.without_tag(reference)
    if not image_id(base) and not _pull(base, progress):
        raise ImageError(f"{base} cannot be pulled; ARGS={base_image.ANY_BASE} makes a stand-in from Debian's packages")


def _pull(base: str, progress: Progress) -> bool:
    command = ["timeout", "120", "buildah", "pull", "--quiet", "--retry=0", base]
    return run_reporting(command, lambda s: f"Pulling {base}: {s:.0f} s", progress) is None


def build_command(image: Image, base: str, epoch_s: int, id_file: Path, architecture: str = NATIVE) -> list[str]:
    """Return the command that builds an image and writes its id to `id_file`."""
    command = ["buildah", "bud", "--no-cache", "--pull-never", "--isolation", "chroot", "--network", "host"]
    if _AUTHORITIES.exists():  # package indexes behind a gateway of one's own
        command += ["--volume", f"{_AUTHORITIES}:{_AUTHORITIES}:ro"]
    # BuildKit sets BUILDPLATFORM by itself, buildah 1.28 does not.
    command += ["--platform", f"linux/{architecture}", "--build-arg", f"BUILDPLATFORM=linux/{NATIVE}"]
    command += ["--build-arg", f"BASE={base}", "--build-arg", f"SOURCE_DATE_EPOCH={epoch_s}"]
    command += ["--timestamp", str(epoch_s), "--target", image.target, "--file", str(_DOCKERFILE)]
    return [*command, "--tag", image.tag(architecture), "--iidfile", str(id_file), "."]


def build_image(
    image: Image, progress: Progress = print_status, epoch_s: int | None = None, architecture: str = NATIVE
) -> str:
    """Build an image; return its id, which is the digest of its content and configuration."""
    base = ensure_base(progress)
    epoch_s = source_date_epoch_s() if epoch_s is None else epoch_s
    with tempfile.TemporaryDirectory(prefix="ptp-image-") as directory:
        id_file = Path(directory) / "id"
        command = build_command(image, base, epoch_s, id_file, architecture)
        _run(command, f"Building {image.tag(architecture)}", progress)
        identity = id_file.read_text().strip()
    if image is PROXY:
        _check(identity, architecture, progress)
    return identity


def _check(identity: str, architecture: str, progress: Progress) -> None:
    """Raise ImageError unless the proxy's image is as it must be."""
    with _mounted(identity, architecture) as (container, root):
        found = list(image_check.problems(root))
        if architecture == NATIVE:
            python = ["buildah", "run", "--isolation", "chroot", container, "--", "python3", "-c"]
            _run([*python, image_check.IMPORTS], "Importing the proxy's modules in the image", progress)
            _run([*python, image_check.POST_QUANTUM], "A TLS handshake in the image", progress)
    if (user := _inspect(identity, "{{.OCIv1.Config.User}}")) != image_check.USER:
        found.append(f"its user is {user!r}, not {image_check.USER}")
    if found:
        raise ImageError("\n".join([f"{PROXY.tag(architecture)} is not as it must be:", *found]))


@contextmanager
def _mounted(image: str, architecture: str) -> Iterator[tuple[str, Path]]:
    """Make a container of an image; give its name and its root's path (mounting needs root)."""
    container = _output(["buildah", "from", "--pull-never", "--arch", architecture, image])
    try:
        yield container, Path(_output(["buildah", "mount", container]))
    finally:
        _output(["buildah", "rm", container])


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
        return _inspect(name, "{{.FromImageID}}")
    except ImageError:
        return ""


def _inspect(name: str, template: str) -> str:
    return _output(["buildah", "inspect", "--type", "image", "--format", template, name])


def export_image(image: Image, directory: Path, progress: Progress = print_status) -> Path:
    """Write an image to a file that containerd imports; return the file's path."""
    path = directory / f"{image.target}.image.tar"
    path.unlink(missing_ok=True)
    _run(["buildah", "push", "--quiet", image.name, f"docker-archive:{path}:{image.name}"], f"Writing {path}", progress)
    return path


def write_archive(image: Image, directory: Path, progress: Progress = print_status) -> Path:
    """Build an image for all its architectures; write an OCI layout with their index into a tar file; return its path.

    Equal images give an equal file. The index has no name: `skopeo copy --all oci-archive:FILE docker://…` gives one.
    """
    epoch_s = source_date_epoch_s()
    ids = [build_image(image, progress, epoch_s, architecture) for architecture in image.architectures]
    with tempfile.TemporaryDirectory(prefix="ptp-archive-") as layout:
        index = _output(["buildah", "manifest", "create", f"{image.name}-index"])
        try:
            for one in ids:
                _output(["buildah", "manifest", "add", index, one])
            command = ["buildah", "manifest", "push", "--quiet", "--all", index, f"oci:{layout}"]
            _run(command, f"Writing {directory / image.archive}", progress)
        finally:
            _output(["buildah", "manifest", "rm", index])
        return write_tar(Path(layout), directory / image.archive, epoch_s)


def write_bill_of_materials(image: Image, directory: Path, architecture: str = NATIVE) -> Path:
    """Copy the bill of materials out of a built image, with all of Debian's packages; return the copy's path."""
    with _mounted(image.tag(architecture), architecture) as (_, root):
        (inside,) = (root / "usr/share/sbom").glob("*.cdx.json")
        bill = json.loads(inside.read_text())
        if (root / "var/lib/dpkg/status").exists():  # installed by dpkg after the bill was written
            python_application.add_debian(bill, root)
        target = directory / f"{image.repository}.image-{architecture}.cdx.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{json.dumps(bill, indent=2)}\n")
    return target


def base_material() -> dict[str, Any]:
    """Return the base image, with the digest of this machine's architecture, as a material of a provenance."""
    base = ensure_base()
    return provenance.base_material(base, _inspect(base, "{{.FromImageDigest}}").removeprefix("sha256:"))


def write_tar(source: Path, target: Path, epoch_s: int) -> Path:
    """Write a folder's files to a tar file that depends on nothing but their names and content; return its path."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.mode = epoch_s, 0o755 if entry.isdir() else 0o644
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(source.rglob("*")):
            archive.add(path, str(path.relative_to(source)), recursive=False, filter=plain)
    return target


def _run(command: list[str], doing: str, progress: Progress) -> None:
    failure = run_reporting(command, lambda s: f"{doing}: {s:.0f} s", progress, cwd=ROOT)
    if failure:
        raise ImageError(f"{doing} failed:\n{failure}")


def _output(command: list[str]) -> str:
    try:
        result = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise ImageError(f"{' '.join(command)}: {error} {error.stderr.strip()}") from None
    except OSError as error:
        raise ImageError(f"{' '.join(command)}: {error}") from None
    return result.stdout.strip()


def build_and_compare(image: Image, *, twice: bool) -> bool:
    """Build an image for this machine; return False if a second build of it has another digest."""
    epoch_s = source_date_epoch_s()
    first = build_image(image, epoch_s=epoch_s)
    print(f"{image.name} {first}", flush=True)
    if not twice or (second := build_image(image, epoch_s=epoch_s)) == first:
        return True
    print(f"{image.name} {second}: another digest than the first build's", flush=True)
    return False


@exit_on_error("images")
def main() -> int:
    """Build the images; with `--twice`, compare two builds of each; with `--archives`, write archives instead."""
    parser = argparse.ArgumentParser(prog="make images")
    parser.add_argument("--twice", action="store_true", help="build each image twice and compare the digests")
    parser.add_argument("--archives", action="store_true", help="write dist/*.oci.tar, with all architectures")
    parser.add_argument("targets", nargs="*", help="proxy, analytics; both if none is named")
    options = parser.parse_args()
    chosen = [image for image in IMAGES if not options.targets or image.target in options.targets]
    machine.ensure(machine.IMAGES)
    if options.archives:
        for image in chosen:
            written = [write_archive(image, _DIST)]
            written += [write_bill_of_materials(image, _DIST, architecture) for architecture in image.architectures]
            for path in written:
                print(path.relative_to(ROOT), flush=True)
        return 0
    equal = [build_and_compare(image, twice=options.twice) for image in chosen]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
