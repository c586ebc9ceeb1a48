"""What a job tells while it works: what is left, signs of life, and nothing of Spark's own."""

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from analytics.commands.command_line import INTERRUPTED
from analytics.jobs import progress, quiet
from analytics.jobs.progress import (
    Console,
    Heartbeat,
    Progress,
    Step,
    Tasks,
    bar,
    current_tasks,
    duration,
    heartbeats,
)
from analytics.spool.reader import BEGIN, Position, count_bytes_after, list_segments
from tests.analytics.spark_settings import SHORT_JOBS
from tests.analytics.spool_files import SpoolFiles, labels


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("analytics.jobs.progress.time.monotonic", lambda: now[0])
    return now


def test_the_rest_and_its_time_are_shown(clock: list[float]) -> None:
    stream = io.StringIO()
    told = Progress(Console(stream))
    clock[0] += 30
    told.print_line("3 hours", left=told.remaining_text(3, 12, "9 hours left"))
    told.print_line("none yet", left=told.remaining_text(0, 12, "12 hours left"))
    told.print_line("all", left=told.remaining_text(12, 12, "0 hours left"))
    clock[0] += 10
    told.print_line("more", samples=100)
    assert stream.getvalue().splitlines() == [
        "3 hours; 9 hours left, about 2 min",
        "none yet; 12 hours left",
        "all",
        "more in 10.0 s (10 samples/s)",
    ]
    assert [duration(seconds) for seconds in (0.2, 40, 100, 3000, 9000)] == ["1 s", "40 s", "2 min", "50 min", "2.5 h"]


def test_on_a_terminal_the_status_gives_way_to_lines() -> None:
    stream = Terminal()
    console = Console(stream)
    console.show_status("one")
    console.show_status("two")
    console.print_line("a line")
    console.print_line("another")
    console.show_status("three")
    console.show_status("")
    clear = "\r\x1b[K"
    assert stream.getvalue() == f"one{clear}two{clear}a line\nanother\nthree{clear}"


def test_a_status_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one line can be removed again."""
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Console(stream).show_status("x" * 100)
    assert stream.getvalue() == "x" * 19


def test_signs_of_life_while_spark_works(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    told = threading.Event()

    class Stream(Terminal):
        def write(self, text: str) -> int:
            if "at work for" in text:
                told.set()
            return super().write(text)

    monkeypatch.setattr(progress, "current_tasks", lambda session: Tasks(4, 16))
    stream = Stream()
    with heartbeats(spark, Console(stream), every_s=0.01):
        assert told.wait(60)
    assert stream.getvalue().endswith("\r\x1b[K")  # nothing of it stays
    assert "[###---------] at work for 1 s: 4 of 16 tasks\r" in stream.getvalue()


def test_without_a_terminal_signs_of_life_are_lines(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    told = threading.Event()
    stream = io.StringIO()

    def tasks(session: SparkSession) -> Tasks | None:
        if "at work" in stream.getvalue():
            told.set()
            return None  # idle: no line
        return Tasks(1, 2)

    monkeypatch.setattr(progress, "current_tasks", tasks)
    with heartbeats(spark, Console(stream), every_s=0.01):
        assert told.wait(60)
    assert stream.getvalue() == "[######------] at work for 1 s: 1 of 2 tasks\n"


def test_a_heartbeat_has_the_turns_bar_its_time_left_and_the_steps_own_time() -> None:
    step, tasks = [Step("one", 1, 4)], [Tasks(1, 2)]
    heartbeat = Heartbeat(lambda: step[0], lambda: tasks[0] if tasks else None)
    assert heartbeat.text(10) == "[#-----------] step 1 of 4, one for 10 s: 1 of 2 tasks"
    step[0] = Step("two", 2, 4)
    assert heartbeat.text(15) == "[####--------] step 2 of 4, two for 1 s: 1 of 2 tasks, about 25 s left"
    assert heartbeat.text(35) == "[####--------] step 2 of 4, two for 20 s: 1 of 2 tasks, about 58 s left"
    step[0] = Step("one", 1, 2)  # a turn of its own
    assert heartbeat.text(100) == "[###---------] step 1 of 2, one for 1 s: 1 of 2 tasks"
    step[0] = Step("two", 2, 2)
    assert heartbeat.text(106) == "[#########---] step 2 of 2, two for 1 s: 1 of 2 tasks, about 2 s left"
    tasks.clear()  # Spark plans, or the driver commits
    assert heartbeat.text(107) == "[######------] step 2 of 2, two for 1 s, about 7 s left"
    step[0] = Step()  # between two turns
    assert heartbeat.text(108) == ""


def test_a_bar_is_full_when_all_is_done() -> None:
    assert [bar(0), bar(0.5), bar(1)] == ["[------------]", "[######------]", "[############]"]


def test_the_tasks_that_spark_is_at(spark: SparkSession, tmp_path: Path) -> None:
    """The tasks wait for a file, which is made as soon as they were seen."""
    assert current_tasks(spark) is None
    seen: list[Tasks] = []
    gate = tmp_path / "gate"
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            if tasks := current_tasks(spark):
                seen.append(tasks)
                break
        gate.touch()

    def wait(one: int, gate: str = str(gate)) -> int:
        import time
        from pathlib import Path

        while not Path(gate).exists():
            time.sleep(0.01)
        return one

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert spark.sparkContext.parallelize(range(4), 4).map(wait).count() == 4
    finally:
        ended.set()
        thread.join()
    assert seen == [Tasks(0, 4)]


def test_how_much_of_a_spool_is_left(tmp_path: Path) -> None:
    spool = SpoolFiles(tmp_path)
    spool.v2((labels("a"), 1, 1.0))
    spool.close()
    (segment,) = list_segments(tmp_path)
    assert count_bytes_after(tmp_path, BEGIN) == segment.size_bytes
    assert count_bytes_after(tmp_path, Position(segment.number, segment.size_bytes - 7)) == 7
    assert count_bytes_after(tmp_path, Position(segment.number + 1, 0)) == 0


# ---- Spark's own noise


def test_lines_of_the_jvm_go_on_but_for_noise() -> None:
    target = io.StringIO()
    noise = "WARNING: Using incubator modules: jdk.incubator.vector\n"
    quiet.copy_without_noise(io.StringIO(f"{noise}seg-1: bytes 5 to 9: damaged\n{noise}last, without an end"), target)
    assert target.getvalue() == "seg-1: bytes 5 to 9: damaged\nlast, without an end"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYSPARK_GATEWAY_PORT", "1"),
        ("SPARK_SUBMIT_OPTS", "-Dlog4j2.configurationFile=mine"),
        ("SPARK_CONF_DIR", "{directory}"),
        ("JDK_JAVA_OPTIONS", "-Dlog4j.debug"),
    ],
)
def test_a_users_log_configuration_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    (tmp_path / "log4j2.properties").touch()
    monkeypatch.setenv(name, value.format(directory=tmp_path))

    @click.command()
    @quiet.verbose_option
    def command() -> None:
        assert not quiet.is_verbose()
        assert quiet.launch_quietly() is None

    assert CliRunner().invoke(command, catch_exceptions=False).exit_code == 0
    assert quiet.is_verbose()  # outside of a command


_JOB = """
import sys
import threading
import click
from analytics.jobs import progress
from analytics.commands.command_line import job_session
from analytics.jobs.quiet import verbose_option

