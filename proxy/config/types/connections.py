"""Tables of an established connection: its session's lifetime, its relay, and bounds on what clients can cause."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import MIB, PULSAR_FRAME_BYTES_MAX, NonEmpty, NonNegative, Positive, Strict


class Session(Strict, frozen=True):
    """Lifetime of a client's authentication (KIP-368). A session ends with the client's credential, or earlier. Before
    that the proxy asks the client for fresh credentials. A client that uses its connection after the end is closed with
    an error; an idle client stays connected.

    connections_max_reauth_ms: a client must re-authenticate within this time; 0: only its credential's own end counts.
        For credentials that never end, such as certificates here, only this setting ends sessions
    methods_max_reauth_ms: the same for single authentication methods, in place of it: `{ token = 3600000 }`
    enforcement: treatment of a client that uses its connection after the end, or fails to re-authenticate. `enforce`:
        it is closed. `observe`: it is counted (`pulsar_proxy_expired_connections_observed_total`) and logged, once for
        each lifetime of its session, and continues; clients are asked for fresh credentials all the same. `observe`
        shows what `enforce` would close: expired credentials stay valid as long as a connection lasts. A reload changes
        it for existing connections, too
    relay_reauthentication: clients that are asked within a relay. `by_client_kind`: all that declare support, but
        clients built on the C++ library (Python's and Node's, too) only as long as they have no producer on the
        connection, since these write the answer into the middle of a large message: their session ends when it is used
        past its end, after which they reconnect with fresh credentials. `always`: all that declare support. `never`:
        none; their sessions end in that way. Brokers that check forwarded credentials of clients ask and end relays
        instead, unless a maximum applies
    grace_ms: a relay over which the broker still sends anything but PING and PONG this long after the session's end is
        closed, though its client does not use it: otherwise a consumer that took many permits before would be served
        for ever. 0: at once. An idle connection stays open
    """

    connections_max_reauth_ms: NonNegative = 0
    methods_max_reauth_ms: dict[NonEmpty, NonNegative] = {}
    enforcement: Literal["enforce", "observe"] = "enforce"
    relay_reauthentication: Literal["by_client_kind", "always", "never"] = "by_client_kind"
    grace_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 60_000


class Relay(Strict, frozen=True):
    """Connections that have become a relay between a client and a broker.

    crash_safe: whether the supervisor keeps a copy of each relay's sockets, so that the relays of a forwarder that
        terminates or is replaced continue in its successor; without it they end with their forwarder
    kernel_tls: whether relays with TLS 1.3 are moved into the kernel, which then encrypts: they cost less and continue
        in a forwarder's successor, as those without TLS do. Only relays of which the proxy inspects no frames; all
        others stay in user space. `auto`: where the kernel can (`modprobe tls` on the machine); `required`: without it
        the proxy does not start; `off`: none
    keep_alive_idle_ms: time without a byte after which the kernel probes a peer (TCP_KEEPIDLE; whole seconds, here and
        below)
    keep_alive_probe_interval_ms: time between two such probes (TCP_KEEPINTVL)
    keep_alive_probes: number of probes without an answer after which the connection is closed (TCP_KEEPCNT)
    half_close_timeout_ms: once one side has ended its direction, the other may continue as long as bytes move at least
        this often
    user_timeout_ms: a connection is closed once its peer has not acknowledged or not read sent data for this time
        (TCP_USER_TIMEOUT); 0: only the kernel's own, much longer bounds apply
    """

    crash_safe: bool = True
    kernel_tls: Literal["off", "auto", "required"] = "off"
    keep_alive_idle_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 60_000
    keep_alive_probe_interval_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 10_000
    keep_alive_probes: Annotated[int, Meta(ge=1, le=127)] = 6
    half_close_timeout_ms: Positive = 60_000
    user_timeout_ms: NonNegative = 120_000


class Limits(Strict, frozen=True):
    """Bounds on the resources that clients can make the cluster use. In a container with a memory limit (cgroup), the
    bounds on memory that are not set here are lower than their default if less fits (docs/installation.md).

    max_connections: clients' connections in the whole cluster; each forwarder accepts an equal part of them. Where all
        are taken, a client gets in if its principal (without one, its IP address) has fewer than the one with most,
        which loses the connection that came last; an eighth of a forwarder's part is never taken from one. Not set: at
        most the default, and as many as fit into the container's memory
    max_connections_per_address: clients' connections from one IP address (for IPv6, one /64 network) to the whole
        cluster; 0: no limit
    max_unauthenticated_connections: connections whose client has not authenticated yet (without authentication: has not
        received `Connected` yet), TLS handshakes included, in the whole cluster; half of them from one address. Above
        it the proxy closes the connection that has been silent for longest, of the address with most of them; if none
        is silent, new connections wait for a second, and then get an error upon which clients retry. 0: a quarter of
        `max_connections`, less if memory is short: each may hold `max_command_bytes`
    max_concurrent_lookups: lookup requests that a lookup worker processes at a time; requests above it get
        `TooManyRequests`
    max_concurrent_lookups_per_connection: the same for one client's connection
    max_topic_lists_bytes: memory for answers that may be large (all topics of a namespace, schemas), in each forwarder
        and in each lookup worker. A request under way counts `max_broker_frame_bytes`; its answer, once received,
        counts its size until its client has read it. Requests beyond the bound wait, in turn by principal or, without
        one, by IP address. Not set: at most the default, and as much as fits into the container's memory
    max_lookup_bytes: memory for all other lookup requests under way, in each forwarder and in each lookup worker, and,
        in a forwarder, for unfinished frames and for answers that clients do not read. Half of it is first come, first
        served; of the rest each principal (without one, each IP address) gets at most an equal share. Requests above it
        get `TooManyRequests`. Not set: as above
    max_bytes_per_second_per_principal: bytes that the relays of one principal (without one, of one IP address) move in
        a second to brokers, and as many to clients, in the whole cluster; each forwarder lets pass an equal part of
        them, so a single connection gets no more than that part. What is not used can be used later, up to a second's.
        Above it the principal's relays wait, in turn, and their senders with them; nothing is lost or closed. A reload
        changes it for existing connections, too. 0: no limit
    principal_limits_dry_run: whether `max_bytes_per_second_per_principal` only counts what it would do
        (`pulsar_proxy_paced_pauses_total`), and lets all pass
    handshake_timeout_ms: longest time from accepting a client to Connected
    lookup_timeout_ms: longest time for one lookup request, redirects included
    keep_alive_interval_ms: the proxy sends a PING to a client in lookup mode that is silent for this time, and closes
        it if it sends nothing within the same time again
    max_command_bytes: largest frame that a client may send before it is relayed; a relay has no such limit
    max_broker_frame_bytes: largest frame with which a broker may answer a lookup; in a handshake 256 KiB at most
    max_connection_age_ms: a client's connection is ended gently at this age, counted from when it was accepted, so that
        clients move to new instances; 10 % more or less by connection, so that connections of the same age do not end
        together. Relays are then inspected frame by frame, which costs CPU. A change applies to new connections. 0: no
        maximum age
    drain_timeout_ms: time over which a drain spreads the ends of relays; the relays that remain after it are closed
    """

    max_connections: Positive = 10_000
    max_connections_per_address: NonNegative = 0
    max_unauthenticated_connections: NonNegative = 0
    max_concurrent_lookups: Positive = 50_000
    max_concurrent_lookups_per_connection: Positive = 5_000
    max_topic_lists_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    max_lookup_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    max_bytes_per_second_per_principal: NonNegative = 0
    principal_limits_dry_run: bool = False
    handshake_timeout_ms: Positive = 10_000
    lookup_timeout_ms: Positive = 10_000
    keep_alive_interval_ms: Positive = 30_000
    max_command_bytes: Annotated[int, Meta(ge=1024, le=16 * MIB)] = 128 * 1024
    max_broker_frame_bytes: Annotated[int, Meta(ge=1024, le=128 * MIB)] = PULSAR_FRAME_BYTES_MAX
    max_connection_age_ms: NonNegative = 0
    drain_timeout_ms: NonNegative = 30_000


class Quota(Strict, frozen=True):
    """Limits on single principals, tenants or addresses; one table `[[quota]]` for each, none by default
    (docs/security.md). Of each limit the first table counts that sets it and matches the client, of those `by`
    principal, by tenant and by address each; tables with `dry_run` before it are counted beside it. All limits are the
    cluster's, of which each process enforces an equal part.

    burst_ms: how much of a rate may come at once: the number of this time, at least one in each process
    by: whose limits they are. `principal`: each principal's, and without one (or with `anonymous_role`) each IP
        address's (of IPv6 each /64), checked once a client has authenticated. `tenant`: those of `tenant`. `address`:
        all clients of each IP address together, checked before anything is read from them; not behind a load
        balancer that does not announce addresses (`proxy_protocol`)
    dry_run: whether the limits are only counted (`pulsar_proxy_quota_refusals_total`, with `dry_run="true"`) and logged
    lookups_per_second: requests of lookup mode; those above it get `TooManyRequests`. 0: no limit, as below
    max_connections: connections at a time; a client above it gets an error upon which clients retry. Not by address:
        see `limits.max_connections_per_address`
    new_connections_per_second: connections that are let in, a second; a client above it gets an error upon which
        clients retry
    principals: roles to which the table applies; `*` at the end stands for any rest. Empty: to all clients. With
        `tenant`: the roles that count together as the tenant for connections
    tenant: tenant of the topics and namespaces whose lookups count, of all clients; `*`: each tenant by itself
    """

    burst_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 5_000
    by: Literal["principal", "tenant", "address"] = "principal"
    dry_run: bool = False
    lookups_per_second: NonNegative = 0
    max_connections: NonNegative = 0
    new_connections_per_second: NonNegative = 0
    principals: Annotated[tuple[NonEmpty, ...], Meta(max_length=1024)] = ()
    tenant: str = ""
