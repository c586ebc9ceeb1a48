"""What of a client's CONNECT reaches the broker, and what a client in lookup mode is told."""

import pytest
from pulsar_bytes import command, decoded, fields

from proto.commands import parse_command
from proto.connect_rules import (
    INVALID_ROLES,
    KEPT_FIELD_BYTES_MAX,
    LOST_EXCHANGE,
    NOT_A_PROXY,
    PROXIES_MAX,
    BrokerIdentity,
    OriginalCredentials,
    broker_connect,
    check_connect,
    connect_without_credentials,
    count_proxies,
    lookup_mode_connected,
    original_credentials,
    proxy_connect,
    refusal_for_denial,
)
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError

FLAGS = fields((1, 1), (3, 1), (7, 1))  # 7 is newer than any schema

# Everything a client can write; what begins with "client's" is an identity that it chose for itself.
WRITTEN = fields(
    (1, "Pulsar-Java-v9.9"),
    (2, 2),
    (3, "client's data"),
    (4, 19),
    (5, "client's method"),
    (6, "client's-target:6650"),
    (7, "client's principal"),
    (8, "client's original data"),
    (9, "client's original method"),
    (10, FLAGS),
    (11, "client's proxy version"),
    (12, "a field of the future"),
)
SURVIVES = [(1, b"Pulsar-Java-v9.9"), (4, 19), (10, FLAGS), (12, b"a field of the future")]
IDENTITY = BrokerIdentity("token", b"proxy's token", "alice")


def written(*left_out: int) -> CommandConnect:
    kept = [pair for pair in decoded(WRITTEN) if pair[0] not in left_out]
    return CommandConnect.FromString(fields(*kept))


def connect(**values: object) -> BaseCommand:
    return BaseCommand(type=BaseCommand.CONNECT, connect={"protocol_version": 21, **values})


# ---- checks before authentication


either_way = pytest.mark.parametrize("proxies_allowed", [False, True])


@either_way
def test_a_usual_connect(proxies_allowed: bool) -> None:
    message = connect(client_version="x", proxy_to_broker_url="b:6650")
    assert check_connect(message, proxies_allowed=proxies_allowed) is None


@either_way
@pytest.mark.parametrize("version", [10, 11, 21, 22, 2**31 - 1])
def test_protocol_versions_that_are_served(version: int, proxies_allowed: bool) -> None:
    assert check_connect(connect(protocol_version=version), proxies_allowed=proxies_allowed) is None


@either_way
@pytest.mark.parametrize("version", [9, 1, 0, -1, -(2**31)])
def test_protocol_versions_that_are_too_old(version: int, proxies_allowed: bool) -> None:
    refusal = check_connect(connect(protocol_version=version), proxies_allowed=proxies_allowed)
    assert refusal is not None
    assert refusal.code == 10  # UnsupportedVersionError
    assert refusal.message == f"The proxy needs protocol version 10 or newer; the client speaks {version}"


@either_way
@pytest.mark.parametrize("body", [b"", None, fields((1, "x"))])
def test_a_connect_without_a_protocol_version(body: bytes | None, proxies_allowed: bool) -> None:
    refusal = check_connect(parse_command(command(2, body)), proxies_allowed=proxies_allowed)
    assert refusal is not None
    assert refusal.code == 10


@pytest.mark.parametrize("version", ["", "4.0.8"])
def test_a_client_that_says_it_is_a_proxy(version: str) -> None:
    message = parse_command(command(2, fields((4, 21), (11, version))))
    refusal = check_connect(message, proxies_allowed=False)
    assert refusal is not None
    assert refusal.code == 22  # NotAllowedError
    assert refusal.message == "Must not provide proxyVersion"
    assert check_connect(message, proxies_allowed=True) is None, "then the auth worker decides"


# ---- the client's error for a denial


