"""proxy.config.changes: what a reload takes over, and what needs new processes, an upgrade or a restart."""

import msgspec
import pytest
from config_files import Files

from proxy.config.changes import (
    changes_that_need_a_restart,
    changes_that_need_an_upgrade,
    changes_that_need_new_processes,
    new_binds,
    reload_refusal,
)
from proxy.config.types import Config


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", []),
        ("[brokers]\nservice_url = 'pulsar://other'\n[limits]\nmax_connections = 5", []),
        ("[authentication]\nfailure_delay_ms = 5", []),
        ("[cluster]\nforwarders = 7\nname = 'x'\nlookup_workers = 3\nauth_workers = 3", []),
        ("[cluster]\nruntime_dir = '/x'", ["cluster.runtime_dir"]),
        ("[[listener]]\nbind = '0.0.0.0:7'", []),
        ("[[listener]]\nbind = '127.0.0.1:6650'", ["listener[0].bind"]),
        ("[[listener]]\nbind = '0.0.0.0:6650'\n[listener.tls]\ncertificate = 'FILE'\nkey = 'FILE'", []),
        ("[admin]\nbind = '0.0.0.0:7'", []),
        ("[admin]\nbind = '0.0.0.0:8080'", ["admin.bind"]),
        ("[relay]\ncrash_safe = false", ["relay.crash_safe"]),
        ("[relay]\nhalf_close_timeout_ms = 5\nkeep_alive_probes = 3", []),
        ("[log]\nlevel = 'debug'\n[limits]\nmax_command_bytes = 2048\nmax_broker_frame_bytes = 2048", []),
        ("[cluster]\nruntime_dir = 'x'\n[relay]\ncrash_safe = false", ["cluster.runtime_dir", "relay.crash_safe"]),
    ],
)
def test_changes_that_need_a_restart(files: Files, text: str, changed: list[str]) -> None:
    text = text.replace("FILE", __file__)
    assert changes_that_need_a_restart(Config(), files.load(text)) == changed
    assert changes_that_need_a_restart(files.load(text), files.load(text)) == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", []),
        ("[brokers]\nservice_url = 'pulsar://other'\n[log]\nlevel = 'debug'", []),
        ("[cluster]\nforwarders = 7\nname = 'x'", ["cluster.name", "cluster.forwarders"]),
        ("[cluster]\nlookup_workers = 3\nauth_workers = 3", ["cluster.lookup_workers", "cluster.auth_workers"]),
        ("[cluster]\nruntime_dir = '/x'\n[relay]\ncrash_safe = false", []),
        ("[[listener]]\nbind = '0.0.0.0:7'", ["listener"]),
        ("[[listener]]\n[[listener]]\nbind = '0.0.0.0:7'", ["listener"]),
        ("[[listener]]\nbind = '127.0.0.1:6650'", []),
        ("[[listener]]\nbind = '0.0.0.0:6650'\n[listener.tls]\ncertificate = 'FILE'\nkey = 'FILE'", ["listener"]),
        ("[admin]\nbind = '0.0.0.0:7'", ["admin.bind"]),
        ("[admin]\nbind = '0.0.0.0:8080'", []),
    ],
)
def test_changes_that_need_an_upgrade(files: Files, text: str, changed: list[str]) -> None:
    text = text.replace("FILE", __file__)
    assert changes_that_need_an_upgrade(Config(), files.load(text)) == changed
    assert changes_that_need_an_upgrade(files.load(text), files.load(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "[[listener]]\nbind = '0.0.0.0:6650'\nrouting = 'sni'",
        "[[listener]]\nbind = '0.0.0.0:6650'\n[[listener]]\nbind = '0.0.0.0:6652'\nrouting = 'sni'",
    ],
)
def test_a_reload_that_changes_a_listeners_routing_or_adds_a_listener_says_what_does(files: Files, text: str) -> None:
    """Neither may half apply: clients of one kind at a listener of the other get alerts, or frames, for an answer."""
    plain, with_sni = Config(), files.load(text)
    needed = "an upgrade (pulsar-trio-proxy upgrade) is needed to change: listener"
    assert reload_refusal(plain, with_sni) == reload_refusal(with_sni, plain) == needed
    assert reload_refusal(with_sni, files.load(text)) == ""


def test_fewer_forwarders_need_a_restart(files: Files) -> None:
    """A process has to go on with the relays of the others."""
    four, three = files.load("[cluster]\nforwarders = 4"), files.load("[cluster]\nforwarders = 3")
    assert changes_that_need_a_restart(four, three) == ["cluster.forwarders (fewer)"]
    assert changes_that_need_an_upgrade(four, three) == []
    assert changes_that_need_an_upgrade(three, four) == ["cluster.forwarders"]
    assert changes_that_need_a_restart(three, four) == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", []),
        ("[brokers]\nservice_url = 'pulsar://other'\n[limits]\nmax_connections = 5", []),
        ("[log]\nlevel = 'debug'", ["log"]),
        # The RPC between the workers is laid out for these two.
        ("[limits]\nmax_command_bytes = 2048", ["limits.max_command_bytes"]),
        ("[limits]\nmax_broker_frame_bytes = 2048", ["limits.max_broker_frame_bytes"]),
        ("[limits]\nmax_command_bytes = 2048\n[log]\nlevel = 'debug'", ["limits.max_command_bytes", "log"]),
        ("[cluster]\nforwarders = 7\n[relay]\ncrash_safe = false", []),
    ],
)
def test_changes_that_need_new_processes(files: Files, text: str, changed: list[str]) -> None:
    assert changes_that_need_new_processes(Config(), files.load(text)) == changed
    assert changes_that_need_new_processes(files.load(text), files.load(text)) == []


def test_binds_that_are_new() -> None:
    def config(admin: str, *binds: str) -> Config:
        return msgspec.convert({"admin": {"bind": admin}, "listener": [{"bind": bind} for bind in binds]}, Config)

    old = config("h:1", "h:2", "h:3")
    assert new_binds(old, old) == []
    assert new_binds(old, config("h:1", "h:3")) == []
    assert new_binds(old, config("h:9", "h:3", "h:4")) == [("listener[1].bind", "h:4"), ("admin.bind", "h:9")]
