"""Every TOML and YAML block of README.md and docs/: `check` has nothing against it, files that it names included."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
import yaml
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from local.tokens import make_token

from analytics.receiver.config import load_config as load_receiver_config
from analytics.report.prices import read_prices
from auth.providers.scram import credential_line
from proxy.cli import main
from proxy.config.load import load_config
from tests.deploy.chart import NAME, NEWEST, Manifests, Refused, helm_template, helms, needs_tools
from tests.docs.blocks import ROOT, Block, blocks, commands, pages
from tests.e2e.lab.cluster import to_toml

RECEIVER_PAGE = "docs/analytics-receiver.md"
CHART_PAGE = "docs/kubernetes.md"
LOADED_ONLY = {
    "voucher": "the provider is the page's own, and not installed; tests/auth/test_docs_providers.py runs it",
    "sasl": "a keytab needs a KDC; tests/e2e/test_kerberos.py has one",
}
"""Fragments that `check` cannot verify here beyond their keys, by a word in them."""


def _of(language: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language == language]


def _named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


PRICE_BLOCKS = [block for block in _of("toml") if "[[price]]" in block.text]
PROXY_BLOCKS = [block for block in _of("toml") if block.page != RECEIVER_PAGE and block not in PRICE_BLOCKS]
RECEIVER_BLOCKS = [block for block in _of("toml") if block.page == RECEIVER_PAGE]


class Files:
    """What the pages name below /etc, real files below a folder: certificates, keys, tokens, users."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = trustme.CA()
        leaf, by_name = authority.issue_cert("localhost"), authority.issue_cert("pulsar.example.com")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = key.public_key()
        der = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        chain = b"".join(one.bytes() for one in leaf.cert_chain_pems)
        token = make_token(b"k" * 32, "proxy").encode()
        self._by_name = {
            **dict.fromkeys(("ca.crt", "clients-ca.crt"), authority.cert_pem.bytes()),
            **dict.fromkeys(("tls.crt", "proxy.crt", "receiver.crt"), chain),
            **dict.fromkeys(("tls.key", "proxy.key", "receiver.key"), leaf.private_key_pem.bytes()),
            "public.crt": by_name.cert_chain_pems[0].bytes(),
            "public.key": by_name.private_key_pem.bytes(),
            **dict.fromkeys(("public.der", "next.der", "token-public.der"), public.public_bytes(*der)),
            "public.pem": public.public_bytes(*pem),
            "proxy.jwt": token,
            **dict.fromkeys(("admin-token", "receiver-token"), b"0123456789abcdef" * 4 + b"\n"),
            "users.htpasswd": b"alice:" + bcrypt.hashpw(b"correct horse", bcrypt.gensalt(4)) + b"\n",
            "users.scram": credential_line("alice", "correct horse", "SCRAM-SHA-256", 4096).encode() + b"\n",
            "proxy.keytab": b"\x05\x02",
        }

    def below(self, text: str) -> str:
        """The text with its files below the folder, where they now are."""
        for path in set(re.findall(r'"(/etc/[^"]+)"', text)):
            target = self.folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._by_name[target.name])
        return text.replace('"/etc/', f'"{self.folder}/etc/').replace('"/run/', f'"{self.folder}/run/')


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("docs"))


def completed(tree: dict[str, Any], files: Files) -> dict[str, Any]:
    """A fragment with what it cannot be without: authentication that is enabled has a provider for each method that it
    speaks of, certificates need a listener that asks for them, and Kubernetes a pod. What names the brokers is whole.
    """
    authentication = tree.get("authentication")
    if not authentication or "brokers" in tree:
        return tree
    base = tomllib.loads(
        files.below("""\
[[listener]]
bind = "127.0.0.1:6651"
tls = { certificate = "/etc/proxy/tls.crt", key = "/etc/proxy/tls.key", client_ca = "/etc/proxy/clients-ca.crt" }
[authentication]
enabled = true
tls = {}
""")
    )
    if "kubernetes" in (oidc := authentication.get("oidc", {})):  # what a pod has
        pod = 'api_server = "https://kubernetes"\ntoken_file = "/etc/pod/proxy.jwt"\ntrust = "/etc/pod/ca.crt"\n'
        authentication["oidc"] = {**oidc, "kubernetes": {**tomllib.loads(files.below(pod)), **oidc["kubernetes"]}}
    return {**base, **tree, "authentication": {**base["authentication"], **authentication}}


