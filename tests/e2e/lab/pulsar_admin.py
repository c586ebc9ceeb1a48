"""The distribution's `pulsar-admin`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 180.0
_PLUGINS = "org.apache.pulsar.client.impl.auth.Authentication"
_QUICK_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@dataclass(frozen=True)
class PulsarAdmin:
    """One operator's: the distribution, the environment for its scripts, and the options before each command."""

    home: Path
    environment: Mapping[str, str]
    options: tuple[str, ...]

    @classmethod
    def by_token(
        cls, home: Path, environment: Mapping[str, str], url: str, token: str, *, trust: str = ""
    ) -> PulsarAdmin:
        """With a token; ``trust``: PEM file with who may sign the server's certificate."""
        options = ["--admin-url", url, "--auth-plugin", f"{_PLUGINS}Token", "--auth-params", f"token:{token}"]
        return cls(home, environment, (*options, *(["--tls-trust-cert-path", trust] if trust else [])))

    @classmethod
    def by_certificate(
        cls, home: Path, environment: Mapping[str, str], url: str, *, certificate: str, key: str, trust: str
    ) -> PulsarAdmin:
        """With a certificate."""
        parameters = f"tlsCertFile:{certificate},tlsKeyFile:{key}"
        options = ("--admin-url", url, "--auth-plugin", f"{_PLUGINS}Tls", "--auth-params", parameters)
        return cls(home, environment, (*options, "--tls-trust-cert-path", trust))

    def run(self, *command: str) -> str:
        """What a command that must succeed prints."""
        result = self._run(command)
        assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
        return result.stdout

    def fail(self, *command: str) -> str:
        """What a command that must fail says."""
        result = self._run(command)
        assert result.returncode, f"{command}: {result.stdout}"
        return result.stdout + result.stderr

    def _run(self, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        script = str(self.home / "bin" / "pulsar-admin")
        options = self.environment["PULSAR_EXTRA_OPTS"]
        environment = {**self.environment, "PULSAR_EXTRA_OPTS": f"{options} {_QUICK_START}"}
        return subprocess.run(
            [script, *self.options, *command],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
