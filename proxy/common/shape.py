"""Conversion of a TOML tree to a configuration's types, with errors in an operator's words.

msgspec knows whether a tree fits, but says so in the words of its own types, and knows nothing of what was meant.
"""

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.common.errors import ConfigError
from proxy.common.suggestions import closest_name, did_you_mean, quote_name

_WORDS = {
    "int": "an integer",
    "float": "a number with a fraction",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
    "date": "a date",
    "datetime": "a date and time",
    "time": "a time",
}
WORD_CHARACTERS_MAX = 20
"""What is longer is not quoted: it is no misspelt word."""

_EXPECTED = re.compile(r"Expected `(\w+)`, got `(\w+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_BOUND = re.compile(r"Expected `(int|str|array)` (of length )?(>=|<=) (\d+)")
_PATTERN = re.compile(r"Expected `str` matching regex (.+)")


def convert(tree: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
    """Make the typed configuration of a tree. Raises ConfigError, which names the key and quotes no value but one that
    should have been one of a few words.
    """
    _check_names(tree, kind, "", kind)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".").replace("[...]", ".*")
        raise ConfigError(f"{key or 'the configuration'}: {_in_words(message, key)}") from None
    except RecursionError:
        raise ConfigError("the configuration: is nested too deep") from None


def fields_of(kind: Any) -> dict[str, Any]:
    """Collect the keys of a table with the types of their values; none for what is not a table."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)} if is_table(kind) else {}


def without_none(kind: Any) -> Any:
    """Strip a key's type of None, which says that the key may be absent, and of a bound of a list."""
    if typing.get_origin(kind) is typing.Annotated and is_list(typing.get_args(kind)[0]):
        return typing.get_args(kind)[0]
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return next(arm for arm in typing.get_args(kind) if arm is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    """Return True if a type is a list of entries."""
    return typing.get_origin(kind) is tuple


def is_table(kind: Any) -> bool:
    """Return True if a type is a table with keys of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def unknown_key(key: str, path: str, kind: Any, whole: Any) -> str:
    """Say of a key that a table does not have which one was meant, or which there are."""
    known = fields_of(kind)
    if not known:
        return "there is no such key: what it stands in has none"
    elsewhere = [found for found, name in _all_keys(whole, "") if name == key and found != f"{path}{key}"]
    if closest_name(key, known) is None and elsewhere:
        return f"there is no such key here; did you mean {' or '.join(elsewhere[:3])}?"
    return f"there is no such key{did_you_mean(key, known) or '; there are: ' + ', '.join(known)}"


def _all_keys(kind: Any, path: str) -> Iterator[tuple[str, str]]:
    """All keys below a table: where each stands, and its last part."""
    for name, below in fields_of(kind).items():
        yield f"{path}{name}", name
        value = without_none(below)
        entry = typing.get_args(value)[0] if is_list(value) else value
        yield from _all_keys(entry, f"{path}{name}{'[]' if is_list(value) else ''}.")


def _check_names(node: Any, kind: Any, path: str, whole: Any) -> None:
    """Refuse the first key, or word in place of a value, that does not exist. Raises ConfigError."""
    kind = without_none(kind)
    if typing.get_origin(kind) is typing.Literal:
        _check_word(node, typing.get_args(kind), path)
    elif is_list(kind) and isinstance(node, list):
        for index, entry in enumerate(node):
            _check_names(entry, typing.get_args(kind)[0], f"{path}[{index}]", whole)
    elif is_table(kind) and isinstance(node, dict):
        known = fields_of(kind)
        before = f"{path}." if path else ""
        for key, value in node.items():
            if key not in known:
                raise ConfigError(f"{before}{_key(key)}: {unknown_key(key, before, kind, whole)}")
            _check_names(value, known[key], f"{before}{key}", whole)


def _key(key: str) -> str:
    """Return a key as TOML writes it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else quote_name(key)


def _check_word(value: Any, words: tuple[str, ...], path: str) -> None:
    if value in words:
        return
    listed = ", ".join(f'"{word}"' for word in words)
    if not isinstance(value, str) or len(value) > WORD_CHARACTERS_MAX:  # a secret at the wrong key, perhaps
        raise ConfigError(f"{path}: must be one of {listed}")
    raise ConfigError(f"{path}: must be one of {listed}, and is {quote_name(value)}{did_you_mean(value, words)}")


def _in_words(message: str, key: str) -> str:
    """Translate msgspec's messages; one that is not known stays as it is."""
    if match := _MISSING.fullmatch(message):
        return f"{match[1]} is missing"
    if match := _EXPECTED.fullmatch(message):
        wanted, found = (_WORDS.get(word, word) for word in match.groups())
        hint = f"; write [[{key}]] for each" if match.groups() == ("array", "object") else ""
        return f"must be {wanted}, and is {found}{hint}"
    if match := _BOUND.fullmatch(message):
        return _bound(match)
    if match := _PATTERN.fullmatch(message):
        return f"must match the regular expression {match[1]}"
    return message


def _bound(match: re.Match[str]) -> str:
    kind, length, relation, number = match.groups()
    if length and (relation, number) == (">=", "1"):
        return "must not be empty"
    limit = f"at {'least' if relation == '>=' else 'most'} {number}"
    unit = {"str": " characters", "array": " entries"}.get(kind, "") if length else ""
    return f"must have {limit}{unit}" if length else f"must be {limit}"
