"""Rules for CONNECT: checks of the client's, the CONNECT for the broker, and CONNECTED (PIP-1, steps 1 and 3)."""

import re
from dataclasses import dataclass, field

from proto.commands import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, auth_method_of
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError

AUTHENTICATION_FAILED = "Failed to authenticate"
"""The only text for a denied client: any detail would help an attacker who guesses credentials."""

NO_PROXY_VERSION = "Must not provide proxyVersion"

INVALID_ROLES_TEXT = "Invalid roles."
"""Error text of brokers and of this proxy for a role and an original principal that do not match."""

INVALID_ROLES = "invalid_roles"
"""Denial reason: the client's role and its original principal do not match."""

NOT_A_PROXY = "not_a_proxy"
"""Denial reason: the client claims to be a proxy, but its role is none of a proxy."""

LOST_EXCHANGE = "unknown_round"
"""Denial reason: the auth worker does not know the exchange of this round, or does no longer, as after a restart."""

OVERLOADED = "overloaded"
"""Denial reason: the auth worker has reached its limit of concurrent work."""

_NOT_THE_CLIENTS_FAULT = frozenset({LOST_EXCHANGE, OVERLOADED, "issuer_unavailable", "timeout", "bad_keytab"})

AUTHENTICATION_UNAVAILABLE = "The proxy cannot authenticate clients at the moment"

SELF_ANSWERING_PROXY_PREFIX = "pulsar-trio-proxy-"
"""Prefix of the ``proxy_version`` of proxies that answer AUTH_CHALLENGE in a relay themselves.

They put the answer between two frames of their client, so they may be challenged whichever client is behind them.
"""

PROXIES_MAX = 4
"""Proxies that a connection may have passed before this one: more are a circle (``brokers.service_url``)."""

_HOPS = re.compile(r";hops=([0-9]{1,9})$")
"""End of the ``proxy_version`` of a proxy that has others before it: how many a connection has passed with it."""

KEPT_FIELD_BYTES_MAX = 1024
"""Size limit of each CONNECT field that the proxy keeps for as long as the connection lasts."""

LOOKUP_MODE_FLAGS = ("supports_get_partitioned_metadata_without_auto_creation",)
"""The feature flags that lookup mode serves, by sending the request on to a broker that has them.

The others need what a lookup connection has not: messages of a producer or consumer (broker entry metadata, partial
producers, deduplication of replication), or a stream of updates from one broker (topic watchers, scalable topics,
transaction coordinators). Clients ask for these within relays, whose CONNECTED is the broker's own. The flag for
authentication that is renewed is a client's; no client reads it in CONNECTED.
"""

_KEPT = ("auth_method_name", "original_principal", "original_auth_method", "proxy_version")

_PROVED_BY_CONNECTION = frozenset({"tls"})
"""Methods whose data a broker ignores: it would take the proxy's own certificate for the client's."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error for the client: Pulsar's code and a text."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """Identity in a CONNECT to the broker: the proxy's own credentials, and the client's role as original principal.

    ``proxies``: how many the connection has passed, this one included.
    """

    method: str = ""
    data: bytes = field(default=b"", repr=False)
    original_principal: str = ""
    original: "OriginalCredentials | None" = None
    proxies: int = 1


@dataclass(frozen=True, slots=True)
class OriginalCredentials:
    """A client's own credentials, for brokers that check them (``forward_authorization_credentials``)."""

    method: str
    data: str = field(repr=False)


def is_client_fault(reason: str) -> bool:
    """Return whether a denial is the client's fault. If not, the client should connect again."""
    return reason not in _NOT_THE_CLIENTS_FAULT


def refusal_for_denial(reason: str) -> Refusal:
    """Return the error that a client receives for a denial: no more details than brokers give."""
    if reason == INVALID_ROLES:
        return Refusal(ServerError.AuthorizationError, INVALID_ROLES_TEXT)
    if reason == NOT_A_PROXY:
        return Refusal(ServerError.NotAllowedError, NO_PROXY_VERSION)
    if not is_client_fault(reason):
        return Refusal(ServerError.ServiceNotReady, AUTHENTICATION_UNAVAILABLE)
    return Refusal(ServerError.AuthenticationError, AUTHENTICATION_FAILED)


def check_connect(command: BaseCommand, *, proxies_allowed: bool) -> Refusal | None:
    """Return what is wrong with a CONNECT before any authentication, or None.

    ``proxies_allowed``: clients may be proxies; the auth worker then checks whether this one may.
    """
    connect = command.connect
    too_long = next((name for name in _KEPT if len(getattr(connect, name).encode()) > KEPT_FIELD_BYTES_MAX), None)
    if too_long is not None:
        return Refusal(ServerError.NotAllowedError, f"{too_long} is longer than {KEPT_FIELD_BYTES_MAX} bytes")
    if connect.protocol_version < PROTOCOL_VERSION_MIN:
        return Refusal(
            ServerError.UnsupportedVersionError,
            f"The proxy needs protocol version {PROTOCOL_VERSION_MIN} or newer; "
            f"the client speaks {connect.protocol_version}",
        )
    # The broker decides by this field whether its peer is a proxy: a client must not choose it.
    if connect.HasField("proxy_version") and not proxies_allowed:
        return Refusal(ServerError.NotAllowedError, NO_PROXY_VERSION)
    if (proxies := count_proxies(connect)) > PROXIES_MAX:
        text = f"The connection has passed {proxies} proxies; {PROXIES_MAX} may be before this one"
        return Refusal(ServerError.NotAllowedError, f"{text}: does brokers.service_url lead back to the first?")
    return None


