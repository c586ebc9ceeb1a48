"""`pulsar-trio-proxy completion`: what a shell offers for an unfinished command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy import cli
from proxy.common.connection_kinds import KINDS

PROGRAM = "pulsar-trio-proxy"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that finds the command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / PROGRAM).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m proxy "$@"\n')
    (folder / PROGRAM).chmod(0o755)
    root = Path(cli.__file__).resolve().parents[1]
    kept = {key: value for key, value in os.environ.items() if key.startswith("COV")}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(root), "TERM": "dumb", "PS1": "> "}


def _offered(environment: dict[str, str], *words: str) -> list[str]:
    """What bash offers for the last word."""
    script = f"""
        source <({PROGRAM} completion bash)
        name=$(complete -p {PROGRAM} | sed -E 's/.* -F ([^ ]+) .*/\\1/')
        COMP_WORDS=({PROGRAM} {" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words)}
        "$name" {PROGRAM}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("",), sorted(cli.main.commands)),
        (("dis",), ["disconnect"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("connections", "--kind", ""), list(KINDS)),
        (("disconnect", "--dry"), ["--dry-run"]),
        (("serve", "--leg"), []),
        (("no-such-command", ""), sorted(cli.main.commands)),  # no error
    ],
)
def test_bash_offers(environment: dict[str, str], words: tuple[str, ...], offered: list[str]) -> None:
    assert _offered(environment, *words) == offered


class _Terminal:
    """The terminal of a shell: what is typed, and what comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = ""

    def type(self, text: str, *, until: str) -> None:
        os.write(self._descriptor, text.encode())
        while until not in self._shown:
            self._shown += os.read(self._descriptor, 4096).decode()
        self._shown = self._shown.partition(until)[2]


@contextmanager
def _interactive(environment: dict[str, str], folder: Path) -> Iterator[_Terminal]:
    ours, theirs = os.openpty()
    command = ["bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    ) as shell:
        os.close(theirs)
        try:
            yield _Terminal(ours)
        finally:
            shell.kill()
            os.close(ours)


def test_the_tabulator_of_an_interactive_bash(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "only-here.toml").touch()
    with _interactive(environment, tmp_path) as terminal:
        terminal.type(f"source <({PROGRAM} completion bash); echo rea''dy\n", until="ready\r\n")
        terminal.type(f"{PROGRAM} che\t", until=f"{PROGRAM} check ")
        terminal.type("--conf\t", until="--config ")
        terminal.type("only\t", until="only-here.toml ")


@pytest.mark.parametrize(
    ("shell", "registers"), [("zsh", f"#compdef {PROGRAM}"), ("fish", f"complete --no-files --command {PROGRAM}")]
)
def test_scripts_of_other_shells(shell: str, registers: str) -> None:
    done = CliRunner().invoke(cli.main, ["completion", shell])
    assert registers in done.output
    asked = {"_PULSAR_TRIO_PROXY_COMPLETE": f"{shell}_complete", "COMP_WORDS": f"{PROGRAM} scr", "COMP_CWORD": "1"}
    assert all(key in done.output for key in asked)


def test_an_unknown_shell_is_named() -> None:
    done = CliRunner().invoke(cli.main, ["completion", "csh"])
    assert done.exit_code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in done.output
