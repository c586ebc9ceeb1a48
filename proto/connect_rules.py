"""What a client's CONNECT may say, and what of it goes on to the broker (PIP-1, steps 1 and 3)."""

from dataclasses import dataclass, field

from proto.commands import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, auth_method_of
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError

AUTHENTICATION_FAILED = "Failed to authenticate"
"""All that a client learns of why: anything more would help whoever guesses."""

NO_PROXY_VERSION = "Must not provide proxyVersion"

INVALID_ROLES_TEXT = "Invalid roles."
"""What brokers (and this proxy) say of a role and an original principal that do not go together."""

INVALID_ROLES = "invalid_roles"
"""A denial's reason: the client's role and its original principal do not go together."""

NOT_A_PROXY = "not_a_proxy"
"""A denial's reason: the client says that it is a proxy, which its role is not."""

LOST_EXCHANGE = "unknown_round"
"""A denial's reason: a round of an exchange that the auth worker does not know (any more: it may be another one)."""

OVERLOADED = "overloaded"
"""A denial's reason: more is asked of the auth worker than it does at a time."""

_NOT_THE_CLIENTS_FAULT = frozenset({LOST_EXCHANGE, OVERLOADED, "issuer_unavailable", "timeout", "bad_keytab"})

AUTHENTICATION_UNAVAILABLE = "The proxy cannot authenticate clients at the moment"

SELF_ANSWERING_PROXY_PREFIX = "pulsar-trio-proxy-"
"""How the ``proxy_version`` begins of a proxy that answers AUTH_CHALLENGE in a relay by itself, between two frames of
its client's: it may be asked whatever client is behind it.
"""

KEPT_FIELD_BYTES_MAX = 1024
"""The longest of the fields of a CONNECT that are kept for as long as the connection lasts."""

_KEPT = ("auth_method_name", "original_principal", "original_auth_method", "proxy_version")

_PROVED_BY_CONNECTION = frozenset({"tls"})
"""Methods whose data a broker does not look at: it would take the proxy's own certificate for the client's."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error for the client: Pulsar's code, and a text."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """Whom the broker is told about: the proxy's own credentials, and the client's role behind them."""

    method: str = ""
    data: bytes = field(default=b"", repr=False)
    original_principal: str = ""
    original: "OriginalCredentials | None" = None


@dataclass(frozen=True, slots=True)
class OriginalCredentials:
    """A client's own credentials, for brokers that look at them (``forward_authorization_credentials``)."""

    method: str
    data: str = field(repr=False)


def is_client_fault(reason: str) -> bool:
    """Whether a denial says something about the client: otherwise it should come again."""
    return reason not in _NOT_THE_CLIENTS_FAULT


def refusal_for_denial(reason: str) -> Refusal:
    """What a client is told of a denial: as little as the brokers do."""
    if reason == INVALID_ROLES:
        return Refusal(ServerError.AuthorizationError, INVALID_ROLES_TEXT)
    if reason == NOT_A_PROXY:
        return Refusal(ServerError.NotAllowedError, NO_PROXY_VERSION)
    if not is_client_fault(reason):
        return Refusal(ServerError.ServiceNotReady, AUTHENTICATION_UNAVAILABLE)
    return Refusal(ServerError.AuthenticationError, AUTHENTICATION_FAILED)


def check_connect(command: BaseCommand, *, proxies_allowed: bool) -> Refusal | None:
    """What is wrong with a CONNECT before any authentication, or None.

    ``proxies_allowed``: whether proxies may come, which is then for the auth worker to judge.
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
    # The broker decides by this field whether it talks to a proxy: a client must not choose it.
    if connect.HasField("proxy_version") and not proxies_allowed:
        return Refusal(ServerError.NotAllowedError, NO_PROXY_VERSION)
    return None


def wants_broker(connect: CommandConnect) -> bool:
    """Whether a client wants to be relayed to a broker. An empty ``proxy_to_broker_url`` means any broker (Pulsar 5,
    apache/pulsar#25879), a missing one lookup mode.
    """
    return connect.HasField("proxy_to_broker_url")


def original_credentials(connect: CommandConnect, *, from_proxy: bool) -> OriginalCredentials | None:
    """The credentials of a CONNECT that can be forwarded; a proxy's are those that it forwards itself.

    Not for mechanisms of several rounds: what they say first proves nothing to anybody else (apache/pulsar#19291).
    """
    if from_proxy:
        method, data = str(connect.original_auth_method), str(connect.original_auth_data)
    else:
        method = auth_method_of(connect)
        try:
            data = connect.auth_data.decode()
        except UnicodeDecodeError:  # the field that it would travel in holds text
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
    """The CONNECT for the broker of a relay: the client's own, with the proxy's identity in place of the client's.

    ``through_proxy``: it is for another proxy, which must know the target. ``answers_challenges``: whether the proxy
    answers when the broker asks for fresh credentials; None: it is the client that would be asked.

    Version, feature flags and unknown fields are the client's, since the relay carries the client's frames as they
    are. Whatever the client wrote about identities is dropped.
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
    return _identified(message, identity, proxy_version)


def connect_without_credentials(connect: CommandConnect) -> CommandConnect:
    """What of a CONNECT is needed for a later authentication of its client: no credentials, and nothing else of any
    length.
    """
    kept = CommandConnect(protocol_version=connect.protocol_version)
    for name in (*_KEPT, "auth_method"):
        if connect.HasField(name):
            setattr(kept, name, getattr(connect, name))
    kept.feature_flags.supports_auth_refresh = connect.feature_flags.supports_auth_refresh
    return kept


def proxy_connect(identity: BrokerIdentity, proxy_version: str) -> CommandConnect:
    """The CONNECT for a connection of the proxy's own: lookups for one principal, or a probe."""
    message = CommandConnect(
        client_version=f"pulsar-trio-proxy-{proxy_version}",
        protocol_version=PROTOCOL_VERSION,
        feature_flags={"supports_auth_refresh": True},
    )
    return _identified(message, identity, proxy_version)


def _identified(message: CommandConnect, identity: BrokerIdentity, proxy_version: str) -> CommandConnect:
    if identity.method:
        message.auth_method_name = identity.method
        message.auth_data = identity.data
    if identity.original_principal:
        message.original_principal = identity.original_principal
    if identity.original is not None:
        message.original_auth_method = identity.original.method
        message.original_auth_data = identity.original.data
    message.proxy_version = proxy_version
    return message


def lookup_mode_connected(
    client: CommandConnect, broker: CommandConnected | None, server_version: str
) -> CommandConnected:
    """The CONNECTED for a client in lookup mode.

    ``broker`` is what a broker of this cluster last said, or None before the first has spoken; then the flags are
    those that Pulsar's own proxy always claims. Topic watchers are never claimed: a watch needs a broker, and this
    connection ends at the proxy (Java clients ask for one only if told that they may).
    """
    message = CommandConnected()
    if broker is not None:
        message.CopyFrom(broker)
        message.feature_flags.supports_topic_watchers = False
    else:
        message.protocol_version = PROTOCOL_VERSION
        message.feature_flags.supports_get_partitioned_metadata_without_auto_creation = True
        message.feature_flags.supports_repl_dedup_by_lid_and_eid = True
    message.server_version = server_version
    message.protocol_version = min(client.protocol_version, message.protocol_version)
    return message
