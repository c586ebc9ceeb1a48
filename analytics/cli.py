"""The command `pulsar-proxy-analytics`. Subcommands are imported when they are called: `receive` needs no Spark."""

from __future__ import annotations

import importlib

import click

from proxy.common.suggestions import did_you_mean

COMMANDS = {
    "receive": (
        "analytics.receiver.command:receive",
        "Receive samples from Prometheus (remote write) and store them durably.",
    ),
    "pipeline": (
        "analytics.commands.pipeline:pipeline",
        "From the spool to bills by one command: all of the jobs below.",
    ),
    "ingest": ("analytics.commands.sources:ingest", "Bring what the receiver stored into the tables."),
    "backfill": ("analytics.commands.sources:backfill", "Bring what a Prometheus server stores into the tables."),
    "rollup": ("analytics.commands.sums:rollup", "Sum samples up to minutes, hours and days."),
    "usage": ("analytics.commands.sums:usage", "Bytes, messages and sessions of each principal, by hour and day."),
    "compact": ("analytics.commands.upkeep:compact", "Make few large files of many small ones."),
    "expire": ("analytics.commands.upkeep:expire", "Delete what is older than its retention."),
    "report": ("analytics.commands.sums:report", "Write the statement of a period: use, costs, what is unusual."),
}
"""Name → module and function of the command, and its text in `--help`, which needs no import."""


class _Lazy(click.Group):
    """Group of commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises click.ClickException if a package is missing: proxies are installed without."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            raise click.ClickException(
                f"the package {package} is missing: pip install 'pulsar-trio-proxy[analytics]'"
            ) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for one that does not exist, name the one that was probably meant."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            meant = did_you_mean(args[0], COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
            ctx.fail(f"no such command: {args[0][:60]}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Lazy)
def main() -> None:
    """From Prometheus to Spark rollups: receive, ingest, roll up, account, report."""


if __name__ == "__main__":
    main()
