"""The manual pages: they are of the commands as they are, and roff takes no text for a request of its own."""

from __future__ import annotations

import re
import shutil
import subprocess

import click
import pytest
from local.environment import ROOT
from local.man_page import PAGES, page

from analytics.cli import main as analytics
from proxy import __version__
from proxy.cli import main as proxy

_COMMANDS: dict[str, click.Group] = {"pulsar-trio-proxy": proxy, "pulsar-proxy-analytics": analytics}
_REQUESTS = {'.\\"', ".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".BR"}


@click.group(help=".hidden 'quoted'")
def _hostile() -> None: ...


@_hostile.command()
@click.argument("file")
@click.option("--text", help=".TH is `code` with a back\\slash, a → and é")
@click.option("--no-help")
@click.option("--unseen", hidden=True)
def _one(file: str, text: str, no_help: str, unseen: str) -> None:
    """'Begin with a quote.

    Another
    paragraph.
    """


def _requests(text: str) -> set[str]:
    return {line.split(" ")[0] for line in text.splitlines() if line.startswith((".", "'"))}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_in_step_with_its_command(name: str) -> None:
    made = page(_COMMANDS[name], name, __version__)
    assert (ROOT / PAGES[name]).read_text() == made, "run `make generate`"
    assert _requests(made) <= _REQUESTS
    sections = re.findall(r"^\.SS (\S+)", made, re.MULTILINE)
    with click.Context(_COMMANDS[name]) as context:
        assert [section.replace("\\-", "-") for section in sections] == _COMMANDS[name].list_commands(context)


@pytest.mark.parametrize("name", PAGES)
def test_groff_has_no_warning(name: str) -> None:
    if shutil.which("groff"):  # a minimal Debian has none
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", ROOT / PAGES[name]], check=True, capture_output=True
        )
        assert not done.stderr


def test_text_is_no_request() -> None:
    made = page(_hostile, "pulsar-trio-proxy", "1")
    assert _requests(made) <= _REQUESTS
    assert made.isascii()
    assert "pulsar-trio-proxy \\- \\&.hidden 'quoted'\n" in made
    assert "\n\\&'Begin with a quote.\n.PP\nAnother paragraph.\n" in made
    assert "\n.B \\-\\-text TEXT\n\\&.TH is \\fBcode\\fR with a back\\eslash, a \\[u2192] and \\[u00E9]\n" in made
    assert "\n.B \\-\\-no\\-help TEXT\n\\&\n" in made
    assert "unseen" not in made
