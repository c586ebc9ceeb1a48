"""The conversion of all keys that a Java proxy's configuration has."""

from collections.abc import Mapping
from pathlib import Path

from proxy.commands.java_import.groups import convert_groups
from proxy.commands.java_import.java import Java
from proxy.commands.java_import.keys import KEYS, Key, defaults, find_key
from proxy.commands.java_import.result import Result
from proxy.common.suggestions import did_you_mean, quote_name


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
