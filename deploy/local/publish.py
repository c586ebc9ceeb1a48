"""`make publish REGISTRY=host/path`: push what `make release` wrote to an OCI registry, and sign it by digest.

| what | where |
|---|---|
| an image, all architectures | host/path/NAME:VERSION |
| the chart | host/path/charts/NAME:VERSION, a repository of its own, since an image has the chart's name |

Pushed is what dist/ holds: the checksums must be those of SHA256SUMS, the provenance's commit that of this tree, and
its base image one with a digest (unless `ARGS=--any-base`).
A version in the registry is never overwritten: where it is what dist/ holds, only what is missing is added, so that an
interrupted run can be repeated; else nothing is pushed. cosign signs with `COSIGN_KEY` (a file, or a key in a KMS) the
indexes, their images and the chart, and attests the provenance and the bills of materials. Nothing of it is told to
Sigstore's public log unless `ARGS=--transparency-log` asks for that, as a public release should.

Logins are those of `docker login` (`DOCKER_CONFIG`). Only to this machine's loopback anything goes without TLS.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from local import base_image, go_tools, release
from local.console import MakeError, exit_on_error
from local.environment import clean_environment
from local.oci_archive import SUFFIX, OciArchive, read_archive, sha256_digest
from local.provenance import base_reference, file_sha256, source_commit

TOOLS = ("crane", "cosign", "helm")
PROVENANCE, BILL = "slsaprovenance1", "cyclonedx"
"""cosign's names of the types of attestations."""

_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9._-]+)+")
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1):")
_CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_ABSENT = re.compile(r"MANIFEST_UNKNOWN|NAME_UNKNOWN|404 Not Found")


class PublishError(MakeError):
    """Something cannot be published; the text says what to do."""


def check_dist(dist: Path, number: str, commit: str, *, any_base: bool = False) -> None:
    """Raise PublishError unless a folder holds the whole release of a version, made of a commit, unchanged.

    BaseError where its images are made on a base without a digest, unless `any_base`.
    """
    names = {release.provenance_name(number), release.chart_bill_name(number), chart_name(number)}
    if missing := sorted(name for name in (*names, release.SUMS) if not (dist / name).exists()):
        raise PublishError(f"dist/ has no {', '.join(missing)}; run `make release` (without --no-images)")
    wanted = {name: digest for digest, name in map(str.split, (dist / release.SUMS).read_text().splitlines())}
    found = {path.name: file_sha256(path) for path in sorted(dist.iterdir()) if path.name != release.SUMS}
    if changed := sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)):
        raise PublishError(f"dist/{', '.join(changed)}: not as {release.SUMS} has it; run `make release`")
    statement = json.loads((dist / release.provenance_name(number)).read_text())
    if (made_of := source_commit(statement)) != commit:
        raise PublishError(f"dist/ is of commit {made_of}, this tree is at {commit}; run `make release`")
    if not any_base:
        base_image.require_pinned(base_reference(statement), f"dist/{release.provenance_name(number)}")


def chart_name(number: str) -> str:
    """Return the file name of the chart's package."""
    return f"{release.NAME}-{number}.tgz"


@dataclass(frozen=True)
class Signer:
    """Signs references by digest, and what is attested of them; each once, since it asks what the key has signed."""

    signing: tuple[str, ...]
    verification: tuple[str, ...]

    @classmethod
    def prepare(cls, key: str, directory: Path, *, transparency_log: bool) -> Signer:
        """Write what cosign needs into a folder: the public key; without the log, a list of no services."""
        public, services = directory / "cosign.pub", directory / "signing-config.json"
        _run("cosign", "public-key", "--key", key, "--outfile", str(public))
        signing, verification = ("--key", key, "--yes"), ("--key", str(public))
        if transparency_log:
            return cls(signing, verification)
        _run("cosign", "signing-config", "create", "--out", str(services))
        return cls((*signing, "--signing-config", str(services)), (*verification, "--private-infrastructure"))

    def sign(self, reference: str, attested: dict[str, Path]) -> None:
        """Attest predicates (by cosign's name of their type), then sign, so that what is signed has all of them."""
        for kind, predicate in attested.items():
            attest = ("attest", *self.signing, "--type", kind, "--predicate", str(predicate), reference)
            self._once(attest, ("verify-attestation", "--type", kind, *self.verification, reference))
        self._once(("sign", *self.signing, reference), ("verify", *self.verification, reference))

    def _once(self, make: tuple[str, ...], verify: tuple[str, ...]) -> None:
        if _call("cosign", *verify).returncode:
            _run("cosign", *make)
            _run("cosign", *verify)


