"""Tables in MinIO, under jobs that are killed: nothing is renamed at once there, a directory is only a prefix of
names, and a commit is a conditional write.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from local import go_tools

from .lab.object_store import ObjectStore
from .test_analytics_kills import KILLS, TIMEOUT_S, kill_jobs


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(not go_tools.available(), reason="Go, which builds MinIO, is missing or too old")
def test_jobs_that_are_killed_leave_exact_tables_in_an_object_store(tmp_path: Path) -> None:
    with ObjectStore(tmp_path / "store") as store:
        kill_jobs(store.tables("metrics"), tmp_path, at_least=KILLS // 2)