@pytest.mark.conforms("pip-30.44")
@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        (INVALID_ROLES, ServerError.AuthorizationError, "Invalid roles."),
        (NOT_A_PROXY, ServerError.NotAllowedError, "Must not provide proxyVersion"),
        ("bad_signature", ServerError.AuthenticationError, "Failed to authenticate"),
        ("unknown_method", ServerError.AuthenticationError, "Failed to authenticate"),
        (LOST_EXCHANGE, ServerError.ServiceNotReady, "The proxy cannot authenticate clients at the moment"),
        ("", ServerError.AuthenticationError, "Failed to authenticate"),
        ("Invalid roles", ServerError.AuthenticationError, "Failed to authenticate"),
    ],
)
def test_a_denial_tells_no_more_than_a_broker_would(reason: str, code: int, message: str) -> None:
    """The reason itself would help one who guesses; the texts are Pulsar's own."""
    refusal = refusal_for_denial(reason)
    assert (refusal.code, refusal.message) == (code, message)


# ---- a client's own credentials


def test_the_credentials_of_a_client() -> None:
    message = connect(auth_method_name="token", auth_data=b"ey.token").connect
    assert original_credentials(message, from_proxy=False) == OriginalCredentials("token", "ey.token")


def test_a_method_by_its_old_number() -> None:
    message = connect(auth_method=1, auth_data=b"data").connect
    assert original_credentials(message, from_proxy=False) == OriginalCredentials("ycav1", "data")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"token\x80"])
def test_data_that_is_none_or_no_text_is_not_forwarded(data: bytes) -> None:
    assert original_credentials(connect(auth_method_name="token", auth_data=data).connect, from_proxy=False) is None


def test_original_credentials_from_a_client_are_not_forwarded() -> None:
    """Security: only a proxy forwards credentials; those that a client writes there could be another client's."""
    message = connect(
        auth_method_name="token", auth_data=b"own", original_auth_method="token", original_auth_data="other's"
    ).connect
    assert original_credentials(message, from_proxy=False) == OriginalCredentials("token", "own")
    assert original_credentials(connect(original_auth_data="other's").connect, from_proxy=False) is None


def test_of_a_proxy_what_it_forwards_itself_goes_on() -> None:
    """Security: never its own, with which a broker would take the client for the proxy."""
    message = connect(
        auth_method_name="basic", auth_data=b"the proxy's", original_auth_method="token", original_auth_data="client's"
    ).connect
    assert original_credentials(message, from_proxy=True) == OriginalCredentials("token", "client's")
    forwards_nothing = connect(auth_method_name="basic", auth_data=b"the proxy's").connect
    assert original_credentials(forwards_nothing, from_proxy=True) is None


def test_a_certificate_is_not_forwarded() -> None:
    """Security: a broker would look for it in the proxy's own TLS session, and take the client for the proxy."""
    message = connect(auth_method_name="tls", auth_data=b"anything").connect
    assert original_credentials(message, from_proxy=False) is None
    behind = connect(auth_method_name="token", original_auth_method="tls", original_auth_data="anything").connect
    assert original_credentials(behind, from_proxy=True) is None


def test_credentials_are_not_shown() -> None:
    credentials = OriginalCredentials("token", "s3cret")
    assert "s3cret" not in repr(credentials) + str(credentials) + repr(BrokerIdentity("token", b"", "a", credentials))
    assert "token" in repr(credentials)


def test_a_proxys_own_credentials_are_not_shown() -> None:
    assert "proxy's token" not in repr(IDENTITY)


# ---- CONNECT of a relay


@pytest.mark.conforms("pip-1.12", "pip-1.29", "pip-1.30")
def test_the_connect_to_the_broker_is_the_clients_except_for_the_identity() -> None:
    message = broker_connect(written(), IDENTITY, "0.1")
    expected = [*SURVIVES, (3, b"proxy's token"), (5, b"token"), (7, b"alice"), (11, b"0.1")]
    assert decoded(message.SerializeToString()) == sorted(expected)


def test_without_credentials_and_principal_there_is_no_identity_at_all() -> None:
    message = broker_connect(written(), BrokerIdentity(), "0.1")
    assert decoded(message.SerializeToString()) == sorted([*SURVIVES, (11, b"0.1")])


@pytest.mark.conforms("pip-1.12")
@pytest.mark.parametrize("number", [2, 3, 5, 6, 7, 8, 9, 11])
@pytest.mark.parametrize("identity", [BrokerIdentity(), IDENTITY])
def test_no_identity_that_a_client_wrote_reaches_the_broker(number: int, identity: BrokerIdentity) -> None:
    others = {2, 3, 5, 6, 7, 8, 9, 11} - {number}
    message = broker_connect(written(*others), identity, "0.1")
    data = message.SerializeToString()
    assert b"client's" not in data
    assert 2 not in dict(decoded(data))


