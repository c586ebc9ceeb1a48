"""The receiver, the ingest job and the rollup, measured one after the other: `make bench-analytics`."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from local.console import print_status

from tests.bench import host
from tests.bench_analytics import page

SAMPLES = 10_000_000
ABOUT = {"Date", "CPU", "Load average of the minute before", "Memory", "Kernel", "pulsar-trio-proxy"}


def measured(module: str, *arguments: str) -> Any:
    """What a measurement in a process of its own found; its lines go to the terminal. Raises CalledProcessError."""
    print_status.line(f"== {module} {' '.join(arguments)}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        found = Path(name) / "figures.json"
        command = [sys.executable, "-m", f"tests.bench_analytics.{module}", *arguments]
        if module == "ingest_bench":  # it prints its figures, and its progress on standard error
            return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        subprocess.run([*command, "--json", str(found)], check=True)
        return json.loads(found.read_text())


def main() -> int:
    """Measure, print, write if told so."""
    parser = argparse.ArgumentParser(prog="make bench-analytics", description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="of ingest (in batches, as ever) and rollup; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help=f"to docs/{page.PAGE.name}")
    options = parser.parse_args()
    if options.write and options.samples != SAMPLES:
        parser.error(f"--write is for {SAMPLES:,} samples: the page tells of the targets")
    about = [f"* {what}: {value}" for what, value in host.description() if what in ABOUT]
    rounds = ("--rounds", str(options.rounds))
    receiver = measured("receiver_bench", *rounds)
    ingest = measured("ingest_bench", *rounds, "--samples", str(options.samples))
    rollup = measured("rollup_bench", *rounds, "--samples", str(options.samples))
    text = page.markdown(receiver, ingest, rollup, options.samples)
    print("\n".join(["", *about, "", text]))
    if options.write:
        page.write("\n".join([*about, "", text]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
