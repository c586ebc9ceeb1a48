"""The receiver's configuration: a TOML file. Units stand last in a name; an unknown key is an error that names it."""

import re
import tomllib
import typing
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from analytics.remote_write.bounds import CEILING, Bounds
from proxy.common.errors import ConfigError
from proxy.common.suggestions import did_you_mean

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**53)]
NonEmpty = Annotated[str, Meta(min_length=1)]

FILE_BYTES_MAX = 16 * 1024 * 1024
"""What is longer is no configuration."""

KIB, MIB, GIB = 1024, 1024**2, 1024**3
DEFAULT = Bounds()


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all tables have in common."""


class Tls(Strict, frozen=True):
    """TLS towards senders. The files are read again when they change.

    certificate: PEM file with the server's certificate, and behind it those that lead to its root
    key: PEM file with the certificate's private key, without a passphrase
    client_ca: PEM file with the authorities whose clients are let in; empty: clients need no certificate
    minimum_version: the oldest version of TLS that is spoken
    """

    certificate: NonEmpty
    key: NonEmpty
    client_ca: str = ""
    minimum_version: Literal["1.2", "1.3"] = "1.2"


class Listen(Strict, frozen=True):
    """Where senders connect.

    bind: `address:port`; an IPv6 address stands in brackets
    tls: absent: plain HTTP
    """

    bind: NonEmpty = "127.0.0.1:9291"
    tls: Tls | None = None


class Authentication(Strict, frozen=True):
    """Who may write.

    token_files: files with one bearer token a line, any of which lets a sender in; read again when they change.
        Empty: everybody may write who can connect
    """

    token_files: tuple[NonEmpty, ...] = ()


class Limits(Strict, frozen=True):
    """What one sender, and all together, may ask for.

    max_connections: connections at a time; more are closed at once
    max_compressed_bytes: a request's body as it is sent
    max_decompressed_bytes: a request's body when it is decompressed
    max_held_bytes: compressed bodies of all requests that are not answered yet; one address gets half of it at most
    max_series: series in a request
    max_fields: protobuf fields and label references in a request, those of its series, samples and histograms' list
    max_series_fields: fields (labels, samples, exemplars, histograms) of one series
    max_symbols: symbols in a 2.0 request
    max_labels_per_series: labels in a series
    max_label_bytes_per_series: names and values of a series' labels together
    max_label_bytes: labels of all series of a 2.0 request, each reference replaced by its symbol
    max_histograms: native histograms in a request
    max_buckets: buckets of all histograms in a request
    max_buckets_per_histogram: buckets of one histogram; also its spans and its own bounds
    max_samples_per_second: of all senders together; 0: no limit
    max_bytes_per_second: compressed, of all senders together; 0: no limit
    header_timeout_ms: from a connection's or request's first byte to the end of the headers
    body_timeout_ms: from the headers to the end of the body
    decode_timeout_ms: how long a large request waits until it is decoded
    idle_timeout_ms: between two requests of a connection
    write_timeout_ms: until a sender has taken its answer
    drain_timeout_ms: for requests that are there when the receiver is told to end
    """

    max_connections: Positive = 512
    max_compressed_bytes: Positive = 16 * MIB
    max_decompressed_bytes: Annotated[int, Meta(ge=1, le=256 * MIB)] = 32 * MIB
    max_held_bytes: Annotated[int, Meta(ge=1, le=64 * GIB)] = 256 * MIB
    max_series: Annotated[int, Meta(ge=1, le=CEILING.series)] = DEFAULT.series
    max_fields: Annotated[int, Meta(ge=1, le=CEILING.fields)] = DEFAULT.fields
    max_series_fields: Annotated[int, Meta(ge=1, le=CEILING.series_fields)] = DEFAULT.series_fields
    max_symbols: Annotated[int, Meta(ge=1, le=CEILING.symbols)] = DEFAULT.symbols
    max_labels_per_series: Annotated[int, Meta(ge=1, le=CEILING.labels_per_series)] = DEFAULT.labels_per_series
    max_label_bytes_per_series: Annotated[int, Meta(ge=1, le=CEILING.label_bytes_per_series)] = (
        DEFAULT.label_bytes_per_series
    )
    max_label_bytes: Annotated[int, Meta(ge=1, le=CEILING.label_bytes)] = DEFAULT.label_bytes
    max_histograms: Annotated[int, Meta(ge=1, le=CEILING.histograms)] = DEFAULT.histograms
    max_buckets: Annotated[int, Meta(ge=1, le=CEILING.buckets)] = DEFAULT.buckets
    max_buckets_per_histogram: Annotated[int, Meta(ge=1, le=CEILING.buckets_per_histogram)] = (
        DEFAULT.buckets_per_histogram
    )
    max_samples_per_second: NonNegative = 0
    max_bytes_per_second: NonNegative = 0
    header_timeout_ms: Positive = 10_000
    body_timeout_ms: Positive = 30_000
    decode_timeout_ms: Positive = 20_000
    idle_timeout_ms: Positive = 300_000
    write_timeout_ms: Positive = 10_000
    drain_timeout_ms: Positive = 30_000

    def bounds(self) -> Bounds:
        """Gather what bounds the contents of a request."""
        return Bounds(**{field.name: getattr(self, f"max_{field.name}") for field in fields(Bounds)})


class Spool(Strict, frozen=True):
    """Where requests are kept until the ingest job has read them.

    directory: a directory of this receiver's own, on a local disk
    segment_bytes_max: a segment becomes about this large before the next is begun; what is consumed is removed by
        segments
    total_bytes_max: all segments; beyond it senders are told to try again later
    free_bytes_min: what must stay free on the disk; below it senders are told to try again later
    queue_bytes_max, queue_requests_max: what may wait for the disk; beyond it senders are told to try again later
    commit_timeout_ms: how long a request waits for the disk before its sender is told to try again later
    """

    directory: NonEmpty = "/var/lib/pulsar-proxy-analytics/spool"
    segment_bytes_max: Annotated[int, Meta(ge=64 * KIB, le=GIB)] = 64 * MIB
    total_bytes_max: NonNegative = 16 * GIB
    free_bytes_min: NonNegative = 256 * MIB
    queue_bytes_max: Positive = 64 * MIB
    queue_requests_max: Positive = 2_000
    commit_timeout_ms: Positive = 20_000


class Admin(Strict, frozen=True):
    """Where /metrics, /healthz and /readyz are; without TLS or tokens, so keep it inside.

    bind: `address:port`
    """

    bind: NonEmpty = "127.0.0.1:9292"


class Log(Strict, frozen=True):
    """Logs, one entry a line in JSON on standard error.

    level: entries below it are not written
    """

    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(Strict, frozen=True):
    """All of it."""

    listen: Listen = msgspec.field(default_factory=Listen)
    authentication: Authentication = msgspec.field(default_factory=Authentication)
    limits: Limits = msgspec.field(default_factory=Limits)
    spool: Spool = msgspec.field(default_factory=Spool)
    admin: Admin = msgspec.field(default_factory=Admin)
    log: Log = msgspec.field(default_factory=Log)


def load_config(path: Path) -> Config:
    """The configuration in a file; raises ConfigError."""
    try:
        config = msgspec.convert(_tree(path), Config)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        raise ConfigError(f"{key or 'configuration'}: {_in_words(message, key)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None
    address("listen.bind", config.listen.bind)
    address("admin.bind", config.admin.bind)
    if _overlap(config.listen.bind, config.admin.bind):
        raise ConfigError(f"admin.bind: {config.admin.bind} is taken by listen.bind ({config.listen.bind})")
    if config.spool.queue_bytes_max < config.limits.max_compressed_bytes:
        raise ConfigError("spool.queue_bytes_max: is less than limits.max_compressed_bytes")
    if config.limits.max_held_bytes // 2 < config.limits.max_compressed_bytes:
        raise ConfigError("limits.max_held_bytes: is less than twice limits.max_compressed_bytes")
    return config


def address(key: str, bind: str) -> tuple[str, int]:
    """Host and port of a bind; raises ConfigError that names the key."""
    host, colon, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"{key}: {bind} is not address:port")
    return host, int(port)


def _tree(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is longer than {FILE_BYTES_MAX} bytes: is it a configuration?")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # editors of Windows put a mark in front
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        raise ConfigError(f"{path}: is not TOML that a configuration could be") from None


def _in_words(message: str, key: str) -> str:
    """Say which key or word was meant by one that does not exist; other messages stay as they are."""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL)
    word = re.fullmatch(r"Invalid enum value '(.*)'", message, re.DOTALL)
    if unknown is not None:
        return f"there is no key {_meant(unknown[1], typing.get_type_hints(_kind_at(key)))}"
    if word is not None:
        return f"there is no value {_meant(word[1], typing.get_args(_kind_at(key)))}"
    return message


def _meant(found: str, known: Iterable[str]) -> str:
    names = list(known)
    return f"{found[:60]!r} here{did_you_mean(found, names) or '; there are: ' + ', '.join(names)}"


def _kind_at(key: str) -> Any:
    """The type of what stands at a key; of what may be absent, that which may stand there."""
    kind: Any = Config
    for part in key.split(".") if key else ():
        kind = typing.get_type_hints(kind)[part]
        if type(None) in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
    return kind


def _overlap(first: str, second: str) -> bool:
    """Whether both cannot be listened at. Port 0 is any free one."""
    (host, port), (other, other_port) = address("", first), address("", second)
    wildcards = {"0.0.0.0", "::"}  # noqa: S104 -- compared, not bound
    return 0 < port == other_port and (host == other or bool(wildcards & {host, other}))
