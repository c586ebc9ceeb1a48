"""Image archives of a release: tar files of an OCI layout, with one index of all architectures."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".oci.tar"


@dataclass(frozen=True)
class OciArchive:
    """An archive: its file, the digest of its index, the digest of each architecture's manifest."""

    path: Path
    digest: str
    architectures: dict[str, str]

    @property
    def repository(self) -> str:
        """The image's name, without a registry."""
        return self.path.name.removesuffix(SUFFIX)


def read_archive(path: Path) -> OciArchive:
    """Read what an archive holds. ValueError if it is no archive of one index, or the index is not of its digest."""
    with tarfile.open(path) as archive:

        def content(name: str) -> bytes:
            file = archive.extractfile(name)
            if file is None:
                raise ValueError(f"{path.name}: {name} is no file")
            return file.read()

        try:
            (entry,) = json.loads(content("index.json"))["manifests"]
            digest = str(entry["digest"])
            raw = content(f"blobs/{digest.replace(':', '/')}")
            index: dict[str, Any] = json.loads(raw)
            found = {str(one["platform"]["architecture"]): str(one["digest"]) for one in index["manifests"]}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: no OCI archive of one index: {error!r}") from None
    if sha256_digest(raw) != digest:
        raise ValueError(f"{path.name}: its index is not of the digest {digest}")
    return OciArchive(path, digest, found)


def sha256_digest(content: bytes) -> str:
    """Return the digest of a blob, as OCI writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
