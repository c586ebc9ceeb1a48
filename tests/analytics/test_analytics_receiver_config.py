"""analytics.receiver.config: each mistake in the file is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from analytics.cli import main
from analytics.receiver.config import load_config
from proxy.common.errors import ConfigError
from proxy.common.toml import FILE_BYTES_MAX

OPEN = b"[listen]\nbind = '0.0.0.0:9291'\n"
TLS = b"[listen.tls]\ncertificate = 'c'\nkey = 'k'\n"
TOKEN = b"[authentication]\ntoken_files = ['t']\n"
IN_PLAIN_TEXT = (
    "listen.tls: other machines reach 0.0.0.0:9291, and a sender's token would cross the network in plain text; set "
    "listen.tls, or listen.insecure = true if the network is yours alone"
)
LEVELS = 'must be one of "debug", "info", "warning", "error"'
ENDLESS = "FILE: is not TOML that a configuration could be: a number or a nesting without end"
MISTAKES: list[tuple[bytes, str]] = [
    (OPEN, IN_PLAIN_TEXT),
    (OPEN + TOKEN, IN_PLAIN_TEXT),
    (
        OPEN + TLS,
        (
            "authentication.token_files: any host of that network could write samples, of which bills are made; "
            "name a file with a token, set listen.tls.client_ca, or listen.insecure = true"
        ),
    ),
    (b"[limit]\nx = 1", 'limit: there is no such key; did you mean "limits"?'),
    (b"[limits]\nmax_serie = 1", 'limits.max_serie: there is no such key; did you mean "max_series"?'),
    (
        b"[listen.tls]\nzzz = 1",
        "listen.tls.zzz: there is no such key; there are: certificate, key, client_ca, minimum_version",
    ),
    (b"[log]\nlevel = 'warn'", f'log.level: {LEVELS}, and is "warn"; did you mean "warning"?'),
    (b"[log]\nlevel = 'zzz'", f'log.level: {LEVELS}, and is "zzz"'),
    (b"[limits]\nmax_series = 0", "limits.max_series: must be at least 1"),
    (
        b"[listen]\ninsecure = true\nbind = '0.0.0.0:9292'",
        "admin.bind: 127.0.0.1:9292 is taken by listen.bind (0.0.0.0:9292)",
    ),
    (b"[admin]\nbind = '127.0.0.1:9291'", "admin.bind: 127.0.0.1:9291 is taken by listen.bind (127.0.0.1:9291)"),
    (b"[admin]\nbind = '[::]:9291'", "admin.bind: [::]:9291 is taken by listen.bind (127.0.0.1:9291)"),
    (b"\xff", "FILE: is not UTF-8: byte 0xff in line 1"),
    (b"a = " + b"9" * 5000, ENDLESS),
    (b"a = " + b"[" * 9999, ENDLESS),
    (b"#" * (FILE_BYTES_MAX + 1), f"FILE: is longer than {FILE_BYTES_MAX} bytes: is it a configuration?"),
]


@pytest.mark.parametrize(("content", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "receiver.toml"
    file.write_bytes(content)
    result = CliRunner().invoke(main, ["receive", "--config", str(file)])
    assert result.stderr == f"pulsar-proxy-analytics receive: {says.replace('FILE', str(file))}\n"
    assert (result.stdout, result.exit_code) == ("", 2)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf[log]\r\nlevel = 'info'\r\n",
        b"[listen]\nbind = '127.0.0.1:0'\n[admin]\nbind = '127.0.0.1:0'",  # any free port each
        b"[listen]\nbind = '127.0.0.2:9292'",
        b"[listen]\nbind = 'localhost:9291'",
        b"[listen]\nbind = '[::1]:9291'",
        OPEN + TLS + TOKEN,
        OPEN + TLS + b"client_ca = 'ca'\n",
        OPEN + b"insecure = true\n",
    ],
)
def test_configurations_without_a_mistake_are_taken(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "receiver.toml"
    file.write_bytes(content)
    assert load_config(file).log.level == "info"


@pytest.mark.parametrize("bind", ["[::]:9291", "10.0.0.1:9291", "metrics.example.com:9291"])
def test_addresses_that_other_machines_reach(tmp_path: Path, bind: str) -> None:
    file = tmp_path / "receiver.toml"
    file.write_text(f"[listen]\nbind = '{bind}'\n")
    with pytest.raises(ConfigError, match="other machines reach"):
        load_config(file)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"), [("recieve", 'did you mean "receive"?'), ("zzzz", "there are: receive, pipeline, ingest, ")]
)
def test_a_command_that_does_not_exist(name: str, says: str) -> None:
    result = CliRunner().invoke(main, [name])
    assert result.exit_code == 2
    assert f"no such command: {name}; {says}" in result.stderr
