"""proxy.config.load: TOML, the environment over it, and every mistake named by its key."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_files import Files
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.common.errors import ConfigError
from proxy.config.checks import validate_config
from proxy.config.load import load_config, worker_environment
from proxy.config.types import Config

# ---- the file


def test_an_empty_file_gives_the_defaults(files: Files) -> None:
    assert files.load() == Config()


def test_defaults_are_the_designs() -> None:
    config = Config()
    assert (config.cluster.name, config.cluster.runtime_dir) == ("pulsar", "/run/pulsar-trio-proxy")
    assert (config.cluster.forwarders, config.cluster.lookup_workers, config.cluster.auth_workers) == (0, 1, 1)
    assert [listener.bind for listener in config.listener] == ["0.0.0.0:6650"]
    assert config.brokers.service_url == "pulsar://localhost:6650"
    assert config.brokers.allowed_hosts == config.brokers.allowed_addresses == ()
    assert config.brokers.allowed_ports == ()
    assert config.brokers.credentials is None
    assert config.authentication.enabled is False
    limits = config.limits
    assert (limits.max_connections, limits.max_connections_per_address) == (10_000, 0)
    assert limits.max_concurrent_lookups == 50_000
    assert (limits.handshake_timeout_ms, limits.drain_timeout_ms) == (10_000, 30_000)
    assert config.admin.bind == "127.0.0.1:8080"


def test_a_broker_gives_up_before_the_client_does() -> None:
    """So that a client still learns why."""
    config = Config()
    assert config.brokers.handshake_timeout_ms < config.limits.handshake_timeout_ms
    assert config.brokers.connect_timeout_ms < config.brokers.handshake_timeout_ms


def test_a_full_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k")
    config = files.load(f"""
        [cluster]
        name = "prod"
        forwarders = 4
        [[listener]]
        bind = "0.0.0.0:6650"
        [[listener]]
        bind = "[::]:6651"
        [brokers]
        service_url = "pulsar://b0:6650,b1"
        allowed_hosts = ["b*"]
        allowed_addresses = ["10.0.0.0/8", "fd00::1"]
        allowed_ports = [6650]
        credentials = {{ method = "token", file = "{tmp_path}/key" }}
        [authentication]
        enabled = true
        [authentication.token]
        secret_key = "{tmp_path}/key"
        [log]
        format = "json"
    """)
    assert [listener.bind for listener in config.listener] == ["0.0.0.0:6650", "[::]:6651"]
    assert config.brokers.allowed_addresses == ("10.0.0.0/8", "fd00::1")
    assert config.brokers.credentials is not None
    assert config.log.format == "json"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml", {})


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, {})


def test_no_toml(files: Files) -> None:
    assert "proxy.toml: is not TOML" in files.error("[cluster")


def test_no_utf8(files: Files) -> None:
    files.path.write_bytes(b'\nname = "\xff"')
    with pytest.raises(ConfigError, match="is not UTF-8: byte 0xff in line 2"):
        load_config(files.path, {})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nonsense = 1", "nonsense"),
        ("[nonsense]", "nonsense"),
        ("[brokers]\nservice_ulr = 'x'", "service_ulr"),
        ("[brokers]\nservice_ulr = 'x'", "brokers"),
        ("[authentication.token]\nsecret = 'x'", "authentication.token"),
        ("brokers = 5", "brokers"),
        ("listener = 'x'", "listener"),
        ("[[listener]]\nbind = 5", "listener[0].bind"),
        ("[[listener]]\n[[listener]]\nport = 5", "listener[1]"),
        ("[brokers]\nallowed_ports = 6650", "brokers.allowed_ports"),
        ("[brokers]\nallowed_ports = [6650, 'x']", "brokers.allowed_ports"),
        ("[brokers]\nport_pairs = [6650, 6651]", "brokers.port_pairs"),
        ("[brokers]\nport_pairs = [[6650]]", "brokers.port_pairs"),
        ("[brokers]\nport_pairs = [[6650, 6651, 6652]]", "brokers.port_pairs"),
        ("[brokers]\nport_pairs = [[6650, 0]]", "brokers.port_pairs"),
        ("[brokers]\nallowed_hosts = ['']", "brokers.allowed_hosts"),
        ("[brokers.credentials]\nmethod = 'token'", "file"),
        ("[brokers.credentials]\nmethod = 'magic'\nfile = 'x'", "brokers.credentials.method"),
        ("[log]\nlevel = 'loud'", "log.level"),
        ("[cluster]\nname = ''", "cluster.name"),
        ("[cluster]\nforwarders = -1", "cluster.forwarders"),
        ("[cluster]\nforwarders = 257", "cluster.forwarders"),
        ("[cluster]\nlookup_workers = 0", "cluster.lookup_workers"),
        ("[cluster]\nruntime_dir = '" + "x" * 81 + "'", "cluster.runtime_dir"),
        ("[authentication]\nfailure_delay_ms = 10001", "authentication.failure_delay_ms"),
        ("[limits]\nmax_command_bytes = 1", "limits.max_command_bytes"),
    ],
)
def test_mistakes_are_named(files: Files, text: str, key: str) -> None:
    assert key in files.error(text)


def keys_of(kind: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every key that holds a value, and its default."""
    found: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        default = field.default
        if isinstance(default, msgspec.Struct):
            found += keys_of(type(default), where)
        elif (
            default is not msgspec.NODEFAULT
            and default is not None
            and field.name not in {"listener", "http_listener", "quota"}
        ):
            found.append((where, default))
    return found


