"""The command line: the cluster itself, what operators ask of a running one, and tools for its configuration."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import click
import msgspec
import trio
from google.protobuf.message import Message

from proto.rpc_pb2 import ConnectionFilter, Empty, LogLevelRequest, Method, ReloadRequest, Text, UnreadyRequest
from proxy import __version__
from proxy.commands.asking import ask_while
from proxy.common.connection_kinds import KINDS
from proxy.common.errors import ConfigError
from proxy.common.logs import LEVELS
from proxy.common.suggestions import did_you_mean
from proxy.config.load import load_config, load_plan, load_unchecked
from proxy.config.memory import MemoryPlan
from proxy.config.types import Config
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcCallRefused, RpcDeadlineExceeded, RpcError
from proxy.status_text import log_level_lines, status_text
from proxy.supervisor.cluster.log_levels import LOGGING_ROLES
from proxy.supervisor.main import run_supervisor
from proxy.supervisor.operators.ancestry import NotSupervisor, supervisor_connector
from proxy.supervisor.operators.control import control_path
from proxy.supervisor.operators.log_levels import CONFIGURED

if TYPE_CHECKING:
    from proxy.commands.connect import Finding
    from proxy.commands.connections import Row

PROGRAM = "pulsar-trio-proxy"
CALL_TIMEOUT_S = 40.0
CHANGE_TIMEOUT_S = 180.0
"""Of a reload or upgrade, which may wait for a trial under way at brokers that do not answer, before its own."""
UPGRADE_TIMEOUT_S = 300.0
UPGRADE_POLL_S = 0.2
UPGRADE_FAILED_STARTS = 3
"""Starts of one worker after an upgrade that may fail before the command says so."""

_NOTHING = Empty()

LoadedT = TypeVar("LoadedT")

_config_option = click.option(
    "--config", "config_file", required=True, type=click.Path(path_type=Path), help="The configuration, a TOML file."
)


class _Duration(click.ParamType[int]):
    """A time as 30s, 10m or 2h; the value is in milliseconds."""

    name = "duration"
    _UNIT_MS: ClassVar[dict[str, int]] = {"s": 1000, "m": 60_000, "h": 3_600_000}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return milliseconds, or end with an error."""
        text = str(value)
        digits, unit = text[:-1], text[-1:]
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX and unit in self._UNIT_MS):
            self.fail(f"{text[:60]!r} is no time as 30s, 10m or 2h", param, ctx)
        if not int(digits):
            self.fail("it has to be longer", param, ctx)
        return int(digits) * self._UNIT_MS[unit]


_DIGITS_MAX = 7


