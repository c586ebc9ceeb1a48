"""The manual pages of the commands, made of what `--help` says: `python -m local.man_page NAME`, in `.venv`.

One page has all of a command's subcommands. It names the version and no date, so that equal source gives equal pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click  # which is in `.venv` alone: `make` reads PAGES without it

PAGES = {name: Path(f"deploy/man/{name}.1") for name in ("pulsar-trio-proxy", "pulsar-proxy-analytics")}

_STATUS = (
    ("0", "It is done."),
    ("1", "It has failed; standard error has the reason."),
    ("2", "The command line is wrong."),
)


def page(command: click.Group, name: str, version: str) -> str:
    """Return the page of a command with subcommands, as roff for man(7)."""
    context = command.make_context(name, [], resilient_parsing=True)
    (other,) = PAGES.keys() - {name}
    lines = [
        '.\\" Made by `make generate`: do not edit.',
        f'.TH {name.upper()} 1 "" "pulsar-trio-proxy {version}"',
        ".SH NAME",
        f"{name} \\- {_text(_help(command)[0].rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(name)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH COMMANDS",
    ]
    for subcommand in command.list_commands(context):
        found = command.get_command(context, subcommand)
        assert found is not None
        lines += _subcommand(found, found.make_context(subcommand, [], context, resilient_parsing=True))
    lines.append(".SH EXIT STATUS")
    for status, meaning in _STATUS:
        lines += [".TP", f".B {status}", meaning]
    lines += [".SH SEE ALSO", f".BR {_text(other)} (1)"]
    return "\n".join(lines) + "\n"


def _subcommand(command: click.Command, context: click.Context) -> list[str]:
    """Return a section with the usage, the description and the options of a subcommand."""
    lines = [f".SS {_text(' '.join([str(context.info_name), *command.collect_usage_pieces(context)]))}"]
    for number, paragraph in enumerate(_help(command)):
        lines += [".PP"] * (number > 0) + [_text(paragraph)]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and parameter.param_type_name == "option" and "--help" not in parameter.opts:
            lines += [".TP", f".B {_text(record[0])}", _text(record[1]) or "\\&"]
    return lines


def _help(command: click.Command) -> list[str]:
    """Return the paragraphs of a command's help, each in one line."""
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", command.help or "")]


def _text(text: str) -> str:
    """Return a line of text with nothing in it that roff would take for its own, and `code` in bold."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = re.sub(r"[^\x20-\x7e]", lambda found: f"\\[u{ord(found[0]):04X}]", escaped)
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", re.sub(r"^(?=[.'])", r"\\&", escaped))


def main() -> None:
    """Print the page of the command that the argument names."""
    from analytics.cli import main as analytics
    from proxy import __version__
    from proxy.cli import main as proxy

    (name,) = sys.argv[1:]
    print(page(dict(zip(PAGES, (proxy, analytics), strict=True))[name], name, __version__), end="")


if __name__ == "__main__":
    main()
