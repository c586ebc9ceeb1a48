"""`make fuzz`: each parser with Atheris (libFuzzer), in a process of its own; a table of what was run at the end.

Inputs that reached something new are kept in build/fuzz/NAME/corpus for the next run, what failed in build/fuzz/NAME:
`make fuzz ARGS="--parser NAME --replay FILE"` shows its traceback again. Exit status 1 where an input failed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from local.console import print_status

from tests.fuzz.parsers import PARSERS, load

OUTPUT = Path(__file__).resolve().parents[2] / "build/fuzz"
INSTRUMENTED = ("proto", "auth", "analytics", "jwt", "scramp")
INPUT_BYTES_MAX = 4096
INPUT_TIMEOUT_S = 60
MEMORY_MIB_MAX = 2048
TAIL_LINES = 60
"""Of what a failed run printed: the traceback is in it."""

_EXECUTIONS = re.compile(r"^stat::number_of_executed_units:\s+(\d+)", re.MULTILINE)
_COVERED = re.compile(r"^#\d+\t.*\bcov: (\d+) ft: (\d+)", re.MULTILINE)


def fuzz_here(name: str, arguments: Sequence[str]) -> None:
    """Become libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        check = load(name).check
    atheris.Setup([name, *arguments], check)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz a parser in a process of its own and print the figures; return True if no input failed."""
    directory = OUTPUT / name
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in load(name).seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:40]).write_bytes(seed)
    arguments = [
        str(corpus),
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
        f"-artifact_prefix={directory}/",
        "-print_final_stats=1",
    ]
    print_status.line(f"== {name}: {PARSERS[name]}, {seconds} s")
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--parser", name, "--here", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    executions, covered = _EXECUTIONS.search(result.stdout), _COVERED.findall(result.stdout)
    if result.returncode:
        print("\n".join(result.stdout.splitlines()[-TAIL_LINES:]))
    edges, features = covered[-1] if covered else ("0", "0")
    print(
        f"{name}: {int(executions[1]) if executions else 0:,} executions, {edges} edges, {features} features, "
        f"{len(list(corpus.iterdir()))} inputs kept, {'FAILED' if result.returncode else 'no failure'}",
        flush=True,
    )
    return not result.returncode


def main() -> int:
    """Fuzz the parsers one after the other, or replay inputs."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for each parser; default: %(default)s")
    parser.add_argument("--parser", action="append", choices=PARSERS, help="only this one; may be repeated")
    parser.add_argument("--replay", type=Path, nargs="+", help="check the bytes of these files, without Atheris")
    parser.add_argument("--here", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.parser or list(PARSERS)
    if options.here is not None:
        fuzz_here(names[0], options.here)
    elif options.replay:
        for path in options.replay:
            load(names[0]).check(path.read_bytes())
    else:
        results = [fuzz(name, options.seconds) for name in names]
        return 0 if all(results) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
