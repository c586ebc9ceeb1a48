"""Reading of a configuration file, with errors in an operator's words."""

import codecs
import tomllib
from pathlib import Path
from typing import Any

from proxy.common.errors import ConfigError
from proxy.common.files import read_bounded_file

FILE_BYTES_MAX = 16 * 1024 * 1024
"""A longer file is no configuration."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, which names it."""
    text = _text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        raise ConfigError(
            f"{path}: is not TOML that a configuration could be: a number or a nesting without end"
        ) from None


def _text(path: Path) -> str:
    """Read a configuration file. Raises ConfigError."""
    data = read_bounded_file(path, FILE_BYTES_MAX, "a configuration")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}: is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")  # editors of Windows put a mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: is not UTF-8: byte 0x{data[error.start]:02x} in line {line}") from None