@pytest.mark.parametrize(("path", "default"), keys_of(Config))
def test_a_wrong_type_names_the_key(files: Files, path: str, default: Any) -> None:
    wrong: Any = "'text'" if not isinstance(default, str) else "17"
    table, _, key = path.rpartition(".")
    assert files.error(f"[{table}]\n{key} = {wrong}").startswith(path)


@pytest.mark.parametrize(("path", "default"), [entry for entry in keys_of(Config) if type(entry[1]) is int])
@pytest.mark.parametrize("value", ["-1", "1.5", "true", str(2**31)])
def test_numbers_out_of_bounds_name_the_key(files: Files, path: str, default: int, value: str) -> None:
    table, _, key = path.rpartition(".")
    assert files.error(f"[{table}]\n{key} = {value}").startswith(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("listener = []", "listener"),
        ("[[listener]]\nbind = '6650'", "listener[0].bind"),
        ("[[listener]]\n[[listener]]\nbind = '0.0.0.0'", "listener[1].bind"),
        ("[[listener]]\nbind = '0.0.0.0:0'", "listener[0].bind"),
        ("[[listener]]\nbind = '::1:6650'", "listener[0].bind"),
        ("[admin]\nbind = 'localhost:99999'", "admin.bind"),
        ("[brokers]\nservice_url = 'b0:6650'", "brokers.service_url"),
        ("[brokers]\nservice_url = 'http://b0:6650'", "brokers.service_url"),
        ("[brokers]\nservice_url = 'pulsar://b0:6650,,b1'", "brokers.service_url"),
        ("[brokers]\nservice_url = 'pulsar://'", "brokers.service_url"),
        ("[brokers]\nallowed_addresses = ['10.0.0.1/8']", "brokers.allowed_addresses"),
        ("[brokers]\nallowed_addresses = ['*', 'broker']", "brokers.allowed_addresses"),
        ("[brokers.credentials]\nmethod = 'token'\nfile = '/nowhere/token'", "brokers.credentials.file"),
        ("[brokers.credentials]\nmethod = 'token'\nfile = '/'", "brokers.credentials.file"),
        ("[authentication]\nenabled = true", "authentication.enabled"),
        ("[authentication.token]\naudience = 'x'", "authentication.token"),
        ("[authentication.token]\nsecret_key = '/nowhere/key'", "authentication.token.secret_key"),
        ("[authentication.token]\npublic_key = '/nowhere/key'", "authentication.token.public_key"),
    ],
)
def test_an_invalid_value_of_the_right_type_is_refused_with_its_key(files: Files, text: str, key: str) -> None:
    assert files.error(text).startswith(f"{key}:")


def test_a_files_text_is_not_in_the_error(files: Files, tmp_path: Path) -> None:
    """Security: who points a key at the wrong file must not find a secret in the log."""
    (tmp_path / "secret").write_text("hush")
    message = files.error(f"[authentication.token]\nsecret_key = '{tmp_path}/secret'\npublic_key = '/nowhere'")
    assert "hush" not in message


