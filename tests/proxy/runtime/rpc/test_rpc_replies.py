"""proxy.runtime.rpc.replies: bounds of responses, before they are parsed."""

from __future__ import annotations

import pytest

from proto.rpc_pb2 import ConnectionSums, PrincipalSum
from proxy.runtime.observability.connection_sums import NAME_CHARACTERS_MAX, TOLD_MAX
from proxy.runtime.rpc.errors import RpcResponseCorrupt
from proxy.runtime.rpc.replies import RESPONSE_BYTES_MAX, parse_whole


def test_many_small_parts_are_refused_before_they_are_parsed() -> None:
    """Security: the supervisor's loop would stand still for seconds, each time that the page asks."""
    hostile = ConnectionSums(principals=[PrincipalSum()]).SerializeToString() * RESPONSE_BYTES_MAX[ConnectionSums]
    with pytest.raises(RpcResponseCorrupt, match="ConnectionSums of"):
        parse_whole(hostile, ConnectionSums, more=False)


def test_the_largest_sound_response_is_not_refused() -> None:
    largest = PrincipalSum(
        principal="\U0001f600" * NAME_CHARACTERS_MAX,
        connections=2**32 - 1,
        bytes_per_s_to_broker=2**63,
        bytes_per_s_to_client=2**63,
    )
    sums = ConnectionSums(principals=[largest] * (TOLD_MAX + 1), interval_ms=2**32 - 1)
    assert parse_whole(sums.SerializeToString(), ConnectionSums, more=False) == sums
