"""Reading of Java's properties files, and of the environment as the Pulsar image applies it to them.

As java.util.Properties.load: ISO 8859-1, comments with ``#`` or ``!``, lines that go on after an odd number of
backslashes, keys that end at ``=``, ``:`` or white space, escapes, and the last of several equal keys counts.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from proxy.common.errors import ConfigError
from proxy.common.files import read_bounded_file

FILE_BYTES_MAX = 1024 * 1024
"""A longer file is no proxy.conf."""
ENVIRONMENT_PREFIX = "PULSAR_PREFIX_"

_WHITE = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|u|.|$)", re.DOTALL)
_KEY = re.compile(r"(?:\\.|[^\\=: \t\f])*", re.DOTALL)
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_file(path: Path) -> bytes:
    """Read a file of at most FILE_BYTES_MAX. Raises ConfigError, which names it."""
    return read_bounded_file(path, FILE_BYTES_MAX, "a proxy.conf")


def parse_properties(data: bytes) -> dict[str, str]:
    """Parse the bytes of a properties file. Raises ConfigError, which names the line, and quotes nothing of it."""
    values: dict[str, str] = {}
    for number, line in _logical_lines(data.decode("latin-1")):
        found = _KEY.match(line)
        key = found.group() if found else ""
        separator = _SEPARATOR.match(line, len(key))
        value = line[separator.end() if separator else len(key) :]
        try:
            values[_unescape(key)] = _unescape(value)
        except ValueError:
            raise ConfigError(f"line {number}: \\u without four hexadecimal digits, which Java refuses, too") from None
    return values


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with the number of its first one, without comments and blank lines, continuations joined.

    As in Java, what follows a line that has nothing but a backslash is a new line: it may be a comment.
    """
    joined = ""
    first = 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_WHITE)
        if not joined:
            if not line or line[0] in "#!":
                continue
            first = number
        goes_on = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        joined += line[:-1] if goes_on else line
        if not goes_on and joined:
            yield first, joined
            joined = ""
    if joined:
        yield first, joined


def _unescape(text: str) -> str:
    """Replace the escapes of a key or value. Raises ValueError."""

    def replace(found: re.Match[str]) -> str:
        escape = found[1]
        if escape == "u":
            raise ValueError
        return chr(int(escape[1:], 16)) if len(escape) > 1 else _CONTROL.get(escape, escape)

    units = _ESCAPE.sub(replace, text)  # of UTF-16: two escapes may be one character
    return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse_variables(data: bytes) -> dict[str, str]:
    """Parse a file with the lines of ``env``: a variable in each, as ``NAME=VALUE``; comments with ``#``."""
    lines = (line for line in data.decode(errors="replace").splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value for name, found, value in (line.partition("=") for line in lines) if found}


def apply_environment(values: dict[str, str], data: bytes, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a file with the environment over them, as the image's apply-config-from-env.py does:
    ``PULSAR_PREFIX_<key>`` for any key, the bare name for keys that the file has, also in a comment (``#key=value``).
    Raises ConfigError.
    """
    text = data.decode("latin-1")
    known = {line.strip().partition("=")[0].removeprefix("#") for line in text.splitlines() if "=" in line}
    result = dict(values)
    for name in sorted(environment):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if key and (key in known or key != name):
            line = f"{key}={environment[name].strip()}\n".encode(errors="surrogateescape")
            try:
                result.update(parse_properties(line))
            except ConfigError as error:
                raise ConfigError(f"{name}: {str(error).partition(': ')[2]}") from None
    return result