@_named(PROXY_BLOCKS)
def test_check_has_nothing_against_it(block: Block, files: Files, tmp_path: Path) -> None:
    tree = completed(tomllib.loads(files.below(block.text)), files)
    path = tmp_path / "proxy.toml"
    path.write_text(_written(tree))
    assert tomllib.loads(path.read_text()) == tree
    load_config(path, {})
    if not any(word in block.text for word in LOADED_ONLY):
        result = CliRunner().invoke(main, ["check", "--config", str(path)])
        assert result.exit_code == 0, result.output
        assert f"{path}: in order" in result.output


def _written(tree: dict[str, Any]) -> str:
    """A tree as TOML, its tables inline."""
    kinds = ("listener", "http_listener", "quota")
    plain = {name: value for name, value in tree.items() if name not in kinds}
    return "".join(to_toml({kind: one}) for kind in kinds for one in tree.get(kind, ())) + to_toml(plain)


@pytest.mark.parametrize("word", LOADED_ONLY)
def test_each_word_of_loaded_only_occurs_in_a_block(word: str) -> None:
    assert any(word in block.text for block in PROXY_BLOCKS)


@_named(RECEIVER_BLOCKS)
def test_the_receiver_takes_it(block: Block, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "receiver.toml"
    path.write_text(files.below(block.text))
    config = load_receiver_config(path)
    assert config.listen.tls is not None
    assert Path(config.listen.tls.certificate).exists()


@_named([block for block in _of("yaml") if block.page != CHART_PAGE])
def test_prometheus_keys_are_those_of_its_tables(block: Block) -> None:
    """promtool reads the whole one (tests/e2e/test_docs_commands.py); the other is for a newer one than Debian's."""
    assert set(yaml.safe_load(block.text)) <= {"global", "scrape_configs", "remote_write"}


@needs_tools
@_named([block for block in _of("yaml") if block.page == CHART_PAGE])
def test_the_chart_takes_the_values(block: Block) -> None:
    """Its schema knows every key, so a misspelt one is refused."""
    values = yaml.safe_load(block.text)
    kind = values.get("workload", {}).get("kind", "Deployment")
    assert Manifests(helm_template(values)).names(kind) == [NAME]
    with pytest.raises(Refused):
        helm_template({f"{key}x": value for key, value in values.items()})


@needs_tools
def test_the_chart_takes_the_options_of_helm_install() -> None:
    shown = [command for block in blocks(CHART_PAGE) for command in commands(block)]
    (install,) = (command.text for command in shown if command.head.startswith("helm install"))
    words = shlex.split(install.replace("\\\n", " "))
    for result in helms("template", *words[2:], "--kube-version", NEWEST, cwd=ROOT).values():
        assert result.returncode == 0, result.stderr
        assert "REGISTRY/pulsar-trio-proxy" in result.stdout


def test_the_environment_overrides_what_the_page_says(tmp_path: Path) -> None:
    """docs/configuration.md: three variables, as they stand there."""
    (block,) = (block for block in blocks("docs/configuration.md") if "PULSAR_TRIO_PROXY__" in block.text)
    variables = dict(line.split("=", 1) for line in block.text.splitlines())
    path = tmp_path / "proxy.toml"
    path.write_text("")
    config = load_config(path, variables)
    assert config.brokers.service_url == "pulsar://broker-0:6650,broker-1:6650"
    assert config.brokers.allowed_ports == (6650, 6651)
    assert [listener.bind for listener in config.listener] == ["0.0.0.0:6650"]


def test_there_are_such_blocks() -> None:
    """So that no change of how blocks are found makes these tests empty."""
    assert len(PROXY_BLOCKS) > 10
    assert RECEIVER_BLOCKS
    assert len(_of("yaml")) > 3


@_named(PRICE_BLOCKS)
def test_prices_are_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(block.text)
    assert read_prices(path).tenants