def test_an_identity_written_twice_is_gone_as_well() -> None:
    twice = CommandConnect.FromString(WRITTEN + fields((7, "client's second")))
    assert 7 not in dict(decoded(broker_connect(twice, BrokerIdentity(), "0.1").SerializeToString()))


@pytest.mark.conforms("pip-1.30")
@pytest.mark.parametrize("make", ["relay", "lookups"])
def test_forwarded_credentials_stand_behind_the_proxys_own(make: str) -> None:
    identity = BrokerIdentity("token", b"proxy's token", "alice", OriginalCredentials("basic", "alice:pw"))
    message = broker_connect(written(), identity, "0.1") if make == "relay" else proxy_connect(identity, "0.1")
    assert (message.auth_method_name, message.auth_data) == ("token", b"proxy's token")
    assert (message.original_principal, message.original_auth_method) == ("alice", "basic")
    assert message.original_auth_data == "alice:pw"
    assert b"client's" not in message.SerializeToString()


@pytest.mark.parametrize("identity", [BrokerIdentity(), IDENTITY])
def test_another_proxy_is_told_the_target_and_nothing_else_that_the_client_wrote(identity: BrokerIdentity) -> None:
    message = broker_connect(written(), identity, "0.1", through_proxy=True)
    plain = broker_connect(written(), identity, "0.1")
    expected = [*decoded(plain.SerializeToString()), (6, b"client's-target:6650")]
    assert sorted(decoded(message.SerializeToString())) == sorted(expected)


def test_a_method_without_data_is_a_method_with_empty_data() -> None:
    message = broker_connect(written(), BrokerIdentity("none", b""), "0.1")
    assert (message.auth_method_name, message.HasField("auth_data"), message.auth_data) == ("none", True, b"")


def test_the_clients_own_message_is_left_as_it_was() -> None:
    client = written()
    broker_connect(client, IDENTITY, "0.1")
    assert client == written()


# ---- CONNECT of the proxy's own connections


@pytest.mark.conforms("pip-1.28", "pip-30.9")
def test_a_connection_for_lookups_of_one_principal() -> None:
    message = proxy_connect(IDENTITY, "0.1")
    assert decoded(message.SerializeToString()) == [
        (1, b"pulsar-trio-proxy-0.1"),
        (3, b"proxy's token"),
        (4, 21),
        (5, b"token"),
        (7, b"alice"),
        (10, fields((1, 1))),
        (11, b"0.1"),
    ]


def test_a_probe_has_no_principal() -> None:
    message = proxy_connect(BrokerIdentity(), "0.1")
    assert [number for number, _ in decoded(message.SerializeToString())] == [1, 4, 10, 11]


# ---- CONNECTED of lookup mode


def test_connected_before_any_broker_has_spoken() -> None:
    connected = lookup_mode_connected(written(), None, "proxy-0.1")
    assert decoded(connected.SerializeToString()) == [(1, b"proxy-0.1"), (2, 19), (4, fields((5, 1)))]


EVERY_FLAG = fields(*((number, 1) for number in range(1, 31)))
"""Those of Pulsar 5.0.0-M1, 1 to 9, and some of releases to come."""


def test_connected_has_a_brokers_limits_and_of_its_flags_only_what_lookups_serve() -> None:
    """A client asks on this connection for whatever it promises: also what is newer than the proxy must not go out."""
    profile = CommandConnected.FromString(
        fields((1, "Pulsar Server"), (2, 21), (3, 1048576), (4, EVERY_FLAG), (9, "new"))
    )
    as_it_was = profile.SerializeToString(deterministic=True)
    connected = lookup_mode_connected(written(), profile, "proxy-0.1")
    assert decoded(connected.SerializeToString()) == [(1, b"proxy-0.1"), (2, 19), (3, 1048576), (4, fields((5, 1)))]
    assert profile.SerializeToString(deterministic=True) == as_it_was, "the profile is shared by all connections"


