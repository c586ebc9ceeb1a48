"""The files of a release in little (images of a few bytes, the real chart, the real provenance), and a registry."""

import hashlib
import json
import socket
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local import go_tools, images, provenance, release
from local.oci_archive import read_archive
from local.ports import free_port
from local.process import OwnedProcess

NUMBER = release.version()
COMMIT = "c" * 40
EPOCH_S = 1_700_000_000
BASE = f"registry.example.org/base:1@sha256:{'b' * 64}"


class Layout:
    """An OCI layout."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "blobs/sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (self.directory / "blobs/sha256" / digest).write_bytes(content)
        return {
            "mediaType": f"application/vnd.oci.image.{media_type}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    def document(self, content: dict[str, Any], kind: str) -> dict[str, Any]:
        media_type = f"{kind}.v1+json"
        if kind != "config":
            content = {"schemaVersion": 2, "mediaType": f"application/vnd.oci.image.{media_type}", **content}
        return self.blob(json.dumps(content).encode(), media_type)

    def image(self, architecture: str, content: bytes) -> dict[str, Any]:
        layer = self.blob(content, "layer.v1.tar")
        rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
        config = self.document({"architecture": architecture, "os": "linux", "rootfs": rootfs}, "config")
        manifest = self.document({"config": config, "layers": [layer]}, "manifest")
        return {**manifest, "platform": {"architecture": architecture, "os": "linux"}}


def write_archive(path: Path, architectures: tuple[str, ...], content: bytes) -> None:
    layout = Layout(path.with_suffix(".layout"))
    index = layout.document({"manifests": [layout.image(one, content) for one in architectures]}, "index")
    (layout.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [index]}))
    images.write_tar(layout.directory, path, EPOCH_S)


@dataclass(frozen=True)
class Release:
    dist: Path
    digests: dict[str, str]


def write_release(
    directory: Path, content: bytes = b"layer", number: str = NUMBER, commit: str = COMMIT, base: str = BASE
) -> Release:
    dist, work = directory / "dist", directory / "work"
    dist.mkdir(parents=True)
    work.mkdir()
    digests = {}
    for image, architectures in ((images.PROXY, ("amd64", "arm64")), (images.ANALYTICS, ("amd64",))):
        write_archive(work / image.archive, architectures, content + image.target.encode())
        (work / image.archive).rename(dist / image.archive)
        digests[image.repository] = read_archive(dist / image.archive).digest
        for architecture in architectures:
            bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": []}
            provenance.write_json(dist / f"{image.repository}.image-{architecture}.cdx.json", bill)
    if go_tools.available():
        release.write_chart(dist, number, digests)
    release.write_provenance(dist, number, commit, digests, [provenance.base_material(base, "b" * 64)])
    return Release(dist, digests)


def rewrite(archive: Path, name: str, content: bytes, work: Path) -> None:
    """Change a file of an archive."""
    with tarfile.open(archive) as file:
        file.extractall(work, filter="data")
    (work / name).write_bytes(content)
    images.write_tar(work, archive, EPOCH_S)


@contextmanager
def serve_registry(directory: Path) -> Iterator[str]:
    """A registry on loopback; its host."""
    host = f"127.0.0.1:{free_port()}"
    command = [go_tools.tool("crane"), "registry", "serve", "--address", host]
    process = OwnedProcess(command, log=directory / "registry.log")
    try:
        while not _answers(host):
            assert process.exit_code() is None, process.log_tail()
            time.sleep(0.05)
        yield host
    finally:
        process.kill()


def _answers(host: str) -> bool:
    address, _, port = host.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((address, int(port))) == 0