progress.HEARTBEAT_S = threading.TIMEOUT_MAX  # else a sign of life on a slow machine

@click.command()
@verbose_option
def main():
    with job_session("test") as session:
        session.sparkContext.parallelize([1], 1).map(lambda one: print("from a worker", file=sys.stderr)).count()
        session.sparkContext._jvm.org.apache.spark.sql.SparkSession.active().sparkContext().log().warn("spark's own")
        click.echo("our own", err=True)

main()
"""


@pytest.mark.jvm
@pytest.mark.parametrize("verbose", [False, True])
def test_the_console_has_our_own_lines_only(verbose: bool) -> None:
    arguments = ["--verbose"] if verbose else []
    done = subprocess.run(
        [sys.executable, "-c", _JOB, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | SHORT_JOBS,
        timeout=280,
        check=True,
    )
    lines = done.stderr.splitlines()
    if verbose:
        assert {"from a worker", "our own"} <= set(lines)
        assert any("NativeCodeLoader" in line for line in lines)
    else:
        assert sorted(lines) == ["from a worker", "our own"]


@pytest.mark.jvm
def test_an_interrupted_job_says_so_and_its_jvm_ends(tmp_path: Path) -> None:
    """PySpark's own handler prints tracebacks."""
    (tmp_path / "spool").mkdir()
    options = ["--follow", "600", "--spool", tmp_path / "spool", "--tables", (tmp_path / "tables").as_uri()]
    command = [Path(sys.executable).with_name("pulsar-proxy-analytics"), "pipeline", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, env=os.environ | SHORT_JOBS) as job:
        assert job.stdout is not None
        told = []
        for line in job.stdout:
            told.append(line)
            if "step 2 of " in line:
                break
        job.send_signal(signal.SIGINT)
        told += job.stdout.readlines()  # the JVM has it open, too: they end with it
    assert job.returncode == INTERRUPTED
    assert told[-1] == "stopped; what is committed stays, and the next run does the rest\n"
    assert not any("Traceback" in line for line in told)
