"""The tools for the chart's tests are built once and appear whole or not at all; without Go nothing is done."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from local import go_tools, helm_server
from local.go_tools import MODULES, TOOLS, Tool, ToolError

FakeCommand = Callable[[str, str], Path]

GO = """
echo "$@" >> "{log}"
case "$1" in
  version) echo "go version go1.26.1 linux/amd64" ;;
  mod) echo '{{"Dir": "{modules}"}}' ;;
  install) {install} ;;
esac
"""
BUILDS = 'for last; do :; done; name=${last%@*}; echo built > "$GOBIN/${name##*/}"'


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_tools, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def go(fake_command: FakeCommand, tmp_path: Path, cache: Path) -> "Go":
    return Go(fake_command, tmp_path)


class Go:
    """A `go` of our own."""

    def __init__(self, fake_command: FakeCommand, directory: Path) -> None:
        self._fake_command = fake_command
        self._log = directory / "go.log"
        self.modules = directory / "modules"
        for name, old, _ in {change for tool in TOOLS for change in tool.changes}:
            file = self.modules / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if old and old not in (there := file.read_text() if file.exists() else ""):
                file.write_text(there + old)

    def does(self, install: str) -> None:
        self._log.write_text("")
        self._fake_command("go", GO.format(log=self._log, modules=self.modules, install=install))

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines()


def test_tools_are_built_once_at_their_versions(go: Go) -> None:
    go.does(BUILDS)
    go_tools.install(lambda _: None)
    assert all(tool.path.read_text() == "built\n" for tool in TOOLS)
    installed = [call for call in go.calls if call.startswith("install")]
    wanted = ["./cmd/helm" if tool.changes else f"{tool.package}@{tool.version}" for tool in TOOLS]
    assert [call.rpartition(" ")[2] for call in installed] == wanted
    assert all([file.name for file in tool.path.parent.iterdir()] == [tool.path.name] for tool in TOOLS)
    go.does("exit 1")
    go_tools.install(lambda _: None)
    assert not [call for call in go.calls if call.startswith("install")]


def test_a_change_makes_another_tool() -> None:
    one, other = (Tool("helm", "helm.sh/cmd/helm", "v1", (("main.go", "one", text),)) for text in ("two", "three"))
    assert one.path != other.path


def test_sources_are_changed_in_their_places_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "main.go").write_text("one two two")
    helm_server.apply((("main.go", "one", "1"), ("new.go", "", "new")), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"main.go": "1 two two", "new.go": "new"}
    for text in ("two", "three"):
        with pytest.raises(ValueError, match=f"main.go has not exactly one '{text}'"):
            helm_server.apply((("main.go", text, "2"),), tmp_path)


def test_a_build_that_fails_leaves_nothing_and_says_why(go: Go) -> None:
    go.does('echo half > "$GOBIN/helm"; echo no such revision; exit 1')
    with pytest.raises(ToolError, match="no such revision"):
        go_tools.install(lambda _: None)
    assert not TOOLS[0].path.exists()
    assert [path.name for path in TOOLS[0].path.parent.parent.iterdir()] == []


def test_modules_are_fetched_and_found(go: Go) -> None:
    go.does(BUILDS)
    assert go_tools.module_directory(MODULES[0]) == go.modules
    assert go.calls == [f"mod download -json {MODULES[0]}"]


def test_a_module_that_cannot_be_had_says_why(fake_command: FakeCommand) -> None:
    fake_command("go", f"echo '{json.dumps({'Error': 'unknown revision'})}'; exit 1")
    with pytest.raises(ToolError, match="unknown revision"):
        go_tools.module_directory(MODULES[0])


def test_without_go_nothing_is_done(cache: Path, fake_command: FakeCommand) -> None:
    fake_command("go", "echo go version go1.19.8 linux/amd64")
    go_tools.install(lambda _: None)
    assert not TOOLS[0].path.exists()
    assert not go_tools.available()


FAILS_TWICE = 'echo x >> "{tries}"; [ $(wc -l < "{tries}") -ge 3 ] || {{ echo no route; exit 1; }}; '


def test_a_build_is_tried_again(go: Go, tmp_path: Path) -> None:
    go.does(FAILS_TWICE.format(tries=tmp_path / "tries") + BUILDS)
    go_tools.install(lambda _: None)
    assert all(tool.path.read_text() == "built\n" for tool in TOOLS)
    assert len([call for call in go.calls if call.startswith("install")]) == len(TOOLS) + 2


def test_a_module_is_tried_again_but_not_for_ever(fake_command: FakeCommand, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    fake_command("go", FAILS_TWICE.format(tries=tries) + f"echo '{json.dumps({'Dir': '/modules'})}'")
    assert go_tools.module_directory(MODULES[0]) == Path("/modules")
    fake_command("go", f'echo x >> "{tries}"; exit 1')
    with pytest.raises(ToolError):
        go_tools.module_directory(MODULES[0])
    assert len(tries.read_text().split()) == 6
