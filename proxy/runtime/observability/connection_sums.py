"""Connections and bytes a second by principal: those of one forwarder, and of all together."""

from collections.abc import Iterable

from proto.rpc_pb2 import ConnectionSums, PrincipalSum
from proxy.runtime.observability.metrics import OTHER

TOLD_MAX = 100
"""Principals that a forwarder tells by name; all others are one sum."""

SHOWN_MAX = 50
"""Principals that are shown by name."""

NAME_CHARACTERS_MAX = 128
"""Of the label `principal` (proxy.forwarder.relay.usage.LABEL_BYTES_MAX)."""

_CONNECTIONS_MAX = 2**32 - 1
_RATE_MAX = 2**50


def busiest(sums: Iterable[PrincipalSum], most: int) -> list[PrincipalSum]:
    """Return the sums of the busiest principals that have any, ``most`` at most, then one of all others together."""
    told = [one for one in sums if one.connections or one.bytes_per_s_to_broker or one.bytes_per_s_to_client]
    named = sorted((one for one in told if one.principal != OTHER), key=_weight, reverse=True)
    others = [one for one in told if one.principal == OTHER] + named[most:]
    return [*named[:most], *([_sum_of(OTHER, others)] if others else ())]


def merge_sums(parts: Iterable[ConnectionSums]) -> list[PrincipalSum]:
    """Merge the sums of several forwarders, any of which may be compromised: what is too much is left out."""
    by_principal: dict[str, list[PrincipalSum]] = {}
    for part in parts:
        for one in part.principals[: TOLD_MAX + 1]:
            by_principal.setdefault(one.principal[:NAME_CHARACTERS_MAX], []).append(one)
    return busiest((_sum_of(name, sums) for name, sums in by_principal.items()), SHOWN_MAX)


def _weight(one: PrincipalSum) -> tuple[int, int]:
    return one.bytes_per_s_to_broker + one.bytes_per_s_to_client, one.connections


def _sum_of(name: str, sums: list[PrincipalSum]) -> PrincipalSum:
    return PrincipalSum(
        principal=name,
        connections=min(sum(one.connections for one in sums), _CONNECTIONS_MAX),
        bytes_per_s_to_broker=min(sum(one.bytes_per_s_to_broker for one in sums), _RATE_MAX),
        bytes_per_s_to_client=min(sum(one.bytes_per_s_to_client for one in sums), _RATE_MAX),
    )
