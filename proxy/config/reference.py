"""Write docs/configuration.md from the configuration's types: ``python -m proxy.config.reference``.

The types' docstrings are the text, so a key cannot be without a description and a description not without its key.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.config.types import Config, Strict

_PREFACE = """# Configuration

<!-- Made from proxy/config/types by `make generate`; do not edit. -->

One TOML file, given as `--config`. `pulsar-trio-proxy check --config FILE` reports whether it is valid and, if not,
which key is wrong. Every key has a default; an unknown key is an error.

Every key can be overridden from the environment: `PULSAR_TRIO_PROXY__` and the key's path in capitals, with two
underscores between its parts. Lists are written as in TOML, and entries of a list of tables are numbered from 0:

```
PULSAR_TRIO_PROXY__BROKERS__SERVICE_URL=pulsar://broker-0:6650,broker-1:6650
PULSAR_TRIO_PROXY__BROKERS__ALLOWED_PORTS=[6650, 6651]
PULSAR_TRIO_PROXY__LISTENER__0__BIND=0.0.0.0:6650
```

SIGHUP or `pulsar-trio-proxy reload` applies changes, key files included, to connections from then on; a changed file is
also applied without a command (`[reload]`). `[cluster]`, `admin.bind`, the sets of listeners, their use of TLS and
their routing need an upgrade (`pulsar-trio-proxy upgrade`, which interrupts no relay); `cluster.runtime_dir`, fewer
`cluster.forwarders`, `relay.crash_safe` and a new address that overlaps an old one need a restart. A reload that would
change these is refused and names them.
"""


def reference() -> str:
    """Return the whole document."""
    parts = [_PREFACE]
    for field in msgspec.structs.fields(Config):
        parts.extend(_sections(field.name, field.type))
    return "\n".join(parts)


def _sections(path: str, kind: Any) -> Iterator[str]:
    """Return the section of a table and of the tables in it."""
    table, repeated = _table_of(kind)
    if table is None:
        return
    text, descriptions = _documentation(table)
    yield f"## `[[{path}]]`\n" if repeated else f"## `[{path}]`\n"
    yield f"{text}\n"
    rows = []
    inner: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(table):
        if _table_of(field.type)[0] is not None:
            inner.append((f"{path}.{field.name}", field.type))
        rows.append(_row(field, descriptions[field.name]))
    yield "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for inner_path, inner_kind in inner:
        yield from _sections(inner_path, inner_kind)


def _row(field: msgspec.structs.FieldInfo, description: str) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    default = "required" if field.required else f"`{_toml(value)}`"
    if field.default is None:
        default = "absent"
    return f"| `{field.name}` | {_type_text(field.type)} | {default} | {description} |"


def _documentation(table: type[Strict]) -> tuple[str, dict[str, str]]:
    """Return a table's text and the description of each key. Raises ValueError for a key without one."""
    text, _, keys = inspect.cleandoc(table.__doc__ or "").partition("\n\n")
    entries = re.split(r"^(?=\w+: )", keys, flags=re.MULTILINE)
    pairs = (" ".join(entry.split()).partition(": ") for entry in entries if entry.strip())
    descriptions = {name: description.replace("|", "\\|") for name, _, description in pairs}
    fields = {field.name for field in msgspec.structs.fields(table)}
    if fields != set(descriptions):
        raise ValueError(f"{table.__name__}: described and declared keys differ: {fields ^ set(descriptions)}")
    return " ".join(text.split()), descriptions


def _table_of(kind: Any) -> tuple[type[Strict] | None, bool]:
    """Return the table that a key holds (None: it holds a value), and whether it may hold several."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        kind = next(arm for arm in typing.get_args(kind) if arm is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        return _table_of(typing.get_args(kind)[0])[0], True
    return (kind, False) if isinstance(kind, type) and issubclass(kind, Strict) else (None, False)


def _type_text(kind: Any) -> str:
    table, repeated = _table_of(kind)
    if table is not None:
        return "tables" if repeated else "table"
    if typing.get_origin(kind) is dict:
        values = typing.get_args(kind)[1]
        return "tables of any keys" if values == dict[str, Any] else f"table of any keys, each {_type_text(values)}"
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_text(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Annotated:
        base, meta = typing.get_args(kind)
        return _bounded(_type_text(base), meta)
    return {bool: "boolean", int: "integer", str: "text"}[kind]


def _bounded(text: str, meta: msgspec.Meta) -> str:
    if meta.ge is not None and meta.le is not None and meta.le < 2**31 - 1:
        return f"{text}, {meta.ge} to {meta.le}"
    if meta.ge is not None:
        return f"{text}, at least {meta.ge}"
    if meta.min_length is not None and meta.min_length == meta.max_length:
        return f"{text} ({meta.max_length} of them)"
    if meta.max_length is not None:
        return f"{text}, at most {meta.max_length}{'' if text.startswith('list') else ' characters'}"
    return text


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    return str(value)


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 -- its purpose
