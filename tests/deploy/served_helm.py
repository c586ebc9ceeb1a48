"""The chart as each Helm's server renders it: see local.helm_server. The same as `helm template`, at a fraction."""

import atexit
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from local import go_tools

Outcome = subprocess.CompletedProcess[str]


class ServedHelm:
    """A process that renders the chart again and again."""

    def __init__(self, name: str, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._values, self._errors = (Path(self._directory.name) / file for file in ("values.json", "errors"))
        self._values.write_text("{}")
        with self._errors.open("a") as errors:
            self._process = subprocess.Popen(
                [go_tools.tool(name), "template", *arguments, "--values", self._values],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "GOGC": "400", "GOMAXPROCS": "1"},
            )
        self.outcome()  # of the command line, without values

    def ask(self, values: str, kubernetes: str, release: str) -> None:
        """Ask for a rendering; `outcome` has to follow."""
        self._values.write_text(values)
        self._errors.write_text("")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{release} {kubernetes}\n")
        self._process.stdin.flush()

    def outcome(self) -> Outcome:
        """Wait for the rendering, or the refusal."""
        assert self._process.stdout is not None
        text, end = "", ""
        while not end:
            line = self._process.stdout.readline()
            assert line, f"the server has ended: {self._errors.read_text()}"
            more, end, is_rendered = line.partition("\0")
            text += more
        return Outcome(self._process.args, 0 if is_rendered == "true\n" else 1, text, self._errors.read_text())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._directory.cleanup()


@functools.cache
def server(helm: str, *arguments: str) -> ServedHelm:
    """The one server of this process with these arguments."""
    served = ServedHelm(f"{helm}-server", *arguments)
    atexit.register(served.close)
    return served


def served_helms(
    names: Sequence[str], values: str, kubernetes: str, release: str, *arguments: str
) -> dict[str, Outcome]:
    """What each of these Helms answers, by its name in go_tools; all at once."""
    servers = {name: server(name, *arguments) for name in names}
    for one in servers.values():
        one.ask(values, kubernetes, release)
    return {name: one.outcome() for name, one in servers.items()}
