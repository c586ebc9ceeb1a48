"""What a release says of itself: an in-toto statement with SLSA's provenance, and the chart's bill of materials.

Neither has a time or a random number, so that equal source and equal materials give equal files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:pulsar-trio-proxy:make-release:1"
BUILDER = "urn:pulsar-trio-proxy:unattested-machine"
"""The builder where `BUILDER_ID` names none: a machine of which nothing is known."""

_BASE = "base image"

Json = dict[str, Any]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def locked_lists(root: Path) -> list[Json]:
    """Return the lists of Python packages as materials; each of them has the hashes of the packages' files."""
    lists = [root / "constraints.txt", *sorted((root / "deploy/requirements").glob("*.txt"))]
    return [{"name": str(path.relative_to(root)), "digest": {"sha256": file_sha256(path)}} for path in lists]


def debian_packages(bills: Iterable[Path]) -> list[Json]:
    """Return the Debian packages of bills of materials as materials, each once."""
    found: dict[str, Json] = {}
    for path in bills:
        for component in json.loads(path.read_text()).get("components", []):
            if (purl := component.get("purl", "")).startswith("pkg:deb/"):
                hashes = {one["alg"]: one["content"] for one in component.get("hashes", [])}
                digest = {"digest": {"sha256": hashes["SHA-256"]}} if "SHA-256" in hashes else {}
                found[purl] = {"uri": purl, **digest}
    return [found[purl] for purl in sorted(found)]


def statement(subjects: Mapping[str, str], number: str, commit: str, materials: Iterable[Json]) -> Json:
    """Return the statement on subjects (SHA-256 by name) that are made of a commit and of other materials."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": number},
                "resolvedDependencies": [{"name": "source", "digest": {"gitCommit": commit}}, *materials],
            },
            "runDetails": {"builder": {"id": os.environ.get("BUILDER_ID") or BUILDER}},
        },
    }


def base_material(reference: str, sha256: str) -> Json:
    """Return the base image of the build as a material."""
    return {"name": _BASE, "uri": f"docker://{reference}", "digest": {"sha256": sha256}}


def base_reference(made: Json) -> str:
    """Return the reference to the base image of a statement; empty if it has none."""
    dependencies = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    return next((str(one["uri"]).removeprefix("docker://") for one in dependencies if one.get("name") == _BASE), "")


def source_commit(made: Json) -> str:
    """Return the commit of a statement."""
    dependencies = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    return next(str(one["digest"]["gitCommit"]) for one in dependencies if one.get("name") == "source")


def chart_bill(package: Path, name: str, number: str, digests: Mapping[str, str]) -> Json:
    """Return the chart's bill of materials: its package, and the images that it names (digests by repository)."""
    chart = f"pkg:helm/{name}@{number}"
    images = {repository: f"pkg:oci/{repository}@{quote(digest, safe='')}" for repository, digest in digests.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": chart,
                "name": name,
                "version": number,
                "purl": chart,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": file_sha256(package)}],
            }
        },
        "components": [
            {"type": "container", "bom-ref": purl, "name": repository, "version": digests[repository], "purl": purl}
            for repository, purl in images.items()
        ],
        "dependencies": [
            {"ref": chart, "dependsOn": list(images.values())},
            *({"ref": one} for one in images.values()),
        ],
    }


def write_json(path: Path, content: Json) -> Path:
    """Write JSON to a file; return the file's path."""
    path.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n")
    return path