def test_the_runtime_dir_is_bounded_in_bytes(files: Files) -> None:
    """A Unix socket's path holds about 107 of them, whatever characters they make."""
    assert "cluster.runtime_dir" in files.error("[cluster]\nruntime_dir = '/" + "é" * 79 + "'")


def test_a_path_with_a_null_is_an_error_with_its_key(files: Files) -> None:
    text = "[brokers.credentials]\nmethod = 'token'\nfile = \"/a\\u0000b\""
    assert files.error(text).startswith("brokers.credentials.file:")


# ---- the environment


def test_scalars(files: Files) -> None:
    config = files.load(
        "[brokers]\nservice_url = 'pulsar://from-the-file'",
        BROKERS__SERVICE_URL="pulsar://from-the-environment",
        CLUSTER__FORWARDERS="3",
        AUTHENTICATION__ENABLED="false",
        LOG__LEVEL="debug",
    )
    assert config.brokers.service_url == "pulsar://from-the-environment"
    assert (config.cluster.forwarders, config.authentication.enabled, config.log.level) == (3, False, "debug")


def test_texts_that_look_like_something_else_stay_texts(files: Files) -> None:
    for text in ("17", "true", "1.5", "[x]", '"quoted"', "2026-01-01", "a = b", " "):
        assert files.load(CLUSTER__NAME=text).cluster.name == text


def test_lists(files: Files) -> None:
    config = files.load(BROKERS__ALLOWED_PORTS="[1, 2]", BROKERS__ALLOWED_HOSTS='["a", "b*"]')
    assert config.brokers.allowed_ports == (1, 2)
    assert config.brokers.allowed_hosts == ("a", "b*")


def test_entries_of_lists(files: Files) -> None:
    text = "[brokers]\nallowed_ports = [1, 2, 3]"
    assert files.load(text, BROKERS__ALLOWED_PORTS__1="9").brokers.allowed_ports == (1, 9, 3)
    assert files.load(text, BROKERS__ALLOWED_PORTS__3="9").brokers.allowed_ports == (1, 2, 3, 9)
    assert "BROKERS__ALLOWED_PORTS__4" in files.error(text, BROKERS__ALLOWED_PORTS__4="9")


def test_more_than_ten_entries(files: Files) -> None:
    variables = {f"BROKERS__ALLOWED_PORTS__{number}": str(1000 + number) for number in range(12)}
    assert files.load(**variables).brokers.allowed_ports == tuple(range(1000, 1012))


def test_lists_of_tables(files: Files) -> None:
    text = "[[listener]]\nbind = '0.0.0.0:1'"
    config = files.load(text, LISTENER__0__BIND="0.0.0.0:2", LISTENER__1__BIND="0.0.0.0:3")
    assert [listener.bind for listener in config.listener] == ["0.0.0.0:2", "0.0.0.0:3"]
    assert [one.bind for one in files.load(LISTENER__0__BIND="0.0.0.0:4").listener] == ["0.0.0.0:4"]
    assert "LISTENER__2__BIND" in files.error(text, LISTENER__2__BIND="0.0.0.0:5")
    assert [one.bind for one in files.load(text, LISTENER='[{bind="0.0.0.0:6"}]').listener] == ["0.0.0.0:6"]


