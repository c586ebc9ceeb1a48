"""The command line's import: files, exit codes, and what is told."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from e2e.lab.certificates import Authority
from local.tokens import make_token

from proxy.cli import main

PROVIDERS = "org.apache.pulsar.broker.authentication."


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A proxy.conf with tokens, and TLS on both sides."""
    authority = Authority(tmp_path, "ours")
    server = authority.server("server")
    (tmp_path / "secret.key").write_bytes(b"k" * 32)
    (tmp_path / "proxy.jwt").write_text(make_token(b"k" * 32, "proxy"))
    path = tmp_path / "proxy.conf"
    path.write_text(f"""\
brokerServiceURLTLS=pulsar+ssl://broker.example.com:6651
tlsEnabledWithBroker=true
brokerWebServiceURLTLS=https://broker.example.com:8443
brokerClientTrustCertsFilePath={authority.file}
tlsHostnameVerificationEnabled=true
servicePortTls=6651
webServicePortTls=8443
tlsCertificateFilePath={server.certificate}
tlsKeyFilePath={server.key}
authenticationEnabled=true
authenticationProviders={PROVIDERS}AuthenticationProviderToken
tokenSecretKey=file://{tmp_path}/secret.key
brokerClientAuthenticationPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken
brokerClientAuthenticationParameters=file://{tmp_path}/proxy.jwt
superUserRoles=admin,proxy
numIOThreads=8
httpReverseProxy.ui.path=/ui
httpReverseProxy.ui.proxyTo=http://ui.example.com:8000
proxyHttpResponseHeadersJson={{"X-Frame-Options": "DENY"}}
""")
    return path


def run(conf: Path, *options: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["import", str(conf), *map(str, options)], env=env)


def test_check_has_nothing_against_the_result(conf: Path, tmp_path: Path) -> None:
    output = tmp_path / "proxy.toml"
    result = run(conf, "--output", output)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert [line.split(": ")[1:3] for line in result.stderr.splitlines()] == [
        ["note", "brokerProxyAllowedHostNames"],
        ["note", "webServicePort"],
        ["note", "webServicePort"],
    ]
    text = output.read_text()
    assert "# numIOThreads" not in text
    assert "# * numIOThreads: it counts threads" in text
    runtime = {"PULSAR_TRIO_PROXY__CLUSTER__RUNTIME_DIR": str(tmp_path / "run")}
    checked = CliRunner().invoke(main, ["check", "--config", str(output)], env=runtime)
    assert checked.exit_code == 0, checked.output
    assert run(conf).stdout == text


def test_what_is_not_carried_over_ends_with_1_and_is_written_all_the_same(conf: Path, tmp_path: Path) -> None:
    with conf.open("a") as file:
        file.write("proxyLogLevel=2\nmistyped=1\n")
    result = run(conf, "--output", tmp_path / "proxy.toml")
    assert result.exit_code == 1
    assert "not carried over: proxyLogLevel: commands" in result.stderr
    assert 'not carried over: "mistyped": is no key of Java\'s proxy' in result.stderr
    assert tomllib.loads((tmp_path / "proxy.toml").read_text())["authentication"]["enabled"] is True


def test_what_check_refuses_ends_with_1(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.key").unlink()
    result = run(conf)
    assert result.exit_code == 1
    assert "`check` refuses the result: authentication.token.secret_key" in result.stderr
    assert "[authentication.token]" in result.stdout


def test_secrets_go_to_files_of_their_own(conf: Path, tmp_path: Path) -> None:
    token = make_token(b"k" * 32, "proxy")
    with conf.open("a") as file:
        file.write(f"brokerClientAuthenticationParameters=token:{token}\n")
    directory = tmp_path / "secrets"
    result = run(conf, "--secrets-directory", directory, "--output", tmp_path / "proxy.toml")
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {
        "proxy.jwt": 0o600,
        "admin-token": 0o600,
    }
    assert (directory / "proxy.jwt").read_text().strip() == token
    result = run(conf)
    assert result.exit_code == 1
    assert token not in result.output
    assert "put the token into /etc/pulsar-trio-proxy/secrets/proxy.jwt with mode 0600" in result.stderr


@pytest.mark.parametrize("there", ["proxy.toml", "secrets/admin-token"])
def test_no_file_is_overwritten(conf: Path, tmp_path: Path, there: str) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / there).symlink_to(tmp_path / "target")
    result = run(conf, "--secrets-directory", tmp_path / "secrets", "--output", tmp_path / "proxy.toml")
    assert result.exit_code == 1
    assert f"{there}: is there already, and is not overwritten; nothing was written" in result.stderr
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "secrets" / "proxy.jwt").exists()


def test_without_a_folder_for_the_output_nothing_is_written(conf: Path, tmp_path: Path) -> None:
    result = run(conf, "--secrets-directory", tmp_path / "secrets", "--output", tmp_path / "none" / "proxy.toml")
    assert result.exit_code == 1
    assert "its folder is not there; nothing was written" in result.stderr
    assert not (tmp_path / "secrets").exists()


def test_the_environment_counts_only_where_asked_for(conf: Path, tmp_path: Path) -> None:
    env = {"PULSAR_PREFIX_clusterName": "theirs", "servicePortTls": "6661"}
    assert "theirs" not in run(conf, env=env).stdout
    variables = tmp_path / "variables"
    variables.write_text("\n".join(f"{name}={value}" for name, value in env.items()))
    for result in (run(conf, "--environment", "current", env=env), run(conf, "--environment", variables)):
        tree = tomllib.loads(result.stdout)
        assert tree["cluster"]["name"] == "theirs"
        assert tree["listener"][1]["bind"] == "0.0.0.0:6661"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "proxy.conf: cannot be read: No such file or directory"), (b"a=\\uxxxx", "proxy.conf: line 1: ")],
)
def test_what_cannot_be_read(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "proxy.conf"
    if content is not None:
        path.write_bytes(content)
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr
