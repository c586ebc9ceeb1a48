"""Tables of running the cluster: processes, shutdown, reload, admin port, metrics, log."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import NonEmpty, Strict, Workers


class Cluster(Strict, frozen=True):
    """The cluster of processes as a whole.

    name: value of the label `cluster` of every metric; Pulsar's own name for the cluster behind the proxy fits well
    runtime_dir: folder of the Unix sockets, made with mode 0700; at most 80 bytes long, and of this cluster alone
    forwarders: forwarding worker processes; 0 means one for each CPU that this process may use and that the CPU quota
        of its container (cgroup) has room for, rounded up, and no more than have room in half of the container's memory
    lookup_workers: lookup worker processes
    auth_workers: auth worker processes
    """

    name: NonEmpty = "pulsar"
    runtime_dir: NonEmpty = "/run/pulsar-trio-proxy"
    forwarders: Annotated[int, Meta(ge=0, le=256)] = 0
    lookup_workers: Workers = 1
    auth_workers: Workers = 1


class Shutdown(Strict, frozen=True):
    """How the cluster ends upon SIGTERM, SIGINT or `drain`. It takes `delay_ms`, then up to `limits.drain_timeout_ms`,
    then 10 s at most.

    delay_ms: for so long it only says that it is not ready (`/readyz`) and still accepts clients, since load balancers
        and Kubernetes' endpoints need seconds to forget an instance. 0: it accepts no more clients at once
    """

    delay_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0


class Reload(Strict, frozen=True):
    """Which changes are taken over without being asked to.

    watch_interval_ms: how often the configuration file is looked at. A change that was the same at two looks is taken
        over as `reload` would; one that cannot be changes nothing, and is tried again later. 0: only `reload` and
        SIGHUP count
    """

    watch_interval_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 5_000


class Admin(Strict, frozen=True):
    """The HTTP port for operators: `/metrics`, `/healthz`, `/readyz` (and `/status.html`), `/status`.

    bind: `address:port`; keep it away from clients
    token_file: a file with the token that `/metrics` and `/status` ask for (`Authorization: Bearer …`); read again when
        it changes. Empty: they ask for none. `/healthz`, `/readyz` and `/status.html` never do
    """

    bind: NonEmpty = "127.0.0.1:8080"
    token_file: str = ""


class Metrics(Strict, frozen=True):
    """What is counted beside what is always counted.

    count_messages: whether `pulsar_proxy_principal_messages` is counted, for which the beginning of every relayed
        message is looked at. Towards brokers a batch counts as the messages that its producer says are in it; towards
        clients as one, since brokers give out whole batches and do not say how many messages are in one
    principals_max: principals whose use each forwarder counts by name, in the order in which they come; all others are
        counted together as `other`
    """

    count_messages: bool = False
    principals_max: Annotated[int, Meta(ge=0, le=1000)] = 100


class Log(Strict, frozen=True):
    """What is written to standard error.

    level: the least serious entries that are written
    format: `logfmt` (key=value) or `json`, one entry a line
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"
