"""The command: each command's module is imported only when it is called, and errors are sentences."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from analytics.cli import COMMANDS, main
from analytics.commands.command_line import errors_as_messages, spark_reason
from analytics.jobs.progress import Progress
from analytics.tables.store import Tables

MINE = ("ingest", "backfill", "compact", "expire")


def test_help_and_the_receiver_import_no_spark() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom analytics.cli import main\n"
        "for arguments in (['--help'], ['receive', '--help'], ['ingest', '--help']):\n"
        "    result = CliRunner().invoke(main, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        "print('pyspark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("numpy", ["receive", "--config", "x"]),
        ("pyspark", ["rollup", "--tables", "x"]),
        ("deltalake", ["usage", "--tables", "x"]),
        ("pyspark", ["pipeline", "--tables", "x", "--spool", "."]),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(package: str, arguments: list[str]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from analytics.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    said = f"Error: the package {package} is missing: pip install 'pulsar-trio-proxy[analytics]'"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)


def test_help_lists_every_command() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    assert all(name in output for name in COMMANDS)


@pytest.mark.parametrize("name", MINE)
def test_each_command_tells_its_options(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "--tables" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "no such command: nonsense; there are: receive, "),
        (["ingest", "--tables", "x", "--spool", "/nowhere"], "'/nowhere' does not exist"),
        (["ingest", "--tables", "x", "--spool", "/", "--follow", "0"], "0.1"),
        (["expire", "--tables", "x", "--keep", "nonsense=3"], "no table that can expire"),
        (
            ["backfill", "--tables", "x", "--url", "ftp://x", "--match", "m", "--start", "2026-01-01", "--end",
             "2026-01-02"],
            "url must be http",
        ),
        (
            ["backfill", "--tables", "x", "--url", "http://x", "--match", "m", "--start", "2026-01-02", "--end",
             "2026-01-01"],
            "start must be before end",
        ),
    ],
)  # fmt: skip
def test_bad_options_are_told_before_spark_starts(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_job_without_tables_says_so(spark: SparkSession, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compact", "--tables", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: there are no tables at file:")
    Tables.open(spark, str(tmp_path))
    result = CliRunner().invoke(main, ["expire", "--tables", str(tmp_path)])
    assert result.exit_code == 0, result.output


def test_ingest_by_its_command(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    result = CliRunner().invoke(main, ["ingest", "--spool", str(tmp_path / "spool"), "--tables", str(tmp_path / "t")])
    assert result.exit_code == 0, result.output
    assert ", 0 samples added" in result.output


def test_of_sparks_words_those_that_name_the_cause() -> None:
    text = "[X] Traceback:\n  File x\nanalytics.sources.options.BadOption: needs the option 'path'\n"
    assert spark_reason(text) == "BadOption: needs the option 'path'"
    text = "[Z] Traceback:\n  File x\nAttributeError: no 'y'\n SQLSTATE: 38000\n\tat org.apache.X\njava.lang.Error: z"
    assert spark_reason(text) == "AttributeError: no 'y'"
    assert spark_reason("[Y] first\nsecond") == "[Y] first"
    assert spark_reason("") == "Spark said nothing"


def test_an_unknown_error_is_not_swallowed() -> None:
    with pytest.raises(Py4JError), errors_as_messages():
        raise Py4JError("a bug")
    with pytest.raises(ZeroDivisionError), errors_as_messages():
        raise ZeroDivisionError


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.print_line("batch 1", samples=1000)
    progress.print_summary("done")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "batch 1 in 0.0 s (" in captured.err
    assert isinstance(main, click.Group)
