"""Read a configuration: TOML, then the environment over it, then checks that no type can express.

Every mistake is a ConfigError that names the key. Nothing is bound or started before all of it has been checked.
"""

import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.common.errors import ConfigError
from proxy.common.shape import convert, fields_of, is_list, unknown_key, without_none
from proxy.common.toml import read_toml
from proxy.config.cgroups import ContainerLimits, container_limits
from proxy.config.checks import validate_config
from proxy.config.memory import MemoryPlan, fit_to_container
from proxy.config.types import Config

ENVIRONMENT_PREFIX = "PULSAR_TRIO_PROXY__"


def load_config(path: Path, environment: Mapping[str, str]) -> Config:
    """Load the configuration of a file, overridden from the environment. Raises ConfigError."""
    return validate_config(_typed(_tree(path, environment)))


def load_unchecked(path: Path, environment: Mapping[str, str]) -> Config:
    """Load a configuration as ``load_config``, but check no value, and no file that it names: they may have been broken
    since a cluster began to run with them, which an operator wants to read about. Raises ConfigError.
    """
    return _typed(_tree(path, environment))


def load_plan(
    path: Path, environment: Mapping[str, str], limits: ContainerLimits | None = None, running_forwarders: int = 0
) -> MemoryPlan:
    """Load the configuration as ``load_config``, fitted to this process's container, or to one with these limits.

    ``running_forwarders``: how many there are already; 0: none. Raises ConfigError where the configuration is wrong;
    whether the container is large enough, the plan says.
    """
    tree = _tree(path, environment)
    config = validate_config(_typed(tree))
    given = {f"limits.{key}" for key in tree.get("limits", {})}
    return fit_to_container(config, given, container_limits() if limits is None else limits, running_forwarders)


def _tree(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    tree = read_toml(path)
    names = (name for name in environment if name.startswith(ENVIRONMENT_PREFIX))
    for name in sorted(names, key=_sort_key):
        _override(tree, name, environment[name])
    return tree


def _typed(tree: dict[str, Any]) -> Config:
    config: Config = convert(tree, Config)
    return config


# ---- the environment


def _override(tree: dict[str, Any], name: str, value: str) -> None:
    """Put one variable into the tree: PULSAR_TRIO_PROXY__BROKERS__SERVICE_URL is brokers.service_url."""
    keys = [key.lower() for key in name.removeprefix(ENVIRONMENT_PREFIX).split("__")]
    node: Any = tree
    kind: Any = Config
    for position, key in enumerate(keys):
        kind = _kind_below(kind, key, name)
        if position == len(keys) - 1:
            _assign(node, key, _parse_value(value, kind, name), name)
        else:
            node = _descend(node, key, kind, name)


def _sort_key(name: str) -> list[tuple[int, str]]:
    """Entries of lists in the order of their numbers: the tenth after the ninth."""
    return [(int(part) if _is_number(part) else -1, part) for part in name.split("__")]


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10  # noqa: PLR2004 -- no list is that long


def _kind_below(kind: Any, key: str, name: str) -> Any:
    """Return the type of the value under a key of a table or list."""
    if is_list(kind):
        if not _is_number(key):
            raise ConfigError(f"{name}: {key} is not the number of an entry")
        return typing.get_args(kind)[0]
    fields = fields_of(kind)
    if key not in fields:
        raise ConfigError(f"{name}: {_unknown_variable(kind, key)}")
    return without_none(fields[key])


def _unknown_variable(kind: Any, key: str) -> str:
    """Return what is wrong with a variable: missing double underscores, or a part that does not exist."""
    tables = {f"{table}_": table for table in fields_of(Config)}
    table = next((table for start, table in tables.items() if kind is Config and key.startswith(start)), None)
    if table is not None:
        meant = f"{ENVIRONMENT_PREFIX}{table}__{key.removeprefix(table + '_')}".upper()
        return f"there is no such key; between its parts stand two underscores: {meant}"
    return unknown_key(key, "", kind, kind)


def _descend(node: Any, key: str, kind: Any, name: str) -> Any:
    empty: Any = [] if is_list(kind) else {}
    if isinstance(node, list):
        index = int(key)
        if index > len(node):
            raise ConfigError(f"{name}: entry {index} without the entries before it")
        if index == len(node):
            node.append(empty)
        below = node[index]
    else:
        below = node.setdefault(key, empty)
    if type(below) is not type(empty):
        wanted = "list" if is_list(kind) else "table"
        raise ConfigError(f"{name}: what the file has under {key} is not a {wanted}")
    return below


def _assign(node: Any, key: str, value: Any, name: str) -> None:
    if not isinstance(node, list):
        node[key] = value
    elif int(key) < len(node):
        node[int(key)] = value
    elif int(key) == len(node):
        node.append(value)
    else:
        raise ConfigError(f"{name}: entry {key} without the entries before it")


def _parse_value(value: str, kind: Any, name: str) -> Any:
    """Parse a variable's text by the key's type: texts as they are, all else as TOML."""
    base = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    if base is str or (typing.get_origin(base) is typing.Literal):
        return value
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if set(parsed) != {"value"}:
        raise ConfigError(f"{name}: its text is not a value as TOML writes it")  # the text may be a secret
    return parsed["value"]


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a worker, without the variables of the configuration, which may hold secrets, and
    without the name of the file to which OpenSSL would write the keys of sessions.
    """
    dropped = (ENVIRONMENT_PREFIX, "SSLKEYLOGFILE")
    return {name: value for name, value in environment.items() if not name.startswith(dropped)}