@dataclass(frozen=True)
class Publisher:
    """Pushes to one registry (host and path), signs with one key."""

    registry: str
    key: str
    transparency_log: bool = False

    def publish(self, dist: Path, number: str) -> list[str]:
        """Push, sign and attest all of a release; return the references, by digest. PublishError: see the text."""
        archives = [read_archive(path) for path in sorted(dist.glob(f"*{SUFFIX}"))]
        chart = dist / chart_name(number)
        for archive in archives:  # all before the first push
            self._check_image(archive, number)
        self._pushed_chart(chart, number)
        with tempfile.TemporaryDirectory(prefix="ptp-publish-") as directory:
            signer = Signer.prepare(self.key, Path(directory), transparency_log=self.transparency_log)
            predicate = Path(directory) / "provenance.json"
            statement = json.loads((dist / release.provenance_name(number)).read_text())
            predicate.write_text(json.dumps(statement["predicate"]))
            references = []
            for archive in archives:
                repository = self._push_image(archive, number)
                for architecture, digest in archive.architectures.items():
                    bill = dist / f"{archive.repository}.image-{architecture}.cdx.json"
                    signer.sign(f"{repository}@{digest}", {BILL: bill})
                references.append(f"{repository}@{archive.digest}")
                signer.sign(references[-1], {PROVENANCE: predicate})
            references.append(self._push_chart(chart, number))
            bill = dist / release.chart_bill_name(number)
            signer.sign(references[-1], {BILL: bill, PROVENANCE: predicate})
        return references

    def _check_image(self, archive: OciArchive, number: str) -> bool:
        """Return whether the registry has an image of this version. Raises PublishError if that is another one."""
        reference = f"{self.registry}/{archive.repository}:{number}"
        present = self._manifest(reference)
        if present is not None and (found := sha256_digest(present)) != archive.digest:
            raise PublishError(f"{reference}: the registry has {found}, dist/ has {archive.digest}; {_NEVER}")
        return present is not None

    def _push_image(self, archive: OciArchive, number: str) -> str:
        """Push an image unless it is there; return its repository."""
        repository = f"{self.registry}/{archive.repository}"
        if not self._check_image(archive, number):
            with tempfile.TemporaryDirectory(prefix="ptp-layout-") as layout:
                with tarfile.open(archive.path) as file:
                    file.extractall(layout, filter="data")
                _run("crane", "push", layout, f"{repository}:{number}")
            if not self._check_image(archive, number):
                raise PublishError(f"{repository}:{number}: the registry does not have what was pushed")
        return repository

    def _pushed_chart(self, package: Path, number: str) -> str | None:
        """Return the digest of the chart of this version in the registry, None if there is none.

        Helm writes the time into the manifest, so what is compared is the package in it.
        """
        reference = f"{self.registry}/charts/{release.NAME}:{number}"
        if (present := self._manifest(reference)) is None:
            return None
        layers = [one["digest"] for one in json.loads(present).get("layers", []) if one["mediaType"] == _CHART_LAYER]
        if layers != [f"sha256:{file_sha256(package)}"]:
            raise PublishError(f"{reference}: the registry has another package than dist/; {_NEVER}")
        return sha256_digest(present)

    def _push_chart(self, package: Path, number: str) -> str:
        """Push the chart unless it is there; return its reference."""
        digest = self._pushed_chart(package, number)
        if digest is None:
            plain = ["--plain-http"] if _LOOPBACK.match(self.registry) else []
            _run("helm", "push", str(package), f"oci://{self.registry}/charts", *plain)
            digest = self._pushed_chart(package, number)
        if digest is None:
            raise PublishError(f"{self.registry}/charts: the registry does not have the chart that was pushed")
        return f"{self.registry}/charts/{release.NAME}@{digest}"

    def _manifest(self, reference: str) -> bytes | None:
        """Return the manifest of a reference, None if there is none; any other answer raises PublishError."""
        result = _call("crane", "manifest", reference)
        if result.returncode == 0:
            return result.stdout
        if _ABSENT.search(text := result.stderr.decode(errors="replace")):
            return None
        raise PublishError(f"{reference}: {text.strip()}")


_NEVER = "a version that is published is never overwritten: release another one"


def _run(tool: str, *arguments: str) -> None:
    result = _call(tool, *arguments)
    if result.returncode:
        raise PublishError(f"{tool} {arguments[0]} failed:\n{result.stderr.decode(errors='replace').strip()}")


def _call(tool: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [str(go_tools.tool(tool)), *arguments]
    return subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL, env=clean_environment())


def check_destination(registry: str, key: str) -> None:
    """Raise PublishError unless a registry's path and a key are given."""
    if not _REGISTRY.fullmatch(registry):
        raise PublishError(f"REGISTRY: {registry!r} is no host/path; write, for example, registry.example.org/pulsar")
    if not key:
        raise PublishError("COSIGN_KEY: empty; name a file of `cosign generate-key-pair`, or a key in a KMS")
    if "://" not in key and not Path(key).is_file():
        raise PublishError(f"COSIGN_KEY: no file {key}; `cosign generate-key-pair` writes one")


@exit_on_error("publish", ValueError, OSError)
def main() -> None:
    """Check, push, sign."""
    parser = argparse.ArgumentParser(prog="make publish")
    parser.add_argument("registry", help="host and path, without oci://")
    parser.add_argument("--transparency-log", action="store_true", help="record signatures in Sigstore's public log")
    parser.add_argument(base_image.ANY_BASE, action="store_true", help="publish images on a base without a digest")
    options = parser.parse_args()
    key = os.environ.get("COSIGN_KEY", "")
    number = release.version()
    check_destination(options.registry, key)
    release.check_release(number, release.CHANGELOG.read_text(), release.CHART.read_text())
    check_dist(release.DIST, number, release.clean_commit(), any_base=options.any_base)
    go_tools.install_tools(TOOLS)
    for reference in Publisher(options.registry, key, options.transparency_log).publish(release.DIST, number):
        print(reference, flush=True)


if __name__ == "__main__":
    main()
