"""What `make run` prepares for a bill of its own traffic: two principals' tokens, the receiver's and Prometheus' files.

Nothing of it runs before its lines are typed. `make analytics` installs what they need.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from local import machine
from local.console import exit_on_error
from local.environment import ROOT, Environment
from local.ports import free_port
from local.tokens import make_token, write_private

PRINCIPALS = ("alice", "bob")
ANONYMOUS = "anonymous"
_KEY_BYTES = 32
_TURN_PAUSE_S = 15
_AUTHENTICATION = """
[authentication]
enabled = true
anonymous_role = "{anonymous}"      # any client is let in; one with a token has its name

[authentication.token]
secret_key = {key}
"""
_RECEIVER = """\
# Written by `make run`.
[listen]
bind = "127.0.0.1:{port}"

[authentication]
token_files = [{token}]      # else the Prometheus of an earlier run could write here

[spool]
directory = {spool}

[admin]
bind = "127.0.0.1:{admin_port}"
"""


class FirstBill:
    """The files in `directory`, and the lines that lead from them to a bill."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.page = directory / "bill.html"

    def token_file(self, principal: str) -> Path:
        """Return the path of a principal's token; `$p` stands for any in a shell's loop."""
        return self._directory / f"{principal}.token"

    def write_tokens(self) -> str:
        """Write the signing key, and a token for each principal; return the cluster's configuration for them."""
        key = secrets.token_bytes(_KEY_BYTES)
        for principal in PRINCIPALS:
            write_private(self.token_file(principal), make_token(key, principal).encode())
        key_file = self._directory / "token.key"
        write_private(key_file, key)
        return _AUTHENTICATION.format(anonymous=ANONYMOUS, key=json.dumps(str(key_file)))

    def write_configurations(self, admin_url: str) -> list[str]:
        """Write the receiver's and Prometheus' configurations; return the four lines that use them."""
        receiver_port = free_port(9291)
        admin_port = free_port(9292, avoid=(receiver_port,))
        port = free_port(9090, avoid=(receiver_port, admin_port))
        below = self._directory
        token = below / "receiver.token"
        write_private(token, secrets.token_hex(_KEY_BYTES).encode())
        text = _RECEIVER.format(
            port=receiver_port,
            admin_port=admin_port,
            token=json.dumps(str(token)),
            spool=json.dumps(str(below / "spool")),
        )
        (below / "receiver.toml").write_text(text)
        (below / "spool").mkdir(0o750)  # the pipeline wants it at its start, which may come before the receiver's
        settings = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "pulsar-proxy", "static_configs": [{"targets": [admin_url.partition("//")[2]]}]}
            ],
            "remote_write": [
                {
                    "url": f"http://127.0.0.1:{receiver_port}/api/v1/write",
                    "authorization": {"credentials_file": str(token)},
                    "queue_config": {"batch_send_deadline": "1s"},
                }
            ],
        }
        (below / "prometheus.yml").write_text(json.dumps(settings, indent=2))  # JSON is YAML
        analytics = Environment().tool("pulsar-proxy-analytics")
        prometheus = f"prometheus --config.file={below}/prometheus.yml --storage.tsdb.path={below}/prometheus"
        places = f"--spool {below}/spool --tables file://{below}/tables --report {self.page}"
        return [
            f"make -C {ROOT} analytics",
            f"{analytics} receive --config {below}/receiver.toml &",
            f"{prometheus} --web.listen-address=127.0.0.1:{port} --log.level=warn &",
            f"{analytics} pipeline --follow {_TURN_PAUSE_S} {places}",
        ]


@exit_on_error("analytics")
def main() -> None:
    """Install what the lines need: the analytics with Spark, Java, Prometheus."""
    machine.ensure((machine.VENV, machine.JRE, machine.PROMETHEUS))
    Environment().prepare("analytics")


if __name__ == "__main__":
    main()
