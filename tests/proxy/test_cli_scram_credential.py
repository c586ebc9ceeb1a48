"""The command `scram-credential`: where the password comes from, and what is printed."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from auth.providers.scram import ITERATIONS_DEFAULT, scram_providers
from proxy import cli
from proxy.config.types import ScramAuthentication

PASSWORD = "not-to-be-seen"


def run(*arguments: str, typed: str | bytes = PASSWORD + "\n") -> Result:
    result = CliRunner().invoke(cli.main, ["scram-credential", *arguments], input=typed)
    assert PASSWORD not in result.output
    return result


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("typed", [PASSWORD, PASSWORD + "\n", PASSWORD + "\r\nmore\n"])
def test_a_line_from_standard_input(tmp_path: Path, mechanism: str, typed: str) -> None:
    result = run("--user", "alice", "--mechanism", mechanism, typed=typed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"alice:{mechanism}${ITERATIONS_DEFAULT}:")
    (tmp_path / "users").write_text(result.stdout)
    assert len(list(scram_providers(ScramAuthentication(file=str(tmp_path / "users"))))) == 2


def test_the_password_is_the_first_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("auth.providers.scram.credential_line", lambda *arguments: seen.append(arguments) or "a line")
    assert run("--user", "alice", "--iterations", "5000", typed=f" {PASSWORD} \r\nmore\n").stdout == "a line\n"
    assert seen == [("alice", f" {PASSWORD} ", "SCRAM-SHA-256", 5000)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_is_terminal", lambda: True)


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_it_is_asked_for_twice_and_not_shown() -> None:
    result = run("--user", "alice", typed=f"{PASSWORD}\n{PASSWORD}\n")
    assert result.exit_code == 0
    assert result.stderr == "Password: \nRepeat for confirmation: \n"
    assert result.stdout.startswith("alice:SCRAM-SHA-256$")


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_both_must_be_the_same() -> None:
    result = run("--user", "alice", typed=f"{PASSWORD}\nanother\n{PASSWORD}\n{PASSWORD}\n")
    assert "do not match" in result.stderr
    assert result.exit_code == 0
    assert run("--user", "alice", typed=f"{PASSWORD}\nanother\n").exit_code == 1


def test_no_option_takes_a_password() -> None:
    names = {name for option in cli.scram_credential.params for name in option.opts}
    assert names == {"--user", "--mechanism", "--iterations"}
    assert not [option for option in cli.scram_credential.params if isinstance(option, click.Argument)]
    assert run("--user", "alice", "password").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "typed", "said"),
    [
        (["--user", "alice"], "", "the password is empty"),
        (["--user", "alice"], "\n", "the password is empty"),
        (["--user", "alice"], b"\xff\n", "the password is not UTF-8"),
        (["--user", "alice"], "a\u0007\n", "the password has characters that SASLprep"),
        (["--user", "alice", "--iterations", "0"], PASSWORD, "fewer than 4096 iterations"),
        (["--user", "#alice"], PASSWORD, "not a user's name"),
    ],
)
def test_invalid_input_is_refused_with_a_reason(arguments: list[str], typed: str | bytes, said: str) -> None:
    result = run(*arguments, typed=typed)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"pulsar-trio-proxy: {said}")


def test_other_mechanisms_are_refused() -> None:
    assert run("--user", "alice", "--mechanism", "SCRAM-SHA-1").exit_code == 2