class _Commands(click.Group):
    """Commands that know what was meant, and that end without a traceback where an operator or the system ends them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for one that does not exist, name the one that was probably meant."""
        name = args[0]
        # A shell that asks for completions parses with resilience: it wants nothing, not an error.
        if not (name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name)):
            commands = self.list_commands(ctx)
            meant = did_you_mean(name, commands) or f"; there are: {', '.join(commands)}"
            ctx.fail(f"no such command: {name[:60]}{meant}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C is no defect, wherever in Trio it arrives, nor is a full disk behind the output."""
        try:
            return super().invoke(ctx)
        except BaseExceptionGroup as group:
            if group.split(KeyboardInterrupt)[1] is not None:
                raise
            raise click.Abort from None
        except OSError as error:
            if error.errno not in _OUTPUT_LOST:
                raise
            _fail(f"the output cannot be written: {error.strerror}")


_OUTPUT_LOST = frozenset({errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT})


@click.group(cls=_Commands, help="A stateless, multi-process proxy cluster for Apache Pulsar.")
@click.version_option(__version__, prog_name=PROGRAM)
def main() -> None:
    """Run the command line."""


@main.command()
@_config_option
@click.option("--legacy", "handover_fd", type=int, hidden=True, help="Given by an upgrade: descriptor of the handover.")
def serve(config_file: Path, handover_fd: int | None) -> None:
    """Run the cluster in the foreground. SIGTERM drains, SIGHUP reloads."""
    run_supervisor(_load(config_file, load_plan), config_file, handover_fd, _fail)


@main.command()
@_config_option
@click.option("--connect", is_flag=True, help="Also log in at each broker with the proxy's own credentials, and leave.")
@click.option(
    "--any-broker", is_flag=True, help="Also log in at brokers until one accepts the proxy, as a reload does."
)
def check(config_file: Path, connect: bool, any_broker: bool) -> None:  # noqa: FBT001 -- click's manner
    """Validate the configuration and the files that it names, and say what is wrong with them."""
    plan = _load(config_file, load_plan)
    try:
        findings = trio.run(_check, plan, connect, any_broker)
    except ConfigError as error:
        _fail(str(error))
    click.echo(f"{config_file}: in order")
    click.echo("container: " + ", ".join(f"{key}={value}" for key, value in plan.summary().items()))
    if connect and not _print_findings(findings):
        _fail("not every broker can be used; see above")


async def _check(plan: MemoryPlan, connect: bool, any_broker: bool) -> list["Finding"]:  # noqa: FBT001 -- from trio.run
    """Prove the configuration, its memory and, if asked to, the brokers. Raises ConfigError."""
    from proxy.commands.broker_trial import try_brokers
    from proxy.commands.check import check_objects, find_warnings, suppress_logs
    from proxy.commands.connect import check_brokers

    with suppress_logs():
        credentials, methods = await check_objects(plan.config)
        for warning in await find_warnings(plan.config, credentials, methods):
            click.echo(f"pulsar-trio-proxy: warning: {warning}", err=True)
        plan.require()
        if any_broker:
            trial = await try_brokers(plan.config)
            if not trial.accepted:
                raise ConfigError(f"no broker accepts the proxy: {trial.reason}")
        return await check_brokers(plan.config, credentials, methods) if connect else []


def _print_findings(findings: list["Finding"]) -> bool:
    """Print the findings; return True if all are good."""
    from proxy.commands.connect import NOT_SHOWN

    for finding in findings:
        click.echo(f"{'ok    ' if finding.good else 'FAILED'}  {finding.text}")
    click.echo(NOT_SHOWN)
    return all(finding.good for finding in findings)


@main.command()
@_config_option
@click.option("--json", "as_json", is_flag=True, help="The same as /status gives.")
def status(config_file: Path, as_json: bool) -> None:  # noqa: FBT001 -- click's manner
    """Show how a running cluster is."""
    text = _ask(_load(config_file, load_unchecked), Method.CLUSTER_STATUS)
    click.echo(text if as_json else status_text(msgspec.json.decode(text)))


def _with_filter(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options by which connections are named, and give a command their filter as ``wanted``.

    A connection is meant where all match that are given.
    """

    @wraps(command)
    def with_wanted(
        principal: str | None, network: str | None, broker: str | None, kinds: tuple[str, ...], **others: object
    ) -> None:
        from proxy.commands.connections import FilterRefused, filter_of

        try:
            wanted = filter_of(principal, network, broker, kinds)
        except FilterRefused as refused:
            _fail(str(refused))
        command(wanted=wanted, **others)

    for option in (
        click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="May be given several times."),
        click.option("--broker", help="HOST, or HOST:PORT."),
        click.option("--address", "network", help="The client's IP address, or a network in CIDR form."),
        click.option("--principal", help="The client's role; empty: clients without one."),
    ):
        with_wanted = option(with_wanted)
    return with_wanted


def _control_path(config_file: Path) -> str:
    """Return the path of a running cluster's control.sock; its configuration may be invalid by now."""
    return control_path(_load(config_file, load_unchecked).cluster.runtime_dir)


@main.command()
@_config_option
@_with_filter
@click.option("--sort", type=click.Choice(["bytes", "age", "rate"]), help="The largest first; rate: since it began.")
@click.option("--limit", type=click.IntRange(min=1), help="Show only so many.")
@click.option("--json", "as_json", is_flag=True)
def connections(
    config_file: Path,
    wanted: ConnectionFilter,
    sort: str | None,
    limit: int | None,
    as_json: bool,  # noqa: FBT001 -- click's manner
) -> None:
    """List the clients' connections of a running cluster."""
    from proxy.commands.connections import json_text, pick, table_text

    rows, failures = _rows_at(_control_path(config_file), wanted)
    rows = pick(rows, sort, limit)
    click.echo(json_text(rows) if as_json else table_text(rows))
    _fail_for(failures)


@main.command()
@_config_option
@_with_filter
@click.option("--dry-run", is_flag=True, help="Show which would be ended, and end none.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def disconnect(
    config_file: Path,
    wanted: ConnectionFilter,
    dry_run: bool,  # noqa: FBT001 -- click's manner
    yes: bool,  # noqa: FBT001
) -> None:
    """End clients' connections of a running cluster, gently; clients may come back."""
    from proxy.commands.connections import summary_text, table_text

    if wanted == ConnectionFilter():
        _fail("name the connections: --principal, --address, --broker or --kind")
    path = _control_path(config_file)
    until_unix_ms = int(time.time() * 1000)
    if dry_run or not yes:
        rows, failures = _rows_at(path, wanted, until_unix_ms=until_unix_ms)
        click.echo(table_text(rows) if rows else "none")
        if dry_run or not rows:
            _fail_for(failures)
            return
        click.confirm(f"End {summary_text(rows)}?", abort=True)
    rows, failures = _rows_at(path, wanted, until_unix_ms=until_unix_ms, ends=True)
    if rows:
        click.echo(table_text(rows))
    click.echo(f"ended {summary_text(rows)}")
    _fail_for(failures)


@main.command()
@_config_option
@_with_filter
@click.option("--by", type=click.Choice(["connection", "principal"]), default="connection", help="What a line is of.")
def top(config_file: Path, wanted: ConnectionFilter, by: str) -> None:
    """Watch the bytes a second of a running cluster's connections; `q` ends it."""
    from proxy.commands.top import run_top

    if not (_is_terminal() and sys.stdout.isatty()):
        _fail("top needs a terminal; `connections --json` is for programs")
    path = _control_path(config_file)
    _run_at(path, partial(run_top, path, wanted, by_principal=by == "principal"))


def _rows_at(
    path: str, wanted: ConnectionFilter, *, until_unix_ms: int = 0, ends: bool = False
) -> tuple[list["Row"], list[str]]:
    from proxy.commands.connections import collect

    return _run_at(path, partial(collect, path, wanted, until_unix_ms=until_unix_ms, ends=ends))


def _fail_for(failures: list[str]) -> None:
    """End with an error if some forwarders could not be asked."""
    if failures:
        _fail("not all forwarders could be asked: " + "; ".join(failures))


@main.command()
@_config_option
@click.option("--force", is_flag=True, help="Even if no broker accepts the proxy with a changed [brokers].")
def reload(config_file: Path, force: bool) -> None:  # noqa: FBT001 -- click's manner
    """Make a running cluster take over its changed configuration and key files."""
    _ask(_load(config_file, load_config), Method.CLUSTER_RELOAD, ReloadRequest(force=force))
    click.echo("reloaded")


@main.command()
@_config_option
@click.argument("level", required=False, type=click.Choice([*LEVELS, CONFIGURED]))
@click.option("--for", "for_ms", type=_Duration(), help="After this time (30s, 10m, 2h) the configured level is back.")
@click.option("--role", type=click.Choice([role.value for role in LOGGING_ROLES]), help="Only of these processes.")
def log_level(config_file: Path, level: str | None, for_ms: int | None, role: str | None) -> None:
    """Set the level of a running cluster's logs in all its processes, without a reload; or show it.

    `configured` brings the configured level back.
    """
    if for_ms is not None and level in {None, CONFIGURED}:
        _fail("--for needs one of: " + ", ".join(LEVELS))
    request = LogLevelRequest(level=level or "", for_ms=for_ms or 0, role=role or "")
    told = msgspec.json.decode(_ask(_load(config_file, load_unchecked), Method.CLUSTER_LOG_LEVEL, request))
    click.echo("\n".join(log_level_lines(told) or [f"{told['configured']}, as configured"]))
    if told["failed"]:
        _fail(f"these did not take it over: {', '.join(told['failed'])}; see the cluster's log")


@main.command()
@_config_option
@click.option("--reason", default="", help="Shown by `status` and /readyz.")
def unready(config_file: Path, reason: str) -> None:
    """Have /readyz say that a running cluster is not ready, until `ready`; nothing else changes."""
    _ask(_load(config_file, load_unchecked), Method.CLUSTER_UNREADY, UnreadyRequest(unready=True, reason=reason))
    click.echo("not ready: load balancers should send no more clients; `ready` ends this")


@main.command()
@_config_option
def ready(config_file: Path) -> None:
    """End what `unready` has begun: /readyz says how the cluster is."""
    _ask(_load(config_file, load_unchecked), Method.CLUSTER_UNREADY, UnreadyRequest())
    click.echo("as ready as it is; see `status`")


@main.command()
@_config_option
def upgrade(config_file: Path) -> None:
    """Replace every process of a running cluster by what is installed now, without a reset; returns when it is done."""
    path = control_path(_load(config_file, load_config).cluster.runtime_dir)
    before = int(_call_cluster_at(path, Method.CLUSTER_UPGRADE))
    click.echo("upgrading")
    try:
        not_running = trio.run(_wait_for_generation, path, before + 1)
    except trio.TooSlowError:
        _fail(f"not done within {UPGRADE_TIMEOUT_S:.0f} s; see the cluster's log, and `status`")
    if not_running:
        _fail(f"upgraded, but these do not run: {', '.join(not_running)}; see the cluster's log")
    click.echo("upgraded")


async def _wait_for_generation(path: str, generation: int) -> list[str]:
    """Return the workers that do not run once a cluster is at least at a generation and all workers are replaced.

    A worker that was killed in the exec, because it did not come to rest, may still be starting then: it counts as not
    running only after it has failed to start UPGRADE_FAILED_STARTS times, or when the time is up.
    """
    first_restarts: dict[str, int] = {}
    not_running: list[str] | None = None
    with trio.move_on_after(UPGRADE_TIMEOUT_S):
        while True:
            await trio.sleep(UPGRADE_POLL_S)
            with contextlib.suppress(RpcError, OSError):  # during the exec, no process answers
                status = msgspec.json.decode(await _call(path, Method.CLUSTER_STATUS))
                if status["generation"] < generation or status["replacing_workers"]:
                    continue
                workers = {f"{one['role']}-{one['worker']}": one for one in status["workers"]}
                not_running = [name for name, one in workers.items() if one["state"] != "running"]
                for name in workers:
                    first_restarts.setdefault(name, workers[name]["restarts"])
                failed = {name: workers[name]["restarts"] - first_restarts[name] for name in not_running}
                if min(failed.values(), default=UPGRADE_FAILED_STARTS) >= UPGRADE_FAILED_STARTS:
                    return not_running
    if not_running is None:
        raise trio.TooSlowError
    return not_running


@main.command()
@_config_option
def drain(config_file: Path) -> None:
    """Let clients leave, then end the cluster; returns when it has ended."""
    config = _load(config_file, load_config)
    _ask(config, Method.CLUSTER_DRAIN)
    click.echo(f"draining, for at most {config.shutdown.delay_ms + config.limits.drain_timeout_ms} ms")
    trio.run(_wait_for_end, control_path(config.cluster.runtime_dir))
    click.echo("ended")


async def _wait_for_end(path: str) -> None:
    """Wait until no process listens at a control socket any more."""
    while True:
        with contextlib.suppress(NotSupervisor):  # it is ending, and has no child left
            if not await _is_listening(path):
                return
        await trio.sleep(0.1)


async def _is_listening(path: str) -> bool:
    """Return whether a supervisor listens at a control socket. Raises NotSupervisor where another process does."""
    try:
        stream = await supervisor_connector(path)()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    await stream.aclose()
    return True


@main.command()
@click.option("--user", required=True, help="The user, who becomes the client's role.")
@click.option("--mechanism", default="SCRAM-SHA-256", type=click.Choice(["SCRAM-SHA-256", "SCRAM-SHA-512"]))
@click.option("--iterations", type=int, help="How much each guess at the password costs, and each connection too.")
def scram_credential(user: str, mechanism: str, iterations: int | None) -> None:
    """Print a user's line for the file of authentication.scram.

    The password is asked for on a terminal, and is otherwise the first line of standard input.
    """
    from auth.providers.scram import ITERATIONS_DEFAULT, credential_line

    wanted = ITERATIONS_DEFAULT if iterations is None else iterations
    try:
        click.echo(credential_line(user, _password(), mechanism, wanted))
    except ValueError as error:
        _fail(str(error))


def _password() -> str:
    if _is_terminal():
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    try:
        return sys.stdin.buffer.readline().decode().rstrip("\r\n")
    except UnicodeDecodeError:
        _fail("the password is not UTF-8")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


@main.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--environment", help="Variables over it, as in Pulsar's image: a file as `env` prints it, or `current`.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the TOML goes; else to standard output.")
@click.option(
    "--secrets-directory", type=click.Path(path_type=Path), help="Write tokens, passwords and keys here, mode 0600."
)
@click.option("--release", default="4", type=click.Choice(["4", "5"]), help="Pulsar's, whose defaults count.")
@click.option("--helm", is_flag=True, help="FILE has values of a chart for it, as JSON; the result is this chart's.")
def import_java(  # noqa: PLR0917 -- click's manner
    file: Path,
    environment: str | None,
    output: Path | None,
    secrets_directory: Path | None,
    release: str,
    helm: bool,  # noqa: FBT001
) -> None:
    """Turn the configuration of Pulsar's Java proxy (proxy.conf) into this proxy's.

    Names on standard error what is not carried over, and then ends with status 1.
    """
    from proxy.commands.java_import.command import problem_of, read_java, write_result
    from proxy.commands.java_import.conversion import import_values
    from proxy.commands.java_import.helm import HelmResult, import_helm
    from proxy.commands.java_import.properties import read_file
    from proxy.commands.java_import.result import Result

    if helm and (environment is not None or secrets_directory is not None):
        _fail("--environment and --secrets-directory are for a proxy.conf")
    result: Result | HelmResult
    try:
        if helm:
            result = import_helm(read_file(file), release)
            text, secrets = result.to_yaml(file.name), {}
        else:
            result = import_values(read_java(file, environment), release, secrets_directory)
            text, secrets = result.to_toml(file.name), result.secrets
        write_result(secrets, secrets_directory, text, output)
    except ConfigError as error:
        _fail(f"{file}: {error}" if helm and str(file) not in str(error) else str(error))
    if output is None:
        click.echo(text, nl=False)
    for kind, entries in (("note", result.notes), ("not carried over", result.lost)):
        for name, reason in entries:
            click.echo(f"pulsar-trio-proxy: {kind}: {name}: {reason}", err=True)
    if not helm and (problem := problem_of(text)):
        _fail(f"`check` refuses the result: {problem}")
    if result.lost:
        sys.exit(1)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which a shell completes this command, for `source`."""
    from click.shell_completion import get_completion_class

    script_class = get_completion_class(shell)
    assert script_class is not None
    click.echo(script_class(main, {}, PROGRAM, f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE").source())


def _load(config_file: Path, load: Callable[[Path, Mapping[str, str]], LoadedT]) -> LoadedT:
    try:
        return load(config_file, os.environ)
    except ConfigError as error:
        _fail(str(error))


def _timeout_s(method: int) -> float:
    return CHANGE_TIMEOUT_S if method in {Method.CLUSTER_RELOAD, Method.CLUSTER_UPGRADE} else CALL_TIMEOUT_S


def _ask(config: Config, method: int, request: Message = _NOTHING) -> str:
    return _call_cluster_at(control_path(config.cluster.runtime_dir), method, request)


def _call_cluster_at(path: str, method: int, request: Message = _NOTHING) -> str:
    return _run_at(path, partial(_call, path, method, request), _timeout_s(method))


def _run_at(path: str, call: Callable[[], Awaitable[LoadedT]], timeout_s: float = CALL_TIMEOUT_S) -> LoadedT:
    """Run what calls the cluster, if one is running; end with an error where it fails."""
    try:
        if not trio.run(_is_listening, path):
            _fail(f"no cluster is running in {os.path.dirname(path)}")  # noqa: PTH120 -- a socket's address is text
        return trio.run(call)
    except RpcCallRefused as refused:
        _fail(refused.reason)
    except RpcDeadlineExceeded:
        _fail(f"the cluster has not answered within {timeout_s:.0f} s; see its log")
    except RpcError:
        _fail("the cluster closed the connection before it answered; its log says whether it ended, or refused it")
    except PermissionError:
        _fail(f"{path}: Permission denied; ask as the user that runs the cluster, or as root")
    except OSError as error:
        _fail(f"{path}: {error.strerror}")


async def _call(path: str, method: int, request: Message = _NOTHING) -> str:
    client = RpcClient(supervisor_connector(path), max_frame_bytes=CONTROL_FRAME_BYTES_MAX)
    call = partial(client.call, method, request, Text, timeout_s=_timeout_s(method))
    return (await ask_while(client.run, call)).text


def _fail(reason: str) -> NoReturn:
    click.echo(f"pulsar-trio-proxy: {reason}", err=True)
    sys.exit(1)
