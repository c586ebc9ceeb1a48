"""What the command line says to each mistake: one line that names it, and never a traceback."""

from __future__ import annotations

import errno
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest
import trio
from click.testing import CliRunner, Result
from e2e.lab.certificates import Authority

from proxy import cli
from proxy.common.toml import FILE_BYTES_MAX
from proxy.config.types.base import TlsGroup
from proxy.runtime.network import kernel_tls

ROOT = Path(cli.__file__).parents[1]
Run = Callable[..., Result]


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a folder whose name is short, since a runtime_dir in it may be: pytest's own are named after the test."""
    for name in list(os.environ):
        if name.startswith("PULSAR_TRIO_PROXY__"):
            monkeypatch.delenv(name)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "key").write_bytes(b"k" * 32)
        (folder / "pem").write_text("-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----\n")
        (folder / "empty").touch()
        yield folder / "proxy.toml"


@pytest.fixture
def run(file: Path) -> Run:
    def invoke(content: str | bytes, command: str = "check", *options: str, **environment: str) -> Result:
        text = content.replace("DIR", str(file.parent)) if isinstance(content, str) else content
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        variables = {f"PULSAR_TRIO_PROXY__{name}": value for name, value in environment.items()}
        return CliRunner().invoke(cli.main, [command, "--config", str(file), *options], env=variables)

    return invoke


TOKENS = "[authentication]\nenabled = true\n[authentication.token]\n"
CREDENTIALS = "[brokers.credentials]\nmethod = 'token'\n"
BROKER_TLS = "[brokers]\nservice_url = 'pulsar+ssl://127.0.0.1'\n[brokers.tls]\n"
GROUPS = ", ".join(f'"{name}"' for name in get_args(TlsGroup))
PAIR = "{ certificate = 'c', key = 'k' }"
LEVELS = '"debug", "info", "warning", "error"'
FILE = "the file's name"
SECRET_WANTED = "a shared secret is wanted here, and the public key of a pair under authentication.token.public_key"
WRITTEN, MEANT = "PULSAR_TRIO_PROXY__BROKERS_SERVICE_URL", "PULSAR_TRIO_PROXY__BROKERS__SERVICE_URL"

