"""Tables of an established connection: its session's lifetime, its relay, and bounds on what clients can cause."""

from typing import Annotated, Literal

from msgspec import Meta

from proxy.config.types.base import MIB, PULSAR_FRAME_BYTES_MAX, NonEmpty, NonNegative, Positive, Strict


class Session(Strict, frozen=True):
    """How long a client's authentication lasts (KIP-368). A session ends with the client's credential, or earlier.
    Before that the client is asked for fresh credentials; one that uses its connection after the end is closed with an
    error, one that is idle is left alone.

    connections_max_reauth_ms: a client must authenticate itself again within this time; 0: only its credential's own
        end counts. Credentials that never end, as certificates here, make sessions that end only by this
    methods_max_reauth_ms: the same for single authentication methods, in place of it: `{ token = 3600000 }`
    enforcement: what becomes of a client that uses its connection after the end, or fails to authenticate again.
        `enforce`: it is closed. `observe`: it is counted (`pulsar_proxy_expired_connections_observed_total`) and
        logged, once for each life of its session, and goes on; clients are asked for fresh credentials all the same.
        This is for finding out what `enforce` would close: expired credentials stay good for as long as a connection
        lasts. A reload changes it for connections that are there, too
    relay_reauthentication: which clients are asked within a relay. `by_client_kind`: all that say they can be, but
        clients built on the C++ library (Python's and Node's, too) only as long as they have no producer on the
        connection, since these write the answer into the middle of a large message: their session ends when it is used
        past its end, after which they come back with fresh credentials. `always`: all that say they can be. `never`:
        none; their sessions end in that way. With `brokers.forward_authorization_credentials` it is the brokers who ask
        and end relays, and none of this applies to them
    grace_ms: a relay over which the broker still sends anything but PING and PONG so long after the session's end is
        closed, though its client does not use it: a consumer that took many permits before would be served for ever.
        0: at once. An idle connection is left alone
    """

    connections_max_reauth_ms: NonNegative = 0
    methods_max_reauth_ms: dict[NonEmpty, NonNegative] = {}
    enforcement: Literal["enforce", "observe"] = "enforce"
    relay_reauthentication: Literal["by_client_kind", "always", "never"] = "by_client_kind"
    grace_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 60_000


class Relay(Strict, frozen=True):
    """Connections that have become a relay between a client and a broker.

    crash_safe: whether the supervisor keeps a copy of each relay's sockets, so that a forwarder that dies or is
        replaced leaves its relays to its successor; without it they end with their forwarder
    keep_alive_idle_ms: after this long without a byte the kernel asks a peer whether it is still there (TCP_KEEPIDLE;
        whole seconds, here and below)
    keep_alive_probe_interval_ms: time between two such questions (TCP_KEEPINTVL)
    keep_alive_probes: after so many without an answer the peer is given up (TCP_KEEPCNT)
    half_close_timeout_ms: once one side has ended its direction, the other may go on as long as bytes move at least
        this often
    user_timeout_ms: once a peer has not acknowledged or not taken what was sent to it for this long, its connection is
        given up (TCP_USER_TIMEOUT); 0: only the kernel's own, much longer bounds
    """

    crash_safe: bool = True
    keep_alive_idle_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 60_000
    keep_alive_probe_interval_ms: Annotated[int, Meta(ge=1_000, le=32_767_000)] = 10_000
    keep_alive_probes: Annotated[int, Meta(ge=1, le=127)] = 6
    half_close_timeout_ms: Positive = 60_000
    user_timeout_ms: NonNegative = 120_000


class Limits(Strict, frozen=True):
    """Bounds on what strangers can make the cluster do. In a container with a memory limit (cgroup), those of them that
    are bounds on memory and are not set here are smaller than their default where less fits (docs/installation.md).

    max_connections: clients' connections in the whole cluster; each forwarder takes in an equal part of them. Not set:
        at most the default, and as many as fit into the container's memory
    max_connections_per_address: clients' connections from one IP address (of IPv6, one /64 network) to the whole
        cluster; 0: no limit
    max_unauthenticated_connections: connections whose client has not authenticated yet (without authentication: has not
        been answered `Connected` yet), TLS handshakes included, in the whole cluster; half of them from one address.
        Above it the one that has been silent for longest gives way, of the address with most of them; where none is
        silent, newcomers wait for a second, and then are told to come again. 0: a quarter of `max_connections`, less
        where memory is short: each may hold `max_command_bytes`
    max_concurrent_lookups: lookup requests that a lookup worker works on at a time; above it they are answered
        `TooManyRequests`
    max_concurrent_lookups_per_connection: the same for one client's connection
    max_topic_lists_bytes: memory for answers that may be large (all topics of a namespace, schemas), in each forwarder
        and in each lookup worker. Each under way counts `max_broker_frame_bytes`, once it is there its size, until its
        client has taken it; requests beyond it wait, in turn by principal or, without one, by IP address. Not set: at
        most the default, and as much as fits into the container's memory
    max_lookup_bytes: memory for all other lookup requests under way, in each forwarder and in each lookup worker, and,
        in a forwarder, for what it keeps of unfinished frames and of answers that clients do not take. Half of it is
        first come, first served; of the rest each owner gets at most an equal share (a principal or, without one, an IP
        address); what is above it is answered `TooManyRequests`. Not set: as above
    handshake_timeout_ms: longest time from accepting a client to Connected
    lookup_timeout_ms: longest time for one lookup request, redirects included
    keep_alive_interval_ms: a client in lookup mode that is silent this long is sent a PING, and closed if it says
        nothing within another such time
    max_command_bytes: largest frame that a client may send before it is relayed; a relay has no such limit
    max_broker_frame_bytes: largest frame that a broker may answer a lookup or a handshake with
    max_connection_age_ms: a client's connection is ended gently at this age, counted from when it was accepted, so that
        clients come to new instances; 10 % more or less by connection, so that those that came together do not leave
        together. Relays are then followed frame by frame, which costs CPU. For connections that come from then on.
        0: connections may be of any age
    drain_timeout_ms: over how long a drain spreads the ends of relays; what is left after it is closed
    """

    max_connections: Positive = 10_000
    max_connections_per_address: NonNegative = 0
    max_unauthenticated_connections: NonNegative = 0
    max_concurrent_lookups: Positive = 50_000
    max_concurrent_lookups_per_connection: Positive = 5_000
    max_topic_lists_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    max_lookup_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * MIB
    handshake_timeout_ms: Positive = 10_000
    lookup_timeout_ms: Positive = 10_000
    keep_alive_interval_ms: Positive = 30_000
    max_command_bytes: Annotated[int, Meta(ge=1024, le=16 * MIB)] = 128 * 1024
    max_broker_frame_bytes: Annotated[int, Meta(ge=1024, le=128 * MIB)] = PULSAR_FRAME_BYTES_MAX
    max_connection_age_ms: NonNegative = 0
    drain_timeout_ms: NonNegative = 30_000
