"""Connections and bytes a second of each principal, for the page at the admin port.

A sample copies the numbers of all relays at once, so that they fit together, and sums the copy in slices between which
relays go on: at 10,000 relays 4 to 7 ms of CPU time in all. It names the principals that metrics name, and tells no
more than TOLD_MAX of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from proto.rpc_pb2 import ConnectionSums, PrincipalSum
from proxy.forwarder.relay.usage import PrincipalUsage
from proxy.runtime.observability.connection_sums import TOLD_MAX, busiest
from proxy.runtime.shared.relay_table import ROW_CELLS, ROW_PRINCIPAL, ROW_TO_BROKER, ROW_TO_CLIENT, RelayTable

SLICE = 1_000
"""Relays that are summed before other tasks go on."""

INTERVAL_S_MAX = 15.0
"""The longest time over which a rate is told: a mean of hours would be none of now."""


class PrincipalRates:
    """Samples of one relay table. ``has_table``: whether this process, and no successor, tells the bytes of all relays
    in the table. ``now``: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        table: RelayTable,
        principals: PrincipalUsage,
        has_table: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_table = has_table
        self._table = table
        self._principals = principals
        self._now = now
        self._before: dict[str, tuple[int, int]] = {}
        self._sampled_at_s = float("-inf")

    async def sample(self, relay_ids: list[int], others: Iterable[str]) -> ConnectionSums:
        """Return the sums by principal, and rates since the last sample, where that was within INTERVAL_S_MAX.

        ``relay_ids``: of this process; ``others``: the principals of connections that are no relays.
        """
        has_table = self._has_table()
        now, rows = self._now(), self._principals.rows()
        connections = Counter(map(self._principals.known_row_of, others))
        cells = self._table.principals_and_bytes()
        moved = {number: [*self._table.sums_of_ended(number)] for number in rows.values()}
        for first in range(0, len(relay_ids), SLICE):
            await trio.lowlevel.checkpoint()
            ids = relay_ids[first : first + SLICE]
            connections.update(cells[(relay_id - 1) * ROW_CELLS + ROW_PRINCIPAL] for relay_id in ids)
        for first in range(0, len(cells) if has_table else 0, SLICE * ROW_CELLS):
            await trio.lowlevel.checkpoint()
            for at in range(first, min(first + SLICE * ROW_CELLS, len(cells)), ROW_CELLS):
                if (mine := moved.get(cells[at + ROW_PRINCIPAL])) is not None:
                    mine[0] += cells[at + ROW_TO_BROKER]
                    mine[1] += cells[at + ROW_TO_CLIENT]
        sums = {name: (moved[number][0], moved[number][1]) for name, number in rows.items()}
        interval_s, before = now - self._sampled_at_s, self._before
        self._before, self._sampled_at_s = sums, now
        is_rated = has_table and 0 < interval_s <= INTERVAL_S_MAX
        told = [
            PrincipalSum(
                principal=name,
                connections=connections[rows[name]],
                bytes_per_s_to_broker=_rate(one[0] - before.get(name, (0, 0))[0], interval_s) if is_rated else 0,
                bytes_per_s_to_client=_rate(one[1] - before.get(name, (0, 0))[1], interval_s) if is_rated else 0,
            )
            for name, one in sums.items()
        ]
        interval_ms = max(1, round(interval_s * 1000)) if is_rated else 0
        return ConnectionSums(principals=busiest(told, TOLD_MAX), interval_ms=interval_ms)


def _rate(moved: int, interval_s: float) -> int:
    """Return bytes a second. Less than before is none: the row is another relay's, or another principal's."""
    return min(max(0, round(moved / interval_s)), 2**63)
