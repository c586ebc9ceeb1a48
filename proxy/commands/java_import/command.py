"""The command ``import``: from the files to the result."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import trio

from proxy.commands.check import check_objects, suppress_logs
from proxy.commands.java_import.groups import convert_groups
from proxy.commands.java_import.java import Java
from proxy.commands.java_import.keys import KEYS, Key, defaults, find_key
from proxy.commands.java_import.properties import apply_environment, parse_properties, parse_variables, read_file
from proxy.commands.java_import.result import Result
from proxy.common.errors import ConfigError
from proxy.common.suggestions import did_you_mean, quote_name
from proxy.config.load import load_config

CURRENT_ENVIRONMENT = "current"


def read_java(path: Path, environment: str | None) -> dict[str, str]:
    """Read a proxy.conf, with the environment of a file (``current``: of this process) over it. Raises ConfigError."""
    data = read_file(path)
    try:
        values = parse_properties(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if environment is None:
        return values
    if environment == CURRENT_ENVIRONMENT:
        return apply_environment(values, data, os.environ)
    return apply_environment(values, data, parse_variables(read_file(Path(environment))))


def import_values(values: Mapping[str, str], release: str, secrets_directory: Path | None = None) -> Result:
    """Turn a Java proxy's keys into this proxy's. ``release``: whose defaults count, ``4`` or ``5``."""
    java = Java(values, defaults(release))
    result = Result(secrets_directory, frozenset(name for name in values if java.given(name)))
    convert_groups(java, result)
    for name in values:
        key = find_key(name)
        if key is None:
            result.lose(quote_name(name), f"is no key of Java's proxy{did_you_mean(name, KEYS)}")
        elif name not in result.named:
            _convert_key(java, name, key, result)
    return result


def _convert_key(java: Java, name: str, key: Key, result: Result) -> None:
    """Convert a key that no group has named."""
    shown = name if name in KEYS else quote_name(name)
    if name in KEYS and java.is_default(name):
        return
    if missing := java.missing(key.needs):
        result.skip(shown, missing)
    elif key.convert is not None and name not in result.handled:
        (target,) = key.targets
        result.put_converted(target, key.convert(java.get(name)), name)
    elif key.lost or key.targets:
        result.lose(shown, key.reason or f"its value is not understood; see {key.targets[0]}")
    elif key.reason:
        result.skip(shown, key.reason)


def write_result(result: Result, text: str, output: Path | None) -> None:
    """Write the secrets, with mode 0600, and the configuration; no file is overwritten. Raises ConfigError."""
    directory = result.secrets_directory
    targets = [directory / name for name in result.secrets] if directory else []
    for path in [*targets, *([output] if output else [])]:
        if os.path.lexists(path):
            raise ConfigError(f"{path}: is there already, and is not overwritten; nothing was written")
    try:
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, content in result.secrets.items():
                _write_new(directory / name, content, 0o600)
        if output is not None:
            _write_new(output, text.encode(), 0o644)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None


def _write_new(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def problem_of(text: str) -> str:
    """Return what ``check`` has against a configuration; empty where it is in order."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_text(text, encoding="utf-8")
        try:
            with suppress_logs():
                trio.run(check_objects, load_config(Path(file.name), {}))
        except ConfigError as error:
            return str(error)
    return ""
