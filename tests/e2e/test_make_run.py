"""`make run` as a newcomer uses it: what it prints is typed, up to a bill of two principals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from local.environment import ROOT
from local.first_bill import PRINCIPALS
from local.process import OwnedProcess

from tests.analytics.spark_settings import SHORT_JOBS

from .lab.metrics import Scrape
from .lab.pipeline import Tables
from .lab.waiting import eventually

READY_S = 300.0
PAGE_S = 300.0
LAST_LINE = "Ctrl-C ends everything"

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class MakeRun:
    """The process of `make run`, and what it prints."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "local.run"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "deploy")}
        self.process = OwnedProcess(command, log=directory / "make-run.log", env=environment, cwd=ROOT)
        eventually(self._is_ready, what="make run is ready", within_s=READY_S)

    @property
    def printed(self) -> str:
        return self.process.log.read_text()

    def lines_of(self, number: int) -> list[str]:
        """The lines of one of the things to try."""
        block = self.printed.partition(f"\n  {number}. ")[2].splitlines()[1:]
        return [line.strip() for line in takewhile(lambda line: line.startswith("     "), block)]

    def counted(self) -> dict[str, int]:
        """Bytes towards the broker by principal, as the cluster counts them."""
        url = re.findall(r"proxy admin +(\S+)", self.printed)[0]
        with _opener.open(f"{url}/metrics", timeout=30.0) as answer:
            scrape = Scrape.parse(answer.read().decode())
        name = "pulsar_proxy_principal_bytes_total"
        return {one: int(scrape.total(name, principal=one, direction="to_broker")) for one in PRINCIPALS}

    def _is_ready(self) -> bool:
        assert self.process.exit_code() is None, self.printed
        return LAST_LINE in self.printed


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    found = MakeRun(tmp_path)
    yield found
    found.process.stop(60)


def test_the_lines_of_make_run_lead_to_a_bill_of_two_principals(make_run: MakeRun, tmp_path: Path) -> None:
    (example,) = make_run.lines_of(1)
    done = subprocess.run(["sh", "-c", example], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("b'through the proxy'") == len(PRINCIPALS), done.stderr

    (web_url,) = re.findall(r"web URL +(\S+)", make_run.printed)
    with _opener.open(f"{web_url}/admin/v2/clusters", timeout=30.0) as answer:
        assert json.loads(answer.read()) == ["standalone"]

    *lines, told = make_run.lines_of(4)
    assert len(lines) == 4, lines
    page = Path(re.findall(r"/\S+\.html", told)[0])
    typed = OwnedProcess(["sh", "-c", "\n".join(lines)], log=tmp_path / "bill.log", env=os.environ | SHORT_JOBS)
    tables = Tables(page.with_name("tables"))

    def is_billed() -> bool:
        assert typed.exit_code() is None
        # The first turn may come before the last scrape.
        return page.exists() and {name: row["bytes_in"] for name, row in tables.usage().items()} == make_run.counted()

    try:
        eventually(is_billed, what="a bill of what the cluster counted", within_s=PAGE_S, every_s=1.0)
        eventually(lambda: all(name in page.read_text() for name in PRINCIPALS), what="a page of it", within_s=PAGE_S)
    finally:
        print(typed.log_tail())
        typed.kill()