MISTAKES: list[tuple[str | bytes, str]] = [
    # keys
    ("brokrs = 1", 'brokrs: there is no such key; did you mean "brokers"?'),
    ("[brokers]\nservce_url = 1", 'brokers.servce_url: there is no such key; did you mean "service_url"?'),
    ("[brokers]\nforwarders = 1", "brokers.forwarders: there is no such key here; did you mean cluster.forwarders?"),
    ("service_url = 'x'", "service_url: there is no such key here; did you mean brokers.service_url?"),
    ("[brokers.tls]\nTRUST = 'x'", 'brokers.tls.TRUST: there is no such key; did you mean "trust"?'),
    (
        "[[listener]]\n[[listener]]\nzzz = 1",
        (
            "listener[1].zzz: there is no such key; there are: allowed_networks, bind, congestion_control, "
            "connections_max_reauth_ms, denied_networks, methods_max_reauth_ms, proxy_protocol, "
            "proxy_protocol_sources, routing, session_enforcement, tls"
        ),
    ),
    ("[log]\n'' = 1", 'log."": there is no such key; there are: level, format'),
    ('[log]\n"a\\nb" = 1', 'log."a\ufffdb": there is no such key; there are: level, format'),
    # values
    ("[log]\nlevel = 'warn'", f'log.level: must be one of {LEVELS}, and is "warn"; did you mean "warning"?'),
    ("[log]\nlevel = 'zzzz'", f'log.level: must be one of {LEVELS}, and is "zzzz"'),
    ("[log]\nlevel = 3", f"log.level: must be one of {LEVELS}"),
    ("[log]\nlevel = 'this-could-be-a-secret-at-the-wrong-key'", f"log.level: must be one of {LEVELS}"),
    ("[limits]\nmax_connections = '5'", "limits.max_connections: must be an integer, and is text"),
    ("[limits]\nmax_connections = 1.5", "limits.max_connections: must be an integer, and is a number with a fraction"),
    ("[limits]\nmax_connections = true", "limits.max_connections: must be an integer, and is true or false"),
    ("[limits]\nmax_connections = 2024-01-01", "limits.max_connections: must be an integer, and is a date"),
    ("[limits]\nmax_connections = 0", "limits.max_connections: must be at least 1"),
    ("[limits]\nmax_connections = 99999999999999999999", "limits.max_connections: must be at most 2147483647"),
    ("[cluster]\nname = ''", "cluster.name: must not be empty"),
    ("[relay]\ncrash_safe = 'yes'", "relay.crash_safe: must be true or false, and is text"),
    ("[listener]\nbind = '0.0.0.0:1'", "listener: must be a list, and is a table; write [[listener]] for each"),
    ("brokers = 1", "brokers: must be a table, and is an integer"),
    ("[brokers]\nallowed_ports = ['6650']", "brokers.allowed_ports[0]: must be an integer, and is text"),
    ("[brokers]\nallowed_hosts = 'b'", "brokers.allowed_hosts: must be a list, and is text"),
    ("[authentication.plugins]\nown = 1", "authentication.plugins.*: must be a table, and is an integer"),
    ("[brokers.credentials]\nfile = 'x'", "brokers.credentials: method is missing"),
    (
        "[brokers]\ncongestion_control = 'BBR!'",
        "brokers.congestion_control: must match the regular expression '^[a-z][a-z0-9_-]*$'",
    ),
    (
        BROKER_TLS + "groups = ['P256']",
        f'brokers.tls.groups[0]: must be one of {GROUPS}, and is "P256"; did you mean "P-256"?',
    ),
    (BROKER_TLS + "groups = 'P-256'", "brokers.tls.groups: must be a list, and is text"),
    (
        BROKER_TLS + "groups = ['X25519', 'P-256']",
        "brokers.tls.groups: several, and those with MLKEM, need Python 3.15; with this one name a single other one",
    ),
    (
        BROKER_TLS + "ciphers = 'HIGH:AES999'",
        f"brokers.tls.ciphers: 'AES999' selects no cipher for TLS 1.2 of {ssl.OPENSSL_VERSION}",
    ),
    (
        BROKER_TLS + "ciphers = 'aNULL'",
        "brokers.tls.ciphers: 'aNULL' selects ADH-AES256-GCM-SHA384, which does not authenticate the server",
    ),
    (
        f"[[listener]]\ntls = {{ certificate = 'c', key = 'k', certificates = [{', '.join([PAIR] * 101)}] }}",
        "listener[0].tls.certificates: must have at most 100 entries",
    ),
    (
        "[session]\nmethods_max_reauth_ms = { tokn = 5000 }",
        'session.methods_max_reauth_ms.tokn: there is no such method; did you mean "token"?',
    ),
    # what stands in files
    (
        CREDENTIALS + "file = 'DIR/nowhere'",
        "brokers.credentials.file: DIR/nowhere cannot be read: No such file or directory",
    ),
    (CREDENTIALS + "file = 'DIR'", "brokers.credentials.file: DIR cannot be read: Is a directory"),
    (
        CREDENTIALS + "file = 'DIR/key'",
        "brokers.credentials.file: DIR/key holds no JSON Web Token (three parts with dots between them)",
    ),
    (
        TOKENS + "secret_key = 'DIR/pem'",
        "authentication.token.secret_key: DIR/pem holds a public key; " + SECRET_WANTED,
    ),
    (TOKENS + "secret_key = 'DIR/empty'", "authentication.token.secret_key: DIR/empty is empty"),
    ("[admin]\ntoken_file = 'DIR/empty'", "admin.token_file: DIR/empty holds no token"),
    # addresses and folders
    ("[[listener]]\nbind = '6650'", "listener[0].bind: '6650' has no port"),
    (
        "[admin]\nbind = '127.0.0.1:6650'",
        "admin.bind: 127.0.0.1:6650 is taken by listener[0].bind (0.0.0.0:6650); give it a port of its own",
    ),
    ("[cluster]\nruntime_dir = 'DIR/key'", "cluster.runtime_dir: DIR/key is not a folder"),
    ("[cluster]\nruntime_dir = 'DIR/key/run'", "cluster.runtime_dir: DIR/key/run: Not a directory"),
    (f"[cluster]\nruntime_dir = '/{'x' * 80}'", "cluster.runtime_dir: longer than 80 bytes"),
    # what is no TOML
    ("[cluster\n", f"{FILE}: is not TOML: Expected ']' at the end of a table declaration (at line 1, column 9)"),
    (b"\xff\xfe[\x00", f"{FILE}: is UTF-16; save it as UTF-8"),
    (b"\n\n# \xff", f"{FILE}: is not UTF-8: byte 0xff in line 3"),
    ("a = " + "9" * 5000, f"{FILE}: is not TOML that a configuration could be: a number or a nesting without end"),
    ("a = " + "[" * 9999, f"{FILE}: is not TOML that a configuration could be: a number or a nesting without end"),
    (b"#" * (FILE_BYTES_MAX + 1), f"{FILE}: is longer than {FILE_BYTES_MAX} bytes: is it a configuration?"),
]