def count_proxies(connect: CommandConnect) -> int:
    """Return how many proxies a connection has passed, as they say; those of another kind count as one together."""
    if not connect.HasField("proxy_version"):
        return 0
    found = _HOPS.search(connect.proxy_version)
    return int(found[1]) if found else 1


def wants_broker(connect: CommandConnect) -> bool:
    """Return whether a client wants a relay to a broker.

    An empty ``proxy_to_broker_url`` means any broker (Pulsar 5, apache/pulsar#25879), a missing one lookup mode.
    """
    return connect.HasField("proxy_to_broker_url")


def original_credentials(connect: CommandConnect, *, from_proxy: bool) -> OriginalCredentials | None:
    """Return the credentials of a CONNECT that can be forwarded, or None; a proxy's are those that it forwards itself.

    Not for mechanisms of several rounds: their first data proves nothing to another party (apache/pulsar#19291).
    """
    if from_proxy:
        method, data = str(connect.original_auth_method), str(connect.original_auth_data)
    else:
        method = auth_method_of(connect)
        try:
            data = connect.auth_data.decode()
        except UnicodeDecodeError:  # the field that would carry it holds text
            return None
    return OriginalCredentials(method, data) if data and method not in _PROVED_BY_CONNECTION else None


def broker_connect(
    client: CommandConnect,
    identity: BrokerIdentity,
    proxy_version: str,
    *,
    through_proxy: bool = False,
    answers_challenges: bool | None = None,
) -> CommandConnect:
    """Build the CONNECT for a relay's broker: the client's own, with the proxy's identity in place of the client's.

    ``through_proxy``: the receiver is another proxy, which must know the target. ``answers_challenges``: the proxy
    answers when the broker asks for fresh credentials; None: the broker challenges the client.

    Version, feature flags and unknown fields are the client's, since the relay carries the client's frames unchanged.
    Identity fields of the client are dropped.
    """
    message = CommandConnect()
    message.CopyFrom(client)
    for name in (
        "auth_method",
        "auth_method_name",
        "auth_data",
        "proxy_to_broker_url",
        "original_principal",
        "original_auth_data",
        "original_auth_method",
    ):
        message.ClearField(name)
    if through_proxy:
        message.proxy_to_broker_url = client.proxy_to_broker_url
    if answers_challenges is not None:
        message.feature_flags.supports_auth_refresh = answers_challenges
    if answers_challenges:
        proxy_version = f"{SELF_ANSWERING_PROXY_PREFIX}{proxy_version}"
    return _add_identity(message, identity, proxy_version)


def connect_without_credentials(connect: CommandConnect) -> CommandConnect:
    """Build the part of a CONNECT that a later authentication of its client needs: no credentials, bounded lengths."""
    kept = CommandConnect(protocol_version=connect.protocol_version)
    for name in (*_KEPT, "auth_method"):
        if connect.HasField(name):
            setattr(kept, name, getattr(connect, name))
    return kept


def proxy_connect(identity: BrokerIdentity, proxy_version: str) -> CommandConnect:
    """Build the CONNECT for a connection of the proxy's own: lookups for one principal, or a probe."""
    message = CommandConnect(
        client_version=f"pulsar-trio-proxy-{proxy_version}",
        protocol_version=PROTOCOL_VERSION,
        feature_flags={"supports_auth_refresh": True},
    )
    return _add_identity(message, identity, proxy_version)


def _add_identity(message: CommandConnect, identity: BrokerIdentity, proxy_version: str) -> CommandConnect:
    if identity.method:
        message.auth_method_name = identity.method
        message.auth_data = identity.data
    if identity.original_principal:
        message.original_principal = identity.original_principal
    if identity.original is not None:
        message.original_auth_method = identity.original.method
        message.original_auth_data = identity.original.data
    message.proxy_version = proxy_version if identity.proxies == 1 else f"{proxy_version};hops={identity.proxies}"
    return message


def lookup_mode_connected(
    client: CommandConnect, broker: CommandConnected | None, server_version: str
) -> CommandConnected:
    """Build the CONNECTED for a client in lookup mode.

    ``broker`` is the last CONNECTED of a broker of this cluster, or None before the first one; then all of
    LOOKUP_MODE_FLAGS are set, as Pulsar's own proxy does. No field or flag of the broker's that is newer than this
    proxy goes out: a client would use what it promises on this connection, which ends at the proxy.
    """
    message = CommandConnected(server_version=server_version)
    if broker is None:
        message.protocol_version = PROTOCOL_VERSION
    else:
        message.protocol_version = broker.protocol_version
        if broker.HasField("max_message_size"):
            message.max_message_size = broker.max_message_size
    for flag in LOOKUP_MODE_FLAGS:
        setattr(message.feature_flags, flag, broker is None or getattr(broker.feature_flags, flag))
    message.protocol_version = min(client.protocol_version, message.protocol_version)
    return message