def test_nested_tables(files: Files, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k")
    key = str(tmp_path / "key")
    config = files.load(AUTHENTICATION__ENABLED="true", AUTHENTICATION__TOKEN__SECRET_KEY=key)
    assert config.authentication.token is not None
    assert config.authentication.token.secret_key == key
    config = files.load(BROKERS__CREDENTIALS=f'{{method = "token", file = "{key}"}}')
    assert config.brokers.credentials is not None
    config = files.load(BROKERS__CREDENTIALS__METHOD="token", BROKERS__CREDENTIALS__FILE=key)
    assert config.brokers.credentials is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NONSENSE", "1"),
        ("", "1"),
        ("BROKERS__NONSENSE", "1"),
        ("BROKERS__SERVICE_URL__MORE", "1"),
        ("BROKERS____SERVICE_URL", "1"),
        ("LISTENER__X__BIND", "0.0.0.0:1"),
        ("LISTENER__-1__BIND", "0.0.0.0:1"),
        ("LISTENER__²__BIND", "0.0.0.0:1"),
        ("CLUSTER__FORWARDERS", "many"),
        ("CLUSTER__FORWARDERS", ""),
        ("BROKERS__ALLOWED_PORTS", "6650,6651"),
    ],
)
def test_variables_that_fit_no_key_are_named(files: Files, name: str, value: str) -> None:
    assert f"PULSAR_TRIO_PROXY__{name}" in files.error(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("CLUSTER__FORWARDERS", '"3"', "cluster.forwarders"),
        ("CLUSTER__FORWARDERS", "1.5", "cluster.forwarders"),
        ("AUTHENTICATION__ENABLED", "1", "authentication.enabled"),
        ("BROKERS__SERVICE_URL", "nonsense", "brokers.service_url"),
        ("LOG__LEVEL", "loud", "log.level"),
    ],
)
def test_values_of_variables_are_checked_like_the_files(files: Files, name: str, value: str, key: str) -> None:
    assert key in files.error(**{name: value})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("brokers = 5", "BROKERS__SERVICE_URL"),
        ("listener = 'x'", "LISTENER__0__BIND"),
        ("listener = [5]", "LISTENER__0__BIND"),
        ("listener = {bind = 'x'}", "LISTENER__0__BIND"),
        ("[brokers]\ncredentials = 'x'", "BROKERS__CREDENTIALS__FILE"),
    ],
)
def test_a_variable_below_what_is_no_table_in_the_file(files: Files, text: str, name: str) -> None:
    message = files.error(text, **{name: "pulsar://x"})
    assert name.partition("__")[0].lower() in message.lower()


def test_a_variable_is_one_value(files: Files) -> None:
    assert "CLUSTER__FORWARDERS" in files.error(CLUSTER__FORWARDERS="1\nother = 2")


def test_other_variables_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "c.toml").touch()
    environment = {"PULSAR_TRIO_PROXY_FORBID_SKIPS": "1", "PATH": "/bin", "pulsar_trio_proxy__cluster__name": "x"}
    assert load_config(tmp_path / "c.toml", environment) == Config()


_PARTS = st.sampled_from(
    ["BROKERS", "LISTENER", "CLUSTER", "SERVICE_URL", "CREDENTIALS", "FILE", "0", "1", "9", "BIND", "", "²", "TOKEN"]
)


@settings(deadline=None)
@given(name=st.lists(_PARTS, max_size=4), value=st.text(max_size=20))
def test_any_variable_gives_a_configuration_or_an_error(name: list[str], value: str) -> None:
    path = Path(os.devnull)
    variable = "PULSAR_TRIO_PROXY__" + "__".join(name)
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(path, {variable: value}), Config)


# ---- the rest


def test_checked_returns_what_it_was_given() -> None:
    config = Config()
    assert validate_config(config) is config


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("keep_alive_idle_ms", 1000, True),
        ("keep_alive_idle_ms", 999, False),
        ("keep_alive_idle_ms", 32_767_001, False),
        ("keep_alive_probe_interval_ms", 999, False),
        ("keep_alive_probes", 127, True),
        ("keep_alive_probes", 128, False),
        ("keep_alive_probes", 0, False),
        ("crash_safe", 1, False),
    ],
)
def test_relays_have_what_the_kernel_takes(files: Files, key: str, value: int, accepted: bool) -> None:
    text = f"[relay]\n{key} = {value}"
    if accepted:
        assert getattr(files.load(text).relay, key) == value
    else:
        assert files.error(text).startswith(f"relay.{key}: ")


def test_types_are_frozen_and_forbid_what_they_do_not_know() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.cluster = config.cluster  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"log": {"x": 1}}, Config)


def test_the_environment_of_a_worker_has_no_configuration_and_no_log_of_session_keys() -> None:
    """Security."""
    secrets = {"PULSAR_TRIO_PROXY__BROKERS__CREDENTIALS__TOKEN": "hush", "SSLKEYLOGFILE": "/tmp/keys"}
    environment = {"PATH": "/bin", "PULSAR_TRIO": "x", **secrets}
    assert worker_environment(environment) == {"PATH": "/bin", "PULSAR_TRIO": "x"}
