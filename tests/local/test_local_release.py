"""deploy/local/release.py: the version stands once, and a release is refused where something is of another one."""

from __future__ import annotations

import pytest
from local import base_image, go_tools, machine, release
from local.release import CHANGELOG, CHART, ReleaseError, check_release, version

from proxy import __version__
from tests.local.conftest import FakeCommand

CHART_TEXT = "name: x\nversion: 1.2.3\nappVersion: 1.2.3\nkind: y\n"


def test_the_version_of_this_tree() -> None:
    assert version() == __version__
    check_release(__version__, CHANGELOG.read_text(), CHART.read_text())


@pytest.mark.parametrize(
    ("changelog", "chart", "complaint"),
    [
        ("## Unreleased\n", CHART_TEXT, "CHANGELOG.md has no section '## 1.2.3"),
        ("## 1.2.3\n", CHART_TEXT, "CHANGELOG.md has no section"),
        ("## 1.2.3 (2026-11-23)\n", "\nversion: 1.2.3\nappVersion: 1.2.30\n", "appVersion in Chart.yaml is not"),
        ("## 1.2.3 (2026-11-23)\n", "\nversion: 1.2.4\nappVersion: 1.2.3\n", "version in Chart.yaml is not 1.2.3"),
    ],
)
def test_a_release_with_inconsistent_versions_is_refused(changelog: str, chart: str, complaint: str) -> None:
    with pytest.raises(ReleaseError) as raised:
        check_release("1.2.3", changelog, chart)
    assert complaint in str(raised.value)


def test_a_release_with_consistent_versions_is_accepted() -> None:
    check_release("1.2.3", "# Changelog\n\n## 1.2.3 (2026-11-23)\n", CHART_TEXT)


def test_without_root_the_way_to_the_python_packages_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["release"])
    with pytest.raises(SystemExit, match="1"):
        release.main()
    error = capsys.readouterr().err
    assert "Images are built by root." in error
    assert "Wheel and sdist alone, without images and chart: ARGS=--no-images" in error


@pytest.mark.parametrize(
    ("base", "complaint"),
    [
        ("registry.example.org/base:1", "Dockerfile: the base image registry.example.org/base:1 has no digest"),
        (f"registry.example.org/base:1@sha256:{'b' * 64}", f"base@sha256:{'b' * 64} cannot be pulled"),
    ],
)
def test_a_base_without_a_digest_or_out_of_reach_is_refused_unless_any_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake_command: FakeCommand,
    base: str,
    complaint: str,
) -> None:
    fake_command("buildah", "exit 1")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(machine, "ensure", lambda what: None)
    monkeypatch.setattr(go_tools, "available", lambda: True)
    monkeypatch.setattr(go_tools, "install_tools", lambda names: None)
    monkeypatch.setattr(base_image, "read", lambda: base)
    prepared: list[str] = []
    monkeypatch.setattr(release.Environment, "prepare", lambda self, what: prepared.append(what))
    monkeypatch.setattr(release, "release", lambda environment, with_images: None)
    monkeypatch.setattr("sys.argv", ["release"])
    with pytest.raises(SystemExit, match="1"):
        release.main()
    error = capsys.readouterr().err
    assert complaint in error
    assert "ARGS=--any-base" in error
    assert not prepared
    monkeypatch.setattr("sys.argv", ["release", "--any-base"])
    release.main()
    assert prepared == ["release"]
