"""proxy.runtime.observability.connection_sums: forwarders' sums merged, of which any may be compromised."""

from __future__ import annotations

from proto.rpc_pb2 import ConnectionSums, PrincipalSum
from proxy.forwarder.relay.usage import LABEL_BYTES_MAX
from proxy.runtime.observability.connection_sums import NAME_CHARACTERS_MAX, SHOWN_MAX, TOLD_MAX, merge_sums
from proxy.runtime.observability.metrics import OTHER


def part(*sums: tuple[str, int, int, int]) -> ConnectionSums:
    return ConnectionSums(
        principals=[
            PrincipalSum(principal=name, connections=many, bytes_per_s_to_broker=there, bytes_per_s_to_client=back)
            for name, many, there, back in sums
        ]
    )


def test_sums_of_all_forwarders() -> None:
    merged = merge_sums([part(("alice", 1, 10, 5), (OTHER, 7, 1, 1)), part(("alice", 2, 10, 5), ("bob", 9, 0, 1))])
    expected = part(("alice", 3, 20, 10), ("bob", 9, 0, 1), (OTHER, 7, 1, 1))
    assert merged == [*expected.principals]
    assert NAME_CHARACTERS_MAX >= LABEL_BYTES_MAX, "no name of a sound forwarder is cut"


def test_what_is_shown_is_bounded() -> None:
    """Security."""
    merged = merge_sums([part(*((f"user-{number}", 1, 0, 0) for number in range(TOLD_MAX)))] * 2)
    assert len(merged) == SHOWN_MAX + 1
    assert (merged[-1].principal, merged[-1].connections) == (OTHER, 2 * (TOLD_MAX - SHOWN_MAX))


def test_a_forwarder_that_tells_too_much() -> None:
    """Security: more rows than it may, names without end, numbers that no sum holds."""
    merged = merge_sums([part(*((f"user-{number}", 1, 0, 0) for number in range(10 * TOLD_MAX)))])
    assert sum(one.connections for one in merged) == TOLD_MAX + 1
    [one] = merge_sums([part(("x" * 10_000, 2**32 - 1, 2**64 - 1, 2**64 - 1))] * 3)
    assert len(one.principal) == NAME_CHARACTERS_MAX
    assert (one.connections, one.bytes_per_s_to_broker) == (2**32 - 1, 2**50)
