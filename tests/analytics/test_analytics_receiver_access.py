"""Tokens and certificates from files that change, the configuration, probes, logs."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing
import trustme

from analytics.receiver import service
from analytics.receiver.admin_endpoint import AdminEndpoint
from analytics.receiver.command import DROPPED_FIELD, ENTRIES_PER_SECOND_MAX, configure_logs
from analytics.receiver.config import Config, Log, Spool, Tls, load_config, parse_address
from analytics.receiver.metrics import Metrics
from analytics.receiver.service import open_spool, reloading_tls_context
from analytics.receiver.tokens import read_tokens, reloading_token_digests
from analytics.spool.records import SpoolError
from analytics.spool.writer import Disk
from proxy.common.bearer_tokens import is_authorized
from proxy.common.errors import ConfigError
from proxy.common.http_server import HttpRequest
from proxy.common.logs import Throttle, get_logger
from proxy.common.reloading_file import ReloadingFile

# ---- files that change


async def test_a_changed_token_file_is_taken_over_a_second_later(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("the-first-token-there-is\n\n  and-a-second-one-too  \n")
    watched = reloading_token_digests([str(file)])
    assert watched is not None
    digests = await watched.current_value()
    assert is_authorized(b"Bearer the-first-token-there-is", digests)
    assert is_authorized(b"Bearer and-a-second-one-too", digests)
    assert not is_authorized(b"Bearer ", digests)
    file.write_text("a-token-that-is-new-here")
    assert await watched.current_value() == digests  # looked at a moment ago
    watched._checked_at -= 1.0
    digests = await watched.current_value()
    assert not is_authorized(b"Bearer the-first-token-there-is", digests)
    assert is_authorized(b"Bearer a-token-that-is-new-here", digests)


async def test_a_change_that_cannot_be_used_leaves_what_was_and_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("the-first-token-there-is")
    watched = reloading_token_digests([str(file)])
    assert watched is not None
    digests = await watched.current_value()
    with structlog.testing.capture_logs() as entries:
        for content in ("too-short", "too-short", None, None):
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_text(content)
                os.utime(file, ns=(1, 1))
            watched._checked_at = float("-inf")
            assert await watched.current_value() == digests
    assert [entry["log_level"] for entry in entries] == ["error", "error"]
    assert "too-short" not in repr(entries)


@pytest.mark.parametrize("content", ["", "\n \n", "short-token", "a" * 20 + "\nshort"])
def test_tokens_that_are_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"authentication\.token_files") as caught:
        read_tokens([str(file)])
    assert "short-token" not in str(caught.value)


def test_no_files_no_tokens_and_a_missing_file_is_told(tmp_path: Path) -> None:
    assert reloading_token_digests([]) is None
    with pytest.raises(ConfigError, match="No such file"):
        reloading_token_digests([str(tmp_path / "missing")])


async def test_while_one_looks_others_get_what_was(tmp_path: Path) -> None:
    built: list[int] = []

    def build() -> int:
        built.append(1)
        return len(built)

    file = tmp_path / "file"
    watched = ReloadingFile("key", [str(file)], build)
    file.write_text("has changed")
    values: list[int] = []

    async def ask() -> None:
        values.append(await watched.current_value())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert sorted(values) == [1, 1, 2]


# ---- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def certificate_files(authority: trustme.CA, directory: Path) -> Tls:
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    (directory / "cert.pem").write_bytes(b"".join(one.bytes() for one in certificate.cert_chain_pems))
    return Tls(certificate=str(directory / "cert.pem"), key=str(directory / "key.pem"))


def test_tls_contexts(authority: trustme.CA, tmp_path: Path) -> None:
    config = certificate_files(authority, tmp_path)
    assert reloading_tls_context(None) is None
    watched = reloading_tls_context(config)
    assert watched is not None
    assert watched.value.verify_mode is ssl.CERT_NONE
    assert watched.value.minimum_version is ssl.TLSVersion.TLSv1_2
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    both = Tls(
        certificate=config.certificate, key=config.key, client_ca=str(tmp_path / "ca.pem"), minimum_version="1.3"
    )
    watched = reloading_tls_context(both)
    assert watched is not None
    assert watched.value.verify_mode is ssl.CERT_REQUIRED
    assert watched.value.minimum_version is ssl.TLSVersion.TLSv1_3


async def test_a_new_certificate_is_taken_over(authority: trustme.CA, tmp_path: Path) -> None:
    watched = reloading_tls_context(certificate_files(authority, tmp_path))
    assert watched is not None
    before = await watched.current_value()
    watched._checked_at = float("-inf")
    assert await watched.current_value() is before
    certificate_files(authority, tmp_path)
    watched._checked_at = float("-inf")
    assert await watched.current_value() is not before


def test_certificates_that_cannot_be_used(authority: trustme.CA, tmp_path: Path) -> None:
    config = certificate_files(authority, tmp_path)
    authority.issue_cert("other").private_key_pem.write_to_path(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match=r"listen\.tls: .*fit"):
        reloading_tls_context(config)
    (tmp_path / "key.pem").write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    with pytest.raises(ConfigError, match=r"listen\.tls"):
        reloading_tls_context(config)
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        reloading_tls_context(config)
    with pytest.raises(ConfigError, match="passphrase"):
        service._no_passphrase()


# ---- configuration


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "receiver.toml"
    path.write_text(text)
    return path


def test_an_empty_file_listens_on_loopback_only(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""))
    assert config == Config()
    assert config.listen.bind.startswith("127.0.0.1:")
    assert config.admin.bind.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[limits]\nmax_conections = 1",
            'limits.max_conections: there is no such key; did you mean "max_connections"?',
        ),
        ("[limits]\nmax_connections = 0", "limits.max_connections: "),
        ("[spool]\nsegment_bytes_max = '1'", "spool.segment_bytes_max: must be an integer, and is text"),
        ("[listen.tls]\nkey = 'k'", "listen.tls: certificate is missing"),
        ("[listen]\nbind = 'nowhere'", "listen.bind: nowhere is not address:port"),
        ("[admin]\nbind = ':80'", "admin.bind: :80 is not address:port"),
        ("[spool]\nqueue_bytes_max = 5", "spool.queue_bytes_max: is less than limits.max_compressed_bytes"),
        ("listen = ", "is not TOML"),
        ("extra = 1", "extra: there is no such key; there are: listen, "),
    ],
)
def test_mistakes_name_their_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert said in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "missing.toml")


def test_addresses() -> None:
    assert parse_address("k", "[::1]:80") == ("::1", 80)
    assert parse_address("k", "0.0.0.0:0") == ("0.0.0.0", 0)
    for bad in ("x", "x:", "x:y", "x:65536", ":1", "x:-1", "x:\N{SUPERSCRIPT TWO}"):
        with pytest.raises(ConfigError):
            parse_address("k", bad)


# ---- probes


class FullDisk(Disk):
    free = 10**12

    def free_bytes(self, directory: Path) -> int:
        return self.free


async def test_ready_only_while_the_spool_takes_writes(tmp_path: Path) -> None:
    disk = FullDisk()
    writer = open_spool(Config(spool=Spool(directory=str(tmp_path / "spool"))), disk)
    metrics = Metrics()
    probes = AdminEndpoint(writer, metrics)

    async def ask(path: str) -> tuple[int, str]:
        response = await probes.respond(HttpRequest("GET", path, [], ""))
        return response.status, response.body.decode()

    assert await ask("/readyz") == (200, "ready\n")
    disk.free = 10
    assert await ask("/readyz") == (200, "ready\n")  # looked at a moment ago
    probes._inspected_at -= 1
    status, text = await ask("/readyz")
    assert status == 503
    assert "only 10 bytes are free" in text
    assert await ask("/healthz") == (200, "ok\n")  # a restart would not help
    disk.free = 10**12
    probes._inspected_at -= 1
    assert (await ask("/readyz"))[0] == 200
    assert "pulsar_proxy_analytics_receiver_ready 1.0" in (await ask("/metrics"))[1]
    assert metrics.registry.get_sample_value("pulsar_proxy_analytics_receiver_spool_disk_free_bytes") == 10**12
    probes.draining = True
    assert (await ask("/readyz"))[0] == 503
    assert (await ask("/"))[0] == 404
    assert (await probes.respond(HttpRequest("POST", "/metrics", [], ""))).status == 405
    writer.close()


def test_two_receivers_cannot_share_a_spool(tmp_path: Path) -> None:
    config = Config(spool=Spool(directory=str(tmp_path / "spool")))
    writer = open_spool(config)
    with pytest.raises(SpoolError):
        open_spool(config)
    writer.close()


# ---- logs


def test_logs_are_json_lines_and_a_storm_is_thinned_out(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        configure_logs(Log(level="warning"))
        get_logger().info("not written")
        for number in range(ENTRIES_PER_SECOND_MAX + 5):
            get_logger().warning("refused", reason=f"line\nbreak {number}")
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == ENTRIES_PER_SECOND_MAX
    assert lines[0]["reason"] == "line\nbreak 0"
    assert lines[0]["level"] == "warning"


def test_the_entry_after_a_storm_says_how_many_were_left_out() -> None:
    now = 0.0
    throttle = Throttle(ENTRIES_PER_SECOND_MAX, DROPPED_FIELD, lambda: now)
    for _ in range(ENTRIES_PER_SECOND_MAX):
        throttle(None, "info", {"event": "e"})
    for _ in range(3):
        with pytest.raises(structlog.DropEvent):
            throttle(None, "info", {"event": "e"})
    throttle(None, "info", {"event": "other"})
    now = 1.0
    assert throttle(None, "info", {"event": "e"})["left_out_before"] == 3
    assert "left_out_before" not in throttle(None, "info", {"event": "e"})
