"""proxy.admin.service: the token of admin.token_file."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.admin.service import TokenCheck
from proxy.common.errors import ConfigError
from proxy.config.admin_token import TOKEN_BYTES_MAX, read_admin_token
from proxy.config.types import Admin


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("  s3cret-Token\n")
    return path


async def test_without_a_token_file_every_request_is_allowed() -> None:
    access = TokenCheck(Admin())
    assert await access.is_allowed([])
    assert await access.is_allowed([b"Bearer anything"])


RIGHT = [b"Bearer s3cret-Token", b"bearer s3cret-Token", b"BEARER  s3cret-Token "]
WRONG = [
    b"",
    b"Bearer",
    b"Bearer ",
    b"s3cret-Token",
    b"Basic s3cret-Token",
    b"Bearer s3cret-Toke",
    b"Bearer s3cret-Token2",
    b"Bearer S3cret-Token",
    b"Bearer s3cret-Token, Bearer x",
    b"Bearer \xff",
]


@pytest.mark.parametrize(("header", "allowed"), [(one, True) for one in RIGHT] + [(one, False) for one in WRONG])
async def test_with_one(file: Path, header: bytes, allowed: bool) -> None:
    """Security."""
    assert await TokenCheck(Admin(token_file=str(file))).is_allowed([header]) is allowed


async def test_no_header_and_two(file: Path) -> None:
    """Security."""
    access = TokenCheck(Admin(token_file=str(file)))
    assert not await access.is_allowed([])
    assert not await access.is_allowed([RIGHT[0], RIGHT[0]])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "holds no token"),
        (b" \n", "holds no token"),
        (b"one two", "what no HTTP header can"),
        (b"one\ntwo", "what no HTTP header can"),
        ("\u00e9".encode(), "what no HTTP header can"),
        (b"x" * (TOKEN_BYTES_MAX + 1), "holds more than a token"),
    ],
)
def test_files_that_hold_none(file: Path, text: bytes, reason: str) -> None:
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=f"admin.token_file: .*{reason}") as caught:
        TokenCheck(Admin(token_file=str(file)))
    assert "two" not in str(caught.value), "whatever it holds may be a secret"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin\.token_file: .*No such file"):
        TokenCheck(Admin(token_file=str(tmp_path / "none")))


async def change(file: Path, text: str) -> None:
    await trio.Path(file).write_text(text)
    await trio.sleep(2)


async def test_a_changed_file_is_taken_over_and_an_unusable_one_is_not(
    file: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: an emptied file opens nothing."""
    access = TokenCheck(Admin(token_file=str(file)))
    await change(file, "another")
    assert await access.is_allowed([b"Bearer another"])
    assert not await access.is_allowed([RIGHT[0]])
    await change(file, "")
    with structlog.testing.capture_logs() as logs:
        assert not await access.is_allowed([b"Bearer "])
        assert await access.is_allowed([b"Bearer another"])
    assert [entry["key"] for entry in logs] == ["admin.token_file"]


def test_reading(file: Path) -> None:
    assert read_admin_token(str(file)) == b"s3cret-Token"
