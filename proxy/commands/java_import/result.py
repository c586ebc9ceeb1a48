"""The result of an import: this proxy's keys with where they came from, what is lost, what needs nothing; as TOML."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.commands.java_import.java import Lost, Needless
from proxy.common.suggestions import quote_name

SECRETS_DIRECTORY = "/etc/pulsar-trio-proxy/secrets"
"""Where secrets are expected where no directory is named."""
TABLES = {
    "cluster": "[cluster]",
    "plain listener": "[[listener]]",
    "TLS listener": "[[listener]]",
    "listener.tls": "[listener.tls]",
    "plain http_listener": "[[http_listener]]",
    "TLS http_listener": "[[http_listener]]",
    "http_listener.tls": "[http_listener.tls]",
    "brokers": "[brokers]",
    "brokers.tls": "[brokers.tls]",
    "brokers.credentials": "[brokers.credentials]",
    "http": "[http]",
    "authentication": "[authentication]",
    "authentication.token": "[authentication.token]",
    "authentication.tls": "[authentication.tls]",
    "authentication.basic": "[authentication.basic]",
    "authentication.sasl": "[authentication.sasl]",
    "authentication.oidc": "[authentication.oidc]",
    "authentication.oidc.kubernetes": "[authentication.oidc.kubernetes]",
    "session": "[session]",
    "limits": "[limits]",
    "admin": "[admin]",
}
"""Tables in the order in which they are written. A listener's tables follow it: `listener.tls` is that of the last."""
_WIDTH = 118
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass
class Entry:
    """One line of TOML; without a key, only its table. ``value`` None: a line that remains to be written."""

    key: str
    value: Any
    comment: str
    names: tuple[str, ...] = ()


@dataclass
class Result:
    """What an import has made so far. Keys of Java's are named, values are not: they may be secrets.

    given: keys that the file has; comments tell them from Java's defaults
    handled: keys that need no conversion of their own any more
    named: keys that are in the result's text, with what became of them
    """

    secrets_directory: Path | None = None
    given: frozenset[str] = frozenset()
    tables: dict[str, list[Entry]] = field(default_factory=dict)
    secrets: dict[str, bytes] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    needless: list[tuple[str, str]] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)

    def put(self, target: str, value: Any, *names: str, comment: str = "") -> None:
        """Set one of this proxy's keys, `table.key`, from keys of Java's. What set it before stays."""
        table, _, key = target.rpartition(".")
        self.handled.update(names)
        self.named.update(names)
        if any(entry.key == key for entry in self.tables.get(table, ())):
            for name in names:
                self.skip(name, f"another key of Java's has set {target}")
            return
        sources = ", ".join(name if name in self.given else f"{name} (Java's default)" for name in names)
        text = f"{sources}: {comment}" if sources and comment else sources or comment
        self.tables.setdefault(table, []).append(Entry(key, value, text, names))

    def put_converted(self, target: str, value: Any, name: str, comment: str = "") -> None:
        """Set one of this proxy's keys to what a converter returned, or record why not."""
        if isinstance(value, Lost):
            self.lose(name, value.reason)
        elif isinstance(value, Needless):
            self.skip(name, value.reason)
        else:
            self.put(target, value, name, comment=comment)

    def require_table(self, table: str) -> None:
        """Write a table also where nothing is set in it."""
        self.tables.setdefault(table, [])

    def lose(self, name: str, reason: str) -> None:
        """Record a key that is not carried over."""
        self.handled.add(name)
        self.named.add(name)
        if (name, reason) not in self.lost:  # two listeners may have the same files
            self.lost.append((name, reason))

    def skip(self, name: str, reason: str) -> None:
        """Record a key that needs nothing here."""
        self.handled.add(name)
        self.named.add(name)
        if (name, reason) not in self.needless:
            self.needless.append((name, reason))

    def note(self, name: str, reason: str) -> None:
        """Record a difference that an operator must know of."""
        self.notes.append((name, reason))

    def secret(self, name: str, file: str, content: bytes, what: str) -> str:
        """Put a secret of a key into a file of the secrets directory, or record that it must be put there by hand;
        return the file's path.
        """
        if self.secrets_directory is not None:
            self.secrets[file] = content
            return str(self.secrets_directory.absolute() / file)
        path = f"{SECRETS_DIRECTORY}/{file}"
        self.lose(name, f"put {what} into {path} with mode 0600 (or give --secrets-directory): secrets are not copied")
        return path

    def to_toml(self, source: str) -> str:
        """Return the configuration as TOML, with comments on its origin."""
        lines = list(_comment(f"Made by `pulsar-trio-proxy import` from {quote_name(source)}."))
        for table, header in TABLES.items():
            if table in self.tables:
                lines += ["", header]
                for entry in self.tables[table]:
                    lines += _comment(entry.comment) if entry.comment else ()
                    lines.append(_line(entry))
        for title, entries in (
            ("Not carried over:", self.lost),
            ("Different from Java's proxy:", self.notes),
            ("Needs nothing here:", self.needless),
        ):
            if entries:
                lines += ["", f"# {title}", *_listed(entries)]
        return "\n".join(lines) + "\n"


def _line(entry: Entry) -> str:
    if entry.value is None:
        return f"# {entry.key} = …"
    return f"{entry.key} = {toml_value(entry.value)}"


def toml_value(value: object) -> str:
    """Return a text, a number, a boolean, a list or a table as TOML writes it, on one line."""
    if isinstance(value, dict):
        keys = {key: key if _BARE_KEY.match(key) else printable_json(key) for key in value}
        return f"{{ {', '.join(f'{keys[key]} = {toml_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return printable_json(value)


def printable_json(value: object) -> str:
    """Return JSON whose characters are printable, with escapes that TOML and YAML have, too."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _listed(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, reason in entries:
        first, *rest = textwrap.wrap(f"{name}: {reason}", _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        yield f"# * {first}"
        yield from (f"#   {line}" for line in rest)
