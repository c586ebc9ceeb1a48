"""The files that `make run` writes for a bill; that they lead to one: tests/e2e/test_make_run.py."""

from __future__ import annotations

import stat
from pathlib import Path

from local.first_bill import PRINCIPALS, FirstBill

from analytics.receiver.config import load_config


def test_secrets_are_the_users_own_and_the_receiver_asks_for_one(tmp_path: Path) -> None:
    bill = FirstBill(tmp_path)
    assert str(tmp_path / "token.key") in bill.write_tokens()
    bill.write_configurations("http://127.0.0.1:8080")
    secrets = [*tmp_path.glob("*.token"), tmp_path / "token.key"]
    assert {path.stem for path in secrets} == {*PRINCIPALS, "receiver", "token"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    receiver = load_config(tmp_path / "receiver.toml")
    assert receiver.authentication.token_files == (str(tmp_path / "receiver.token"),)
    assert receiver.listen.bind.startswith("127.0.0.1:")
    assert receiver.spool.directory == str(tmp_path / "spool")


def test_each_run_has_secrets_of_its_own(tmp_path: Path) -> None:
    """A Prometheus of an earlier run cannot write into this one's bill, nor a client use its token."""
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        bill = FirstBill(tmp_path / name)
        bill.write_tokens()
        bill.write_configurations("http://127.0.0.1:8080")
        found += [path.read_bytes() for path in (tmp_path / name).glob("*.token")]
    assert len(set(found)) == 2 * (len(PRINCIPALS) + 1)
