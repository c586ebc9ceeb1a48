"""The proxy's own token: read again when it was rotated, never shown, and never half."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from pathlib import Path

import pytest
import trio
import trio.testing

from auth.broker_credentials import TOKEN_FILE_BYTES_MAX, TokenCredentials, broker_authentication
from auth.state import CredentialsUnavailable
from proxy.config.types import BrokerCredentials


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "proxy.token"
    path.write_bytes(b"first-token\n")
    return path


async def unavailable(file: Path) -> str:
    with pytest.raises(CredentialsUnavailable) as caught:
        await TokenCredentials(str(file)).authenticate(None)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_what_the_configuration_asks_for(file: Path) -> None:
    assert broker_authentication(None) is None
    made = broker_authentication(BrokerCredentials(method="token", file=str(file)))
    assert made is not None
    assert made.method == "token"


async def test_the_token_for_connect_and_for_every_challenge(file: Path) -> None:
    state = TokenCredentials(str(file)).get_auth_data("broker-1")
    assert await state.authenticate(None) == b"first-token"
    assert await state.authenticate(b"PulsarAuthRefresh") == b"first-token"
    assert await state.authenticate(b"") == b"first-token"


@pytest.mark.parametrize("content", [b"token", b"token\n", b" \t\r\ntoken\r\n\r\n"])
async def test_space_around_the_token_is_not_part_of_it(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert await TokenCredentials(str(file)).authenticate(None) == b"token"


async def test_a_rotated_token_is_used_after_a_second(file: Path, autojump_clock: trio.testing.MockClock) -> None:
    credentials = TokenCredentials(str(file))
    assert await credentials.authenticate(None) == b"first-token"
    file.write_bytes(b"second-token")
    await trio.sleep(0.9)
    assert await credentials.authenticate(None) == b"first-token"
    await trio.sleep(0.1)
    assert await credentials.authenticate(b"PulsarAuthRefresh") == b"second-token"


async def test_a_file_that_was_missing_counts_as_soon_as_it_is_there(file: Path) -> None:
    file.rename(file.with_suffix(".away"))
    credentials = TokenCredentials(str(file))
    with pytest.raises(CredentialsUnavailable):
        await credentials.authenticate(None)
    file.with_suffix(".away").rename(file)
    assert await credentials.authenticate(None) == b"first-token"


async def test_many_who_ask_at_once_read_the_file_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    reads: list[trio.Path] = []

    async def read_slowly(path: trio.Path) -> bytes:
        reads.append(path)
        await trio.sleep(0.5)
        return b"token"

    monkeypatch.setattr(trio.Path, "read_bytes", read_slowly)
    credentials = TokenCredentials(str(file))
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(credentials.authenticate, None)
    assert len(reads) == 1


async def test_a_missing_file(file: Path) -> None:
    file.unlink()
    text = await unavailable(file)
    assert text == f"brokers.credentials.file: {file} cannot be read: No such file or directory"


async def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    assert "Is a directory" in await unavailable(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\n"])
async def test_an_empty_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert await unavailable(file) == f"brokers.credentials.file: {file} holds no token"


async def test_a_file_of_any_other_kind_is_not_sent_to_brokers(file: Path) -> None:
    file.write_bytes(b"not-to-be-seen" * TOKEN_FILE_BYTES_MAX)
    text = await unavailable(file)
    assert "holds no token" in text
    assert "not-to-be-seen" not in text


@pytest.mark.parametrize(("size", "fits"), [(TOKEN_FILE_BYTES_MAX, True), (TOKEN_FILE_BYTES_MAX + 1, False)])
@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_the_largest_token(file: Path, size: int, fits: bool, end: bytes) -> None:
    file.write_bytes(b"t" * size + end)
    if fits:
        assert await TokenCredentials(str(file)).authenticate(None) == b"t" * size
    else:
        await unavailable(file)
