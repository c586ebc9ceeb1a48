"""The load tool of the Pulsar distribution works through the cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def start(home: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `pulsar-perf`."""
    environment = os.environ | {"PULSAR_MEM": "-Xmx256m", "PULSAR_GC": "-XX:+UseSerialGC", "PULSAR_GC_LOG": " "}
    environment["PULSAR_LOG_DIR"] = str(log.parent)
    with log.open("wb") as output:
        return subprocess.Popen(
            [home / "bin" / "pulsar-perf", *arguments], stdout=output, stderr=output, env=environment
        )


def total(log: Path, verb: str) -> int:
    """The number of records in its last summary."""
    found = re.findall(rf"Aggregated throughput stats --- (\d+) records {verb}", log.read_text())
    assert found, log.read_text()[-4000:]
    return int(found[-1])


def test_pulsar_perf_produces_and_consumes_10000_messages(
    pulsar_home: Path, url: str, topic: str, tmp_path: Path
) -> None:
    consumed, produced = tmp_path / "consume.log", tmp_path / "produce.log"
    common = ("--service-url", url, "--num-messages", "10000")
    from_the_start = ("--subscription-position", "Earliest")
    consumer = start(pulsar_home, consumed, "consume", *common, *from_the_start, topic)
    producer = start(pulsar_home, produced, "produce", *common, "--rate", "5000", "--size", "100", topic)
    try:
        assert producer.wait(200) == 0, produced.read_text()[-4000:]
        assert consumer.wait(200) == 0, consumed.read_text()[-4000:]
    finally:
        for process in (producer, consumer):
            if process.poll() is None:
                process.kill()
            process.wait()
    assert total(produced, "sent") >= 10_000  # it stops when 10,000 receipts are in, a few may be under way
    assert total(consumed, "received") >= 10_000