@pytest.mark.parametrize(("content", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake(run: Run, file: Path, content: str | bytes, says: str) -> None:
    result = run(content)
    expected = says.replace(FILE, str(file)).replace("DIR", str(file.parent))
    assert (result.stderr, result.stdout, result.exit_code) == (f"pulsar-trio-proxy: {expected}\n", "", 1)


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf[cluster]\r\nruntime_dir = 'DIR'\r\n", b"[cluster]\r\nruntime_dir = 'DIR'"]
)
def test_a_configuration_with_byte_order_mark_or_crlf_is_accepted(run: Run, file: Path, content: bytes) -> None:
    assert run(content.replace(b"DIR", str(file.parent).encode())).exit_code == 0


VARIABLES: list[tuple[dict[str, str], str]] = [
    (
        {"BROKERS_SERVICE_URL": "x"},
        f"{WRITTEN}: there is no such key; between its parts stand two underscores: {MEANT}",
    ),
    (
        {"BROKERS__SERVICEURL": "x"},
        'PULSAR_TRIO_PROXY__BROKERS__SERVICEURL: there is no such key; did you mean "service_url"?',
    ),
    (
        {"LIMITS__MAX_CONNECTIONS": "a-secret"},
        "PULSAR_TRIO_PROXY__LIMITS__MAX_CONNECTIONS: its text is not a value as TOML writes it",
    ),
    ({"LOG__LEVEL": "inf"}, f'log.level: must be one of {LEVELS}, and is "inf"; did you mean "info"?'),
    (
        {"LISTENER__0__TLS__CERTIFICATES__0__KAY": "a"},
        'PULSAR_TRIO_PROXY__LISTENER__0__TLS__CERTIFICATES__0__KAY: there is no such key; did you mean "key"?',
    ),
    ({"LISTENER__X__BIND": "a"}, "PULSAR_TRIO_PROXY__LISTENER__X__BIND: x is not the number of an entry"),
    (
        {"CLUSTER__NAME__X": "a"},
        "PULSAR_TRIO_PROXY__CLUSTER__NAME__X: there is no such key: what it stands in has none",
    ),
]


@pytest.mark.parametrize(("variables", "says"), VARIABLES, ids=range(len(VARIABLES)))
def test_a_mistake_in_the_environment(run: Run, variables: dict[str, str], says: str) -> None:
    result = run("", **variables)
    assert (result.stderr, result.exit_code) == (f"pulsar-trio-proxy: {says}\n", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chek"], 'Error: no such command: chek; did you mean "check"?'),
        (
            ["zzzz"],
            f"Error: no such command: zzzz; there are: {', '.join(sorted(cli.main.commands))}",
        ),
        (["check"], "Error: Missing option '--config'."),
    ],
)
def test_a_mistake_in_the_command(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == says


# ---- files, folders, users


def test_a_folder_that_this_user_cannot_write(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root could write it all the same, so the system's answer is taken."""
    real = os.access
    closed = [str(file.parent)]

    def access(path: os.PathLike[str], mode: int, *, effective_ids: bool = False) -> bool:
        if os.fspath(path) not in closed:
            return real(path, mode)
        assert (mode, effective_ids) == (os.W_OK | os.X_OK, True)
        return False

    monkeypatch.setattr(os, "access", access)
    folder = file.parent / "a" / "b"
    cannot = f"{folder} cannot be made: {file.parent} cannot be written by this user"
    advice = "make the folder beforehand, or name another"
    result = run("[cluster]\nruntime_dir = 'DIR/a/b'")
    assert warned(result) == f"{cannot}; {advice}"
    assert not folder.parent.exists(), "check makes nothing"
    assert warned(run("[cluster]\nruntime_dir = 'DIR'")) == f"{file.parent} cannot be written by this user"


def test_a_folder_that_this_user_cannot_see(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a folder of mode 700 of another user."""
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path == file.parent / "theirs" / "run":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    result = run("[cluster]\nruntime_dir = 'DIR/theirs/run'")
    assert warned(result) == f"{file.parent}/theirs/run: Permission denied"


def test_a_folder_of_another(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where root checks the configuration of a service that runs as a user of its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    content = "[cluster]\nruntime_dir = 'DIR'\n[brokers]\nservice_url = 'pulsar://127.0.0.1:1'"
    assert warned(run(content)) == f"{file.parent} belongs to another user"
    result = run(content, "check", "--connect")
    assert re.search(r"^FAILED  127\.0\.0\.1:1", result.stdout, re.MULTILINE), "brokers are tried all the same"


def test_no_broker_that_accepts_the_proxy(run: Run) -> None:
    content = "[cluster]\nruntime_dir = 'DIR/run'\n[brokers]\nservice_url = 'pulsar://127.0.0.1:1'"
    result = run(content, "check", "--any-broker")
    assert result.exit_code == 1
    assert re.match(r"pulsar-trio-proxy: no broker accepts the proxy: 127\.0\.0\.1:1 at ", result.stderr), result.stderr
    assert result.stdout == "", "not in order"
    assert run(content, "check").exit_code == 0, "brokers are not tried unasked"


def test_a_kernel_without_filters_of_system_calls_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.runtime.process.seccomp.is_available", lambda: False)
    result = run("[cluster]\nruntime_dir = 'DIR/run'", "check")
    assert result.exit_code == 0
    assert "warning: the kernel has no seccomp filters here" in result.stderr


def test_certificates_and_crls_that_end_are_warnings(run: Run, tmp_path: Path) -> None:
    """A file of the moment, which another one may replace before the start: no error."""
    authority, crl = Authority(tmp_path, "ours"), tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(days=6))
    old, good = authority.server("old", expired=True), authority.server("good")
    tls = f"[listener.tls]\nclient_ca = '{authority.file}'\nclient_crl = '{crl}'\n"
    content = f"[cluster]\nruntime_dir = 'DIR/run'\n[[listener]]\n{tls}"
    result = run(f"{content}certificate = '{old.certificate}'\nkey = '{old.key}'")
    assert result.exit_code == 0
    prefix = "pulsar-trio-proxy: warning: listener[0].tls."
    warnings = [line.removeprefix(prefix) for line in result.stderr.splitlines() if line.startswith(prefix)]
    assert warnings == ["certificate: a certificate has expired", "client_crl: a CRL expires soon"]
    crl.write_bytes(authority.crl(days=8))
    result = run(f"{content}certificate = '{good.certificate}'\nkey = '{good.key}'")
    assert (result.exit_code, prefix in result.stderr) == (0, False)


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        ("auto", 0, 'warning: relay.kernel_tls: "auto" moves no relay into the kernel on this machine: '),
        ("required", 1, "pulsar-trio-proxy: relay.kernel_tls: the kernel gives this process no TLS"),
        ("off", 0, ""),
    ],
)
def test_a_kernel_without_tls(run: Run, setting: str, code: int, says: str, has_tls: bool) -> None:
    """It is tried, as the proxy does."""
    tried: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_tls, "_kernel_takes", lambda cipher: tried.append(cipher) or has_tls)
        kernel_tls.kernel_ciphers.cache_clear()
        result = run(f"[cluster]\nruntime_dir = 'DIR/run'\n[relay]\nkernel_tls = '{setting}'")
    kernel_tls.kernel_ciphers.cache_clear()
    assert tried == ([] if setting == "off" else list(kernel_tls.CIPHERS))
    assert result.exit_code == (0 if has_tls else code)
    assert ("kernel_tls" in result.stderr) == (bool(says) and not has_tls)
    assert has_tls or says in result.stderr


def warned(result: Result) -> str:
    """What `check` says of cluster.runtime_dir, where it takes the configuration all the same."""
    assert result.exit_code == 0, result.output
    (says,) = re.findall(
        r"^pulsar-trio-proxy: warning: cluster\.runtime_dir: (.+); `serve` would not start as this user\n\Z",
        result.stderr,
    )
    return str(says)


@pytest.mark.parametrize("command", ["status", "reload", "drain", "upgrade"])
def test_no_cluster(run: Run, file: Path, command: str) -> None:
    result = run("[cluster]\nruntime_dir = 'DIR'", command)
    assert (result.stderr, result.exit_code) == (f"pulsar-trio-proxy: no cluster is running in {file.parent}\n", 1)


def test_the_cluster_of_another_user(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def denied(_path: str) -> None:
        await trio.lowlevel.checkpoint()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(trio, "open_unix_socket", denied)
    path = file.parent / "control.sock"
    advice = "Permission denied; ask as the user that runs the cluster, or as root"
    assert run("[cluster]\nruntime_dir = 'DIR'", "status").stderr == f"pulsar-trio-proxy: {path}: {advice}\n"


# ---- the terminal


def test_ctrl_c_is_no_defect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio gives it in groups, wherever it arrives."""

    def interrupted(*_arguments: object) -> None:
        raise BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()])])

    monkeypatch.setattr(cli, "load_plan", interrupted)
    result = run("")
    assert (result.stderr.strip(), result.exit_code) == ("Aborted!", 1)


