"""The files of the command ``import``: those that it reads, those that it writes, and what ``check`` says of them."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import trio

from proxy.commands.check import check_objects, suppress_logs
from proxy.commands.java_import.properties import apply_environment, parse_properties, parse_variables, read_file
from proxy.common.errors import ConfigError
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


def write_result(secrets: Mapping[str, bytes], directory: Path | None, text: str, output: Path | None) -> None:
    """Write the secrets, with mode 0600, and the configuration; no file is overwritten. Raises ConfigError."""
    targets = [directory / name for name in secrets] if directory else []
    for path in [*targets, *([output] if output else [])]:
        if os.path.lexists(path):
            raise ConfigError(f"{path}: is there already, and is not overwritten; nothing was written")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"{output}: its folder is not there; nothing was written")
    try:
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, content in secrets.items():
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
