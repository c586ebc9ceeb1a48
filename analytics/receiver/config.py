"""The receiver's configuration, a TOML file. Keys end in their unit; an unknown key is an error that names it."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from analytics.remote_write.bounds import CEILING, Bounds
from proxy.common.errors import ConfigError
from proxy.common.networks import is_loopback
from proxy.common.shape import convert
from proxy.common.toml import read_toml

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**53)]
NonEmpty = Annotated[str, Meta(min_length=1)]

KIB, MIB, GIB = 1024, 1024**2, 1024**3
DEFAULT = Bounds()


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all configuration tables: immutable, keyword-only, no unknown keys."""


class Tls(Table, frozen=True):
    """TLS towards senders. The files are read again when they change.

    certificate: PEM file with the server's certificate, followed by its intermediate certificates
    key: PEM file with the certificate's private key, without a passphrase
    client_ca: PEM file with the authorities whose client certificates are accepted; empty: no client certificate
    minimum_version: the oldest version of TLS to accept
    """

    certificate: NonEmpty
    key: NonEmpty
    client_ca: str = ""
    minimum_version: Literal["1.2", "1.3"] = "1.2"


class Listen(Table, frozen=True):
    """The listener for senders.

    bind: `address:port`; an IPv6 address in brackets
    tls: absent: plain HTTP
    insecure: allow an address that other machines reach without TLS, or without a token or client certificate
    """

    bind: NonEmpty = "127.0.0.1:9291"
    tls: Tls | None = None
    insecure: bool = False


class Authentication(Table, frozen=True):
    """Authentication of senders.

    token_files: files with one bearer token a line; any of them authenticates a sender; read again when they change.
        Empty: every client that can connect may write
    """

    token_files: tuple[NonEmpty, ...] = ()


class Limits(Table, frozen=True):
    """Limits for one request and for all senders together.

    max_connections: concurrent connections; more are closed at once
    max_compressed_bytes: a request's body as it is sent
    max_decompressed_bytes: a request's body when it is decompressed
    max_held_bytes: compressed bodies of all requests without an answer yet; one address gets at most half of it
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
    write_timeout_ms: until a sender has read its response
    drain_timeout_ms: for requests in progress when the receiver shuts down
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
        """Return the bounds on the contents of a request."""
        return Bounds(**{field.name: getattr(self, f"max_{field.name}") for field in fields(Bounds)})


class Spool(Table, frozen=True):
    """The spool: requests on the disk until the ingest job has read them.

    directory: a directory that only this receiver writes to, on a local disk
    segment_bytes_max: approximate size at which the next segment is started; consumed data is removed by segments
    total_bytes_max: size of all segments; beyond it requests get 503 and are retried
    free_bytes_min: bytes that must stay free on the disk; below it requests get 503 and are retried
    queue_bytes_max, queue_requests_max: records that may wait for the disk; beyond it requests get 503 and are retried
    commit_timeout_ms: how long a request waits for the disk before it gets 503
    """

    directory: NonEmpty = "/var/lib/pulsar-proxy-analytics/spool"
    segment_bytes_max: Annotated[int, Meta(ge=64 * KIB, le=GIB)] = 64 * MIB
    total_bytes_max: NonNegative = 16 * GIB
    free_bytes_min: NonNegative = 256 * MIB
    queue_bytes_max: Positive = 64 * MIB
    queue_requests_max: Positive = 2_000
    commit_timeout_ms: Positive = 20_000


class Admin(Table, frozen=True):
    """The operators' listener with /metrics, /healthz and /readyz; without TLS or tokens, so keep it private.

    bind: `address:port`
    """

    bind: NonEmpty = "127.0.0.1:9292"


class Log(Table, frozen=True):
    """Logs: JSON lines on standard error.

    level: entries below it are not written
    """

    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(Table, frozen=True):
    """The whole configuration."""

    listen: Listen = msgspec.field(default_factory=Listen)
    authentication: Authentication = msgspec.field(default_factory=Authentication)
    limits: Limits = msgspec.field(default_factory=Limits)
    spool: Spool = msgspec.field(default_factory=Spool)
    admin: Admin = msgspec.field(default_factory=Admin)
    log: Log = msgspec.field(default_factory=Log)


def load_config(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    config: Config = convert(read_toml(path), Config)
    parse_address("listen.bind", config.listen.bind)
    parse_address("admin.bind", config.admin.bind)
    if _cannot_both_bind(config.listen.bind, config.admin.bind):
        raise ConfigError(f"admin.bind: {config.admin.bind} is taken by listen.bind ({config.listen.bind})")
    _check_security(config)
    if config.spool.queue_bytes_max < config.limits.max_compressed_bytes:
        raise ConfigError("spool.queue_bytes_max: is less than limits.max_compressed_bytes")
    if config.limits.max_held_bytes // 2 < config.limits.max_compressed_bytes:
        raise ConfigError("limits.max_held_bytes: is less than twice limits.max_compressed_bytes")
    return config


def _check_security(config: Config) -> None:
    """Raise ConfigError where others than this machine reach the listener without encryption or authentication."""
    listen = config.listen
    if listen.insecure or is_loopback(parse_address("listen.bind", listen.bind)[0]):
        return
    if listen.tls is None:
        raise ConfigError(
            f"listen.tls: other machines reach {listen.bind}, and a sender's token would cross the network in plain "
            "text; set listen.tls, or listen.insecure = true if the network is yours alone"
        )
    if not config.authentication.token_files and not listen.tls.client_ca:
        raise ConfigError(
            "authentication.token_files: any host of that network could write samples, of which bills are made; "
            "name a file with a token, set listen.tls.client_ca, or listen.insecure = true"
        )


def parse_address(key: str, bind: str) -> tuple[str, int]:
    """Return the host and port of a `bind`. Raises ConfigError, which names `key`."""
    host, colon, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"{key}: {bind} is not address:port")
    return host, int(port)


def _cannot_both_bind(first: str, second: str) -> bool:
    """Return True if one process cannot bind both addresses. Port 0 means any free port."""
    (host, port), (other, other_port) = parse_address("", first), parse_address("", second)
    wildcards = {"0.0.0.0", "::"}  # noqa: S104 -- compared, not bound
    return 0 < port == other_port and (host == other or bool(wildcards & {host, other}))