def test_a_defect_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise BaseExceptionGroup("", [KeyboardInterrupt(), ZeroDivisionError()])

    monkeypatch.setattr(cli, "load_plan", broken)
    with pytest.raises(BaseExceptionGroup):
        run("")


@pytest.mark.parametrize(
    ("how", "says", "code"),
    [
        (">/dev/full", "pulsar-trio-proxy: the output cannot be written: No space left on device\n", 1),
        (">&-", "", 0),
        ("| true", "", None),
    ],
)
def test_an_output_that_takes_nothing(file: Path, how: str, says: str, code: int | None) -> None:
    file.write_text(f"[cluster]\nruntime_dir = '{file.parent}'\n")
    done = subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -m proxy check --config "{file}" {how}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == says
    if code is not None:
        assert done.returncode == code


@pytest.mark.parametrize(
    ("keys", "listener", "warning"),
    [
        ("service_url = 'pulsar+ssl://b'\nproxy_protocol = 'before_tls'", "", "Pulsar's brokers expect the header"),
        ("service_url = 'pulsar+ssl://b'\nproxy_protocol = 'within_tls'", "", ""),
        ("service_url = 'pulsar://b'\nproxy_protocol = 'before_tls'", "", ""),
        ("service_url = 'pulsar://b'\nproxy_protocol = 'within_tls'", "routing = 'sni'", "sends no header"),
        ("service_url = 'pulsar+ssl://b'\nproxy_protocol = 'off'", "routing = 'sni'", ""),
    ],
)
def test_a_proxy_header_that_brokers_may_not_get(run: Run, keys: str, listener: str, warning: str) -> None:
    result = run(f"[cluster]\nruntime_dir = 'DIR/run'\n[[listener]]\n{listener}\n[brokers]\n{keys}", "check")
    assert result.exit_code == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "header" in line]
    assert [warning in line for line in warnings] == ([True] if warning else [])
