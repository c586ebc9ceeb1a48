"""The proxy's own secret: read again when it was rotated, never shown, never half, and never lost with its file."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from tokens import token

from auth.broker_credentials import SECRET_BYTES_MAX, FixedCredentials, SecretCredentials, broker_authentication
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import file_stamps, take_over_held_files
from proxy.config.types import BrokerCredentials


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "proxy.token"
    path.write_bytes(b"first-token\n")
    return path


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What was logged; no secret may be in it, whatever the test does."""
    with structlog.testing.capture_logs() as entries:
        yield entries
    assert "-token" not in str([entry | {"files": "", "reason": ""} for entry in entries])
    assert "not-to-be-seen" not in str(entries)


def unusable(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        SecretCredentials("basic", str(file))
    assert caught.value.__cause__ is None
    return str(caught.value)


async def secret(file: Path) -> bytes:
    return await SecretCredentials("basic", str(file)).get_auth_data("broker-1").authenticate(None)


def test_without_credentials_the_proxy_has_no_broker_authentication() -> None:
    assert broker_authentication(None) is None


@pytest.mark.parametrize(("method", "content"), [("token", token()), ("basic", b"first-token")])
async def test_a_secret_in_a_file(file: Path, method: Any, content: bytes) -> None:
    file.write_bytes(content + b"\n")
    made = broker_authentication(BrokerCredentials(method=method, file=str(file)))
    assert made is not None
    assert made.method == method
    assert await made.get_auth_data("broker-1").authenticate(None) == content


async def test_a_token_in_the_configuration() -> None:
    written = token(sub="not-to-be-seen")
    made = broker_authentication(BrokerCredentials(method="token", token=written.decode()))
    assert isinstance(made, FixedCredentials)
    assert made.method == "token"
    state = made.get_auth_data("broker-1")
    assert await state.authenticate(None) == written
    assert await state.authenticate(b"PulsarAuthRefresh") == written
    assert written.decode() not in repr(made) + repr(state)


NO_JWT: list[tuple[bytes, str]] = [
    (b"not-to-be-seen", "holds no JSON Web Token"),
    (b"not.to-be.seen", "holds no JSON Web Token"),
    (token().replace(b".", b"", 1), "holds no JSON Web Token"),
    (b"token:" + token(), "the token alone is wanted"),
    (b"file:///secrets/not-to-be-seen", "the token alone is wanted"),
    (b"-----BEGIN PRIVATE KEY-----\nnot-to-be-seen\n-----END PRIVATE KEY-----", "it is a PEM file"),
]


@pytest.mark.parametrize(("content", "says"), NO_JWT)
def test_credentials_that_are_no_jwt_are_refused_without_quoting_them(file: Path, content: bytes, says: str) -> None:
    """No broker accepts them, so the configuration is refused before any client is."""
    file.write_bytes(content)
    for config, source in (
        (BrokerCredentials(method="token", file=str(file)), f"brokers.credentials.file: {file}"),
        (BrokerCredentials(method="token", token=content.decode()), "brokers.credentials.token"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            broker_authentication(config)
        assert str(caught.value).startswith(f"{source} holds no JSON Web Token")
        assert "to-be" not in str(caught.value)
        assert caught.value.__suppress_context__


async def test_a_token_replaced_by_something_else_stays(file: Path, autojump_clock: trio.testing.MockClock) -> None:
    file.write_bytes(token())
    made = broker_authentication(BrokerCredentials(method="token", file=str(file)))
    assert made is not None
    file.write_bytes(b"not-to-be-seen")
    await trio.sleep(2)
    assert await made.get_auth_data("b").authenticate(None) == token()


async def test_a_certificate_says_all_that_is_to_be_said() -> None:
    made = broker_authentication(BrokerCredentials(method="tls"))
    assert made is not None
    assert made.method == "tls"
    assert await made.get_auth_data("broker-1").authenticate(None) == b""


def test_sasl_credentials_are_made_from_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """SaslCredentials has tests of its own."""
    pytest.importorskip("gssapi")
    config = BrokerCredentials(method="sasl")
    monkeypatch.setattr("auth.broker_sasl.SaslCredentials", lambda told: ("made of", told))
    assert broker_authentication(config) == ("made of", config)


@pytest.mark.conforms("pip-30.19", "pip-30.22")
async def test_the_secret_for_connect_and_for_every_challenge(file: Path) -> None:
    credentials = SecretCredentials("basic", str(file))
    state = credentials.get_auth_data("broker-1")
    assert await state.authenticate(None) == b"first-token"
    assert await state.authenticate(b"PulsarAuthRefresh") == b"first-token"
    assert await state.authenticate(b"") == b"first-token"
    assert "first-token" not in repr(credentials) + repr(state)


@pytest.mark.parametrize("content", [b"secret", b"secret\n", b" \t\r\nsecret\r\n\r\n"])
async def test_space_around_the_secret_is_not_part_of_it(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert await secret(file) == b"secret"


# ---- rotation


async def test_a_rotated_secret_is_used_once_a_broker_has_accepted_it(
    file: Path, autojump_clock: trio.testing.MockClock
) -> None:
    credentials = SecretCredentials("basic", str(file))
    assert await credentials.authenticate(None) == b"first-token"
    file.write_bytes(b"second-token")
    await trio.sleep(60)
    assert await credentials.authenticate(None) == b"first-token"
    await take_over_held_files(file_stamps([str(file)]))
    assert await credentials.authenticate(b"PulsarAuthRefresh") == b"second-token"


async def test_credentials_stay_in_force_while_their_file_is_missing_or_empty(file: Path) -> None:
    """A file that is missing or half written for a moment does not cut the proxy off from its brokers."""
    credentials = SecretCredentials("basic", str(file))
    file.unlink()
    for content in (None, b"\n"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^brokers\.credentials\.file: "):
            await take_over_held_files(file_stamps([str(file)]))
        assert await credentials.authenticate(None) == b"first-token"


# ---- files that hold no secret


def test_a_missing_file(file: Path) -> None:
    file.unlink()
    assert unusable(file) == f"brokers.credentials.file: {file}: No such file or directory"


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    assert "Is a directory" in unusable(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\n"])
def test_an_empty_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert unusable(file).startswith(f"brokers.credentials.file: {file} is empty")


def test_a_file_of_any_other_kind_is_not_sent_to_brokers(file: Path) -> None:
    file.write_bytes(b"not-to-be-seen" * SECRET_BYTES_MAX)
    text = unusable(file)
    assert "longer than" in text
    assert "not-to-be-seen" not in text


@pytest.mark.parametrize(("size", "fits"), [(SECRET_BYTES_MAX, True), (SECRET_BYTES_MAX + 1, False)])
@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_the_largest_secret(file: Path, size: int, fits: bool, end: bytes) -> None:
    file.write_bytes(b"t" * size + end)
    if fits:
        assert await secret(file) == b"t" * size
    else:
        unusable(file)
