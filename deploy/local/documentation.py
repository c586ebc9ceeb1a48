"""`make docs`: the documentation as a site, in build/site. A link or heading that is not there is an error."""

from __future__ import annotations

import subprocess
from pathlib import Path

from local import machine
from local.console import MakeError, exit_on_error
from local.environment import ROOT, Environment, clean_environment

SITE = ROOT / "build/site"
_STRICT = ("--quiet", "--nitpicky", "--fail-on-warning", "--keep-going", "--fresh-env")
_FIRST_PAGE = (
    '<!doctype html><meta charset="utf-8"><title>README</title><meta http-equiv="refresh" content="0; url={}">\n'
)


class SiteError(MakeError):
    """The site cannot be built; the text has each page's mistakes."""


def build(environment: Environment, source: Path, out: Path, work: Path) -> None:
    """Build the site of a tree into a folder. Raises SiteError where a page is wrong."""
    command = [str(environment.python), "-m", "sphinx", *_STRICT, "--conf-dir", str(source / "docs")]
    command += ["--doctree-dir", str(work), str(source), str(out)]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=environment.root, env=clean_environment()
    )
    if result.returncode:
        raise SiteError(f"The site cannot be built:\n{result.stdout}{result.stderr}")
    (out / "index.html").write_text(_FIRST_PAGE.format("README.html"))


@exit_on_error("docs", OSError)
def main() -> None:
    """Prepare the environment, then build."""
    machine.ensure((machine.VENV,))
    environment = Environment()
    environment.prepare("docs")
    build(environment, ROOT, SITE, ROOT / "build/site-work")
    print(f"{SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
