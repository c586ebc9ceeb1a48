"""proto.connect_rules and proto.addresses: a broker gets no identity but the proxy's, and what is kept is bounded."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError

from proto.addresses import AddressInvalid, client_network, parse_broker_url, parse_host_port, wide_network
from proto.connect_rules import (
    KEPT_FIELD_BYTES_MAX,
    PROXIES_MAX,
    BrokerIdentity,
    broker_connect,
    check_connect,
    connect_without_credentials,
    count_proxies,
    lookup_mode_connected,
    original_credentials,
)
from proto.pulsar_pb2 import BaseCommand, CommandConnect

IDENTITY = BrokerIdentity("token", b"of the proxy", "alice", None, 2)

_CONNECTS = (
    CommandConnect(client_version="c", protocol_version=21, auth_method_name="token", auth_data=b"secret"),
    CommandConnect(client_version="c", protocol_version=21, proxy_to_broker_url="broker-1.example:6650"),
    CommandConnect(client_version="c", protocol_version=12, proxy_to_broker_url="[::1]:6651", proxy_version="p;hops=3"),
    CommandConnect(
        client_version="c",
        protocol_version=21,
        auth_method=2,
        original_principal="admin",
        original_auth_data="x",
        original_auth_method="token",
        proxy_version="p;hops=999999999",
        proxy_to_broker_url="",
        feature_flags={"supports_auth_refresh": True},
    ),
)
SEEDS = (
    *(one.SerializeToString() for one in _CONNECTS),
    _CONNECTS[0].SerializeToString() + b"\xf2\x07\x05newer",
    CommandConnect(client_version="c", proxy_to_broker_url="pulsar+ssl://a:1,[fe80::1%eth0]:2/").SerializeToString(),
    CommandConnect(client_version="c", proxy_to_broker_url="pulsar+srv://brokers.example").SerializeToString(),
    CommandConnect(client_version="c", proxy_to_broker_url="[::ffff:10.0.0.1]:99999").SerializeToString(),
)


def check(data: bytes) -> None:
    try:
        connect = CommandConnect.FromString(data)
    except DecodeError:
        return
    command = BaseCommand(type=BaseCommand.CONNECT, connect=connect)
    refused = check_connect(command, proxies_allowed=True)
    if connect.HasField("proxy_version"):
        assert check_connect(command, proxies_allowed=False) is not None
    if refused is None:
        assert count_proxies(connect) <= PROXIES_MAX
        kept = connect_without_credentials(connect)
        assert not kept.auth_data
        assert len(kept.SerializePartialToString()) <= 4 * (KEPT_FIELD_BYTES_MAX + 3) + 2 * 11
    for from_proxy in (True, False):
        original_credentials(connect, from_proxy=from_proxy)
    lookup_mode_connected(connect, None, "proxy").SerializeToString()
    _check_broker_connect(connect)
    _check_address(connect.proxy_to_broker_url)


def _check_broker_connect(connect: CommandConnect) -> None:
    sent = broker_connect(connect, IDENTITY, "proxy")
    found = CommandConnect.FromString(sent.SerializePartialToString())
    assert (found.auth_method_name, found.auth_data) == (IDENTITY.method, IDENTITY.data)
    assert found.original_principal == IDENTITY.original_principal
    assert found.proxy_version == "proxy;hops=2"
    for name in ("auth_method", "original_auth_data", "original_auth_method", "proxy_to_broker_url"):
        assert not found.HasField(name), name
    assert (found.client_version, found.protocol_version) == (connect.client_version, connect.protocol_version)


def _check_address(text: str) -> None:
    try:
        address = parse_host_port(text)
    except AddressInvalid:
        pass
    else:
        assert parse_host_port(str(address)) == address
        assert 0 < address.port < 1 << 16
    with contextlib.suppress(AddressInvalid):
        parse_broker_url(text)
    assert isinstance(wide_network(client_network(text)), str)
