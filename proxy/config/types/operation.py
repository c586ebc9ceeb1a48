"""Tables of running the cluster: processes, shutdown, reload, admin port, metrics, log."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import NonEmpty, Strict, Workers


class Cluster(Strict, frozen=True):
    """The cluster of processes as a whole.

    name: value of the label `cluster` of every metric, for example Pulsar's own name for the cluster behind the proxy
    runtime_dir: folder of the Unix sockets, made with mode 0700; at most 80 bytes long, and used by this cluster alone.
        Refused where it is a link or another user's, where others can write in it, and where every user can write in
        its parent (without the sticky bit, and unless the parent is the root of a volume)
    forwarders: number of forwarders; 0: one for each CPU that this process may use and that the CPU quota of its
        container (cgroup) allows, rounded up, and no more than fit into half of the container's memory
    lookup_workers: number of lookup workers
    auth_workers: number of auth workers
    http_workers: number of HTTP workers, if there is an `[[http_listener]]`; otherwise there are none
    """

    name: NonEmpty = "pulsar"
    runtime_dir: NonEmpty = "/run/pulsar-trio-proxy"
    forwarders: Annotated[int, Meta(ge=0, le=256)] = 0
    lookup_workers: Workers = 1
    auth_workers: Workers = 1
    http_workers: Workers = 1


class Shutdown(Strict, frozen=True):
    """The end of the cluster upon SIGTERM, SIGINT or `drain`. It takes `delay_ms`, then up to
    `limits.drain_timeout_ms`, then 10 s at most.

    delay_ms: time during which `/readyz` reports that the cluster is not ready while it still accepts clients, since
        load balancers and Kubernetes' endpoints need seconds to remove an instance. 0: it stops accepting clients at
        once
    """

    delay_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0


class Reload(Strict, frozen=True):
    """Changes that are applied without a command.

    watch_interval_ms: time between two checks of the configuration file. A change that is the same at two checks is
        applied as by `reload`; one that cannot be applied changes nothing, and is tried again later. 0: only `reload`
        and SIGHUP apply changes
    """

    watch_interval_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 5_000


class Admin(Strict, frozen=True):
    """The HTTP port for operators: a page at `/`, and `/metrics`, `/healthz`, `/readyz` (`/status.html`), `/status`.

    bind: `address:port`; keep it away from clients
    token_file: a file with the token that `/metrics`, `/status` and `/events` (the page's data) require
        (`Authorization: Bearer …`); read again when it changes. Empty: they require none. `/healthz`, `/readyz` and
        `/status.html` never do
    allowed_hosts: patterns (`*`, `?`) of host names by which the port may be asked, beside IP addresses, `localhost`
        and the host of `bind`. Requests with another `Host` get 421: a page in an operator's browser could otherwise
        give its own name the port's address, and read the port (DNS rebinding). `*`: any name
    """

    bind: NonEmpty = "127.0.0.1:8080"
    token_file: str = ""
    allowed_hosts: tuple[NonEmpty, ...] = ()


class Metrics(Strict, frozen=True):
    """Metrics beside those that are always counted.

    count_messages: whether `pulsar_proxy_principal_messages` is counted; for this the beginning of every relayed
        message is inspected. Towards brokers a batch counts as the number of messages that its producer declares;
        towards clients as one, since brokers deliver whole batches without the number of their messages
    principals_max: number of principals whose use each forwarder counts by name; as many again, up to 1000 in all, from
        addresses or proxies that have less than a share. Where all places are taken, a new principal gets that of one
        that is idle, else it is counted in `other`
    principal_idle_ms: time without a relay, all of it after a scrape of its last use, from which on a principal is
        idle. Longer than the interval of any scrape, so that nothing is lost: its counters end, they are not added to
        `other`
    """

    count_messages: bool = False
    principals_max: Annotated[int, Meta(ge=0, le=1000)] = 100
    principal_idle_ms: Annotated[int, Meta(ge=1000, le=2**31 - 1)] = 600_000


class Audit(Strict, frozen=True):
    """Audit events, one a line: who connected, from where, by which method, to what, and why it ended or was refused.
    They are not in the log, and have no level. Off unless `events` names some.

    events: which are written. `connections`: each client's connection that has ended or was refused.
        `openings`: each one that is served from now on, before anything is known but its address and its listener.
        `authentications`: each success, failure and refresh. `http`: each request at an `[[http_listener]]`
    output: `stdout`, `file`, or `journald`: entries of systemd's journal with a field `PULSAR_PROXY_…` for each of an
        event's
    file: the absolute path of the file of `output = "file"`, to which lines are added (mode 0640, no link). To rotate
        it, rename it and reload (`reload`, SIGHUP): that opens a new one
    format: `json` or `logfmt`; not of `journald`
    roles: how principals and proxies before this one are written. `plain`: as they are. `hashed`: by a keyed hash
        (HMAC-SHA-256, see `role_key_file`). `redacted`: not at all
    role_key_file: a file with the key of `hashed`, at least 16 bytes. Empty: SHA-256 without a key, by which anyone
        can check a guess of a role
    """

    events: tuple[Literal["connections", "openings", "authentications", "http"], ...] = ()
    output: Literal["stdout", "file", "journald"] = "stdout"
    file: str = ""
    format: Literal["json", "logfmt"] = "json"
    roles: Literal["plain", "hashed", "redacted"] = "plain"
    role_key_file: str = ""


class Log(Strict, frozen=True):
    """Output to standard error.

    level: the lowest level that is written
    format: `logfmt` (key=value) or `json`, one entry for each line
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"
