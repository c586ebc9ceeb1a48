"""proxy.runtime.rpc.replies: bounds of responses, before they are parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from proto.rpc_pb2 import Connection, ConnectionsPage, ConnectionSums, ForwarderProcess, PrincipalSum
from proxy.runtime.observability.connection_sums import NAME_CHARACTERS_MAX, TOLD_MAX
from proxy.runtime.rpc.errors import RpcResponseCorrupt
from proxy.runtime.rpc.replies import RESPONSE_BYTES_MAX, RESPONSE_FIELDS_MAX, parse_whole


@pytest.mark.parametrize(
    "entry",
    [
        ConnectionSums(principals=[PrincipalSum()]),
        ConnectionsPage(connections=[Connection()]),
        ConnectionsPage(forwarders=[ForwarderProcess()]),
    ],
)
def test_many_small_entries_are_refused_before_they_are_parsed(entry: Message) -> None:
    """Security: the supervisor's loop would stand still for seconds, each time that the page or an operator asks."""
    kind, one = type(entry), entry.SerializeToString()
    with pytest.raises(RpcResponseCorrupt, match=f"{kind.__name__} of .* is too much"):
        parse_whole(one * (RESPONSE_FIELDS_MAX + 1), kind, more=False)
    parse_whole(one * RESPONSE_FIELDS_MAX, kind, more=False)


@pytest.mark.parametrize("kind", RESPONSE_BYTES_MAX)
def test_large_entries_are_refused_before_they_are_parsed(kind: type[Message]) -> None:
    """Security: an entry may have many small fields itself."""
    hostile = b"\x0a\x80\x80\x80\x04" + b"\x0a\x00" * (4 << 20)
    with pytest.raises(RpcResponseCorrupt, match=f"{kind.__name__} of .* is too much"):
        parse_whole(hostile, kind, more=False)


def test_the_largest_sound_response_is_not_refused() -> None:
    largest = PrincipalSum(
        principal="\U0001f600" * NAME_CHARACTERS_MAX,
        connections=2**32 - 1,
        bytes_per_s_to_broker=2**63,
        bytes_per_s_to_client=2**63,
    )
    sums = ConnectionSums(principals=[largest] * (TOLD_MAX + 1), interval_ms=2**32 - 1)
    assert parse_whole(sums.SerializeToString(), ConnectionSums, more=False) == sums
