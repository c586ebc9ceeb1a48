"""docs/migration.md: its command, with its proxy.conf, says and writes what the page shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from e2e.lab.certificates import Authority
from local.tokens import make_token

from proxy.cli import main
from tests.docs.blocks import ROOT, blocks, commands

PAGE = "docs/migration.md"


def test_the_page_shows_what_the_command_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = blocks(PAGE)
    (conf,) = (block for block in shown if block.file == "proxy.conf")
    command, _, helm = (command for block in shown for command in commands(block))
    (toml,) = (block for block in shown if block.language == "toml")
    below = f"{tmp_path}/etc/"
    folder = tmp_path / "etc" / "pulsar"
    folder.mkdir(parents=True)
    authority = Authority(tmp_path, "ours")
    pair = authority.server("server", "pulsar.example.com")
    for name, source in (("ca.crt", authority.file), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (folder / name).write_bytes(Path(source).read_bytes())
    public = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "token-public.der").write_bytes(der)
    monkeypatch.chdir(tmp_path)
    token = make_token(b"k" * 32, "proxy")
    Path("proxy.conf").write_text(conf.text.replace("/etc/", below).replace("SECRET", token))
    _, *arguments = shlex.split(command.text.replace("/etc/", below))
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.replace(below, "/etc/").splitlines() == [line for line in command.output if line]
    assert unwrapped(Path("proxy.toml").read_text().replace(below, "/etc/")) == unwrapped(toml.text)
    Path("values.json").write_text('{"proxy": {"replicaCount": 2}}')
    assert CliRunner().invoke(main, shlex.split(helm.text)[1:]).exit_code == 0
    assert "replicaCount: 2\n" in Path("values.yaml").read_text()
    assert (tmp_path / "etc/pulsar-trio-proxy/secrets/proxy.jwt").read_text() == f"{token}\n"


def unwrapped(text: str) -> str:
    """The text with the lines of its comments joined: they are wrapped by the length of paths."""
    return text.replace("\n#   ", " ").strip()


def test_the_page_names_the_options() -> None:
    text = (ROOT / PAGE).read_text()
    options = {option for parameter in main.commands["import"].params for option in parameter.opts if "--" in option}
    assert {option for option in options if option not in text} == set()
