"""docs/getting-started.md: what its files say fits together, and with what they are for."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path

import pytest

from proxy.config.types import Config, Limits
from tests.docs.blocks import ROOT, Block, blocks, commands

PAGE = "docs/getting-started.md"


def _file(name: str) -> Block:
    (found,) = (block for block in blocks(PAGE) if Path(block.file).name == name)
    return found


@pytest.fixture
def unit() -> configparser.ConfigParser:
    """The unit of systemd."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(_file("pulsar-trio-proxy.service").text)
    return parser


@pytest.fixture
def tree() -> dict[str, dict[str, object]]:
    """The configuration of the proxy."""
    return tomllib.loads(_file("proxy.toml").text)


def test_the_unit_runs_what_the_page_has_the_reader_try(unit: configparser.ConfigParser) -> None:
    shown = [command.head for block in blocks(PAGE) for command in commands(block)]
    assert unit["Service"]["ExecStart"] in shown
    assert unit["Service"]["ExecReload"] in shown


def test_the_unit_leaves_time_for_a_drain(unit: configparser.ConfigParser) -> None:
    drained_s = (Config().shutdown.delay_ms + Limits().drain_timeout_ms) / 1000 + 10
    assert int(unit["Service"]["TimeoutStopSec"]) >= drained_s
    assert unit["Service"]["KillMode"] == "mixed", "only the supervisor is told to drain"


def test_open_files_are_enough_for_the_connections(
    unit: configparser.ConfigParser, tree: dict[str, dict[str, object]]
) -> None:
    connections = tree["limits"]["max_connections"]
    assert isinstance(connections, int)
    assert int(unit["Service"]["LimitNOFILE"]) == connections * 4 + 4096


def test_the_folder_of_the_sockets_is_the_one_that_systemd_makes(
    unit: configparser.ConfigParser, tree: dict[str, dict[str, object]]
) -> None:
    assert tree["cluster"]["runtime_dir"] == f"/run/{unit['Service']['RuntimeDirectory']}"
    assert unit["Service"]["RuntimeDirectoryMode"] == "0700"


def test_the_client_is_the_one_that_the_tests_have() -> None:
    (pinned,) = re.findall(r"pip install pulsar-client==(\S+)", (ROOT / PAGE).read_text())
    assert f"pulsar-client=={pinned} \\" in (ROOT / "constraints.txt").read_text().splitlines()