@pytest.mark.parametrize("flags", [None, b"", EVERY_FLAG.replace(fields((5, 1)), b"")])
def test_no_flag_is_claimed_that_the_broker_lacks(flags: bytes | None) -> None:
    profile = CommandConnected.FromString(fields((2, 12)) + (b"" if flags is None else fields((4, flags))))
    connected = lookup_mode_connected(written(), profile, "v")
    assert decoded(connected.SerializeToString()) == [(1, b"v"), (2, 12), (4, fields((5, 0)))]


@pytest.mark.parametrize(
    ("client", "broker", "told"), [(19, 21, 19), (21, 19, 19), (21, 21, 21), (22, 23, 22), (23, 22, 22), (99, None, 21)]
)
def test_the_lower_protocol_version_counts(client: int, broker: int | None, told: int) -> None:
    profile = None if broker is None else CommandConnected(protocol_version=broker)
    assert lookup_mode_connected(CommandConnect(protocol_version=client), profile, "v").protocol_version == told


@pytest.mark.conforms("pip-30.47")
@pytest.mark.parametrize("field", ["auth_method_name", "original_principal", "original_auth_method", "proxy_version"])
def test_a_connect_with_a_field_above_the_size_limit_is_refused(field: str) -> None:
    """Security: the fields are kept for as long as the connection lasts, also by the supervisor."""
    for size, allowed in ((KEPT_FIELD_BYTES_MAX, True), (KEPT_FIELD_BYTES_MAX + 1, False)):
        message = connect(protocol_version=19)
        setattr(message.connect, field, "x" * size)
        refusal = check_connect(message, proxies_allowed=True)
        assert (refusal is None) == allowed
    assert refusal is not None
    assert refusal.code == ServerError.NotAllowedError
    assert field in refusal.message


@pytest.mark.parametrize("field", ["auth_method_name", "original_principal", "original_auth_method", "proxy_version"])
@pytest.mark.parametrize("character", ["ä", "角", "🔑"])
def test_the_size_limit_of_a_connect_field_counts_bytes(field: str, character: str) -> None:
    """Security: a character takes up to four bytes."""
    whole, rest = divmod(KEPT_FIELD_BYTES_MAX, len(character.encode()))
    at_most = character * whole + "x" * rest
    for text, allowed in ((at_most, True), (at_most + "x", False), (character * KEPT_FIELD_BYTES_MAX, False)):
        refusal = check_connect(connect(**{field: text}), proxies_allowed=True)
        assert (refusal is None) == allowed


def test_a_kept_connect_has_no_credentials_and_no_unknown_fields() -> None:
    kept = connect_without_credentials(parse_command(command(2, WRITTEN)).connect)
    assert (kept.auth_method_name, kept.original_principal) == ("client's method", "client's principal")
    assert (kept.original_auth_method, kept.proxy_version) == ("client's original method", "client's proxy version")
    assert (kept.protocol_version, kept.auth_method) == (19, 2)
    assert not kept.auth_data
    assert not kept.original_auth_data
    assert b"future" not in kept.SerializeToString()
    assert not connect_without_credentials(CommandConnect(protocol_version=7)).HasField("proxy_version"), (
        "by which it is judged"
    )


# ---- circles


@pytest.mark.parametrize(
    ("version", "proxies"),
    [(None, 0), ("4.0.8", 1), ("", 1), ("0.1.0;hops=3", 3), ("0.1.0;hops=3 ", 1), ("0.1.0;hops=-3", 1)],
)
def test_proxies_are_counted_by_what_the_last_one_says(version: str | None, proxies: int) -> None:
    connect = CommandConnect(client_version="c")
    if version is not None:
        connect.proxy_version = version
    assert count_proxies(connect) == proxies


def test_a_connection_of_too_many_proxies_is_refused() -> None:
    """Security: a circle would use up the connections of every proxy in it."""
    for proxies in range(1, PROXIES_MAX + 3):
        connect = proxy_connect(BrokerIdentity(proxies=proxies), "0.1.0")
        assert count_proxies(connect) == proxies
        refusal = check_connect(BaseCommand(type=BaseCommand.CONNECT, connect=connect), proxies_allowed=True)
        assert (refusal is not None) is (proxies > PROXIES_MAX)


def test_brokers_behind_one_proxy_are_told_its_version_alone() -> None:
    assert proxy_connect(BrokerIdentity(), "0.1.0").proxy_version == "0.1.0"
