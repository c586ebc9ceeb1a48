"""This proxy against Pulsar's own and HAProxy, in one run on one machine: see docs/benchmarks.md."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from local.console import print_status

from tests.bench import documents, flood, generator, host, idle_clients, latency, sizing, timing
from tests.bench.contenders import CONTENDERS, FramedRelays, HAProxy, Java, Ours, Straight, haproxy_path
from tests.bench.generator import BenchError
from tests.bench.measuring import Bench, Results, run_http, run_memory, run_rounds, run_shared, run_tls
from tests.bench.report import Report
from tests.bench.rows import FRAMED_ROWS, HTTP_ROWS, IDLE, ROWS, SHARED, TLS_ROWS, Row

_MEMORY_ROUNDS_MAX = _TLS_ROUNDS_MAX = 2
_NAMES = (*(row.name for row in (*ROWS, *FRAMED_ROWS, *TLS_ROWS, *HTTP_ROWS)), IDLE, SHARED)


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(_NAMES)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rows", default="", help=f"of {names}; `echo` means all that begin so; default: all")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--window", type=float, default=1.5, help="seconds of one measurement; default: %(default)s")
    parser.add_argument(
        "--http-body", type=int, default=1024, help="MiB of an HTTP message's body; default: %(default)s"
    )
    parser.add_argument(
        "--sizing", action="store_true", help="only this: how much memory and CPU time does the cluster need?"
    )
    parser.add_argument("--timing", action="store_true", help="only this: does an error's time tell who exists?")
    parser.add_argument("--latency", action="store_true", help="only this: how long does a producer wait?")
    parser.add_argument("--handshake-flood", action="store_true", help="only this: what do relays notice of one?")
    parser.add_argument("--idle-clients", action="store_true", help="only this: which CPUs do 10,000 need?")
    parser.add_argument("--write", action="store_true", help="write the results to docs/benchmarks.md and .svg")
    options = parser.parse_args(arguments)
    if options.write and (options.rows or options.contenders != parser.get_default("contenders")):
        parser.error("--write is for all rows and contenders: the page tells of one run")
    chosen = {name for wanted in options.rows.split(",") for name in _named(wanted)}
    options.rows = [row for row in ROWS if row.name in chosen]
    options.framed_rows = [row for row in FRAMED_ROWS if row.name in chosen]
    options.tls_rows = [row for row in TLS_ROWS if row.name in chosen]
    options.http_rows = [
        replace(row, frame_bytes=min(row.frame_bytes, options.http_body << 20))
        for row in HTTP_ROWS
        if row.name in chosen
    ]
    options.idle, options.shared = IDLE in chosen, SHARED in chosen
    options.contenders = options.contenders.split(",")
    if unknown := [name for name in options.contenders if name not in CONTENDERS]:
        parser.error(f"no such contender: {', '.join(unknown)}")
    if not chosen:
        parser.error(f"no such row; there are {names}")
    return options


def _named(wanted: str) -> list[str]:
    return [wanted] if wanted in _NAMES else [name for name in _NAMES if name.startswith(wanted)]


def _measure(contenders: list[str], rows: list[Row], options: argparse.Namespace) -> Results:
    kinds = [CONTENDERS[name] for name in contenders]
    results = Results()
    program = generator.build()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        with generator.broker(program, directory / "broker.log") as broker:
            bench = Bench(program, broker, directory, options.window)
            if rows:
                run_rounds(bench, (Straight, *kinds), rows, options.rounds, results)
            if options.framed_rows:
                run_rounds(bench, (Straight, Ours, FramedRelays), options.framed_rows, options.rounds, results)
            if options.tls_rows:
                run_tls(bench, kinds, options.tls_rows, min(options.rounds, _TLS_ROUNDS_MAX), results)
            if options.http_rows:
                run_http(bench, contenders, options.http_rows, options.rounds, results)
            if options.idle:
                run_memory(bench, kinds, min(options.rounds, _MEMORY_ROUNDS_MAX), results)
            if options.shared:
                run_shared(bench, kinds, results)
    return results


def _run_alone(options: argparse.Namespace) -> bool:
    """Measure what is asked for instead of rows; return whether something was."""
    if options.sizing:
        sizing.run()
    elif options.timing:
        timing.run()
    elif options.idle_clients:
        print_status.line(f"\n{idle_clients.table(idle_clients.measure(options.rounds))}\n")
    elif options.latency:
        machine = host.description()
        rate, produced = latency.measure(options.rounds)
        print_status.line(f"\n{latency.table(rate, produced)}\n")
        if options.write:
            documents.write_latency(rate, produced, machine)
    elif options.handshake_flood:
        machine = host.description()
        samples = flood.measure(options.rounds, with_java=Java.name in options.contenders)
        print_status.line(f"\n{flood.table(samples)}\n")
        if options.write:
            documents.write_flood(samples, machine)
    else:
        return False
    return True


def main() -> int:
    """Measure, print, write if told so."""
    options = _arguments()
    if _run_alone(options):
        return 0
    contenders = list(options.contenders)
    if HAProxy.name in contenders and not haproxy_path():
        print_status.line("HAProxy is not installed: its column is left out")
        contenders.remove(HAProxy.name)
    machine = host.description()
    started_at = time.monotonic()
    try:
        results = _measure(contenders, options.rows, options)
    except BenchError as error:
        print_status.line(f"make bench: {error}")
        return 1
    report = Report(results, options.rows, contenders, options.framed_rows, options.tls_rows, options.http_rows)
    print_status.line()
    for what, value in machine:
        print_status.line(f"{what}: {value}")
    print_status.line(f"\n{report.markdown()}\n")
    print_status.line(f"{options.rounds} rounds in {time.monotonic() - started_at:.0f} s")
    if options.write:
        documents.write(report, machine, options.rounds, options.window)
    return 0


if __name__ == "__main__":
    sys.exit(main())
