"""Outcomes of relays, by broker: one that fails relays of many owners is reported to the lookup workers, as an outlier.

A relay fails if its broker cannot be reached, ends or refuses the handshake, or is the first to end the relay within
EARLY_S. A client can provoke that, by a frame that no broker bears: so not relays are counted, but owners (principals,
or addresses), each once. Of the owners with relays at a broker, in one window and one forwarder, OWNERS_FAILING_MIN and
a half must fail. Windows are judged at their end: at the start of one, a few hostile owners would be all of them.
"""

from collections.abc import Callable
from functools import partial

import trio

from proto.rpc_pb2 import Method, OtherBroker, ReportOutlierRequest, ResolveTargetResponse
from proxy.runtime.network.broker_link import REASONS_TO_TRY_ANOTHER_BROKER, RETRYABLE_REFUSALS, BrokerLinkFailed
from proxy.runtime.rpc.pool import RpcPool

WINDOW_S = 10.0
"""How long outcomes are counted, before they are judged and forgotten."""

EARLY_S = 5.0
"""A relay that its broker ends later than this has not failed."""

OWNERS_FAILING_MIN = 3
BROKERS_MAX = 1_000
OWNERS_MAX = 1_000
"""Bounds of what one window counts: brokers, and owners at each of them. More are not looked at."""

ERROR_CHARACTERS_MAX = 200
_REPORT_TIMEOUT_S = 1.0

OnBrokerEnd = Callable[[str], None]
"""Called with how the broker has ended a relay, if it was the first to end it, and the proxy did not close it."""

_Dialled = tuple[tuple[str, ...], int]


class _Window:
    """The outcomes at one broker: for each owner, how many relays it has begun, and how many of them have failed."""

    __slots__ = ("last_error", "owners")

    def __init__(self) -> None:
        self.owners: dict[str, list[int]] = {}
        self.last_error = ""

    @property
    def owners_failing(self) -> int:
        """How many owners fail: at least every second relay of theirs has."""
        return sum(failed > 0 and 2 * failed >= begun for begun, failed in self.owners.values())


class RelayOutcomes:
    """The outcomes of one forwarder's relays, in the current window."""

    def __init__(self, lookup: RpcPool) -> None:
        self._lookup = lookup
        self._windows: dict[_Dialled, _Window] = {}

    async def run(self) -> None:
        """Judge one window after the other until cancelled."""
        while True:
            await trio.sleep(WINDOW_S)
            self.judge_window()

    def record_link(self, target: ResolveTargetResponse | OtherBroker, owner: str) -> OnBrokerEnd:
        """Record that a broker has accepted an owner's relay; return what is to be called when the broker ends it."""
        dialled = _dialled(target)
        self._count(dialled, owner, begun=1)
        return partial(self._on_broker_end, dialled, owner, trio.current_time())

    def record_failure(self, target: ResolveTargetResponse | OtherBroker, owner: str, failed: BrokerLinkFailed) -> None:
        """Record that a broker has taken no relay of an owner. A refusal of credentials is not the broker's fault."""
        refused_for_now = failed.refusal is not None and failed.refusal.error in RETRYABLE_REFUSALS
        if refused_for_now or failed.reason in REASONS_TO_TRY_ANOTHER_BROKER:
            self._count(_dialled(target), owner, begun=1, error=str(failed))

    def _on_broker_end(self, dialled: _Dialled, owner: str, begun_at: float, how: str) -> None:
        if trio.current_time() - begun_at <= EARLY_S:
            self._count(dialled, owner, error=how)

    def _count(self, dialled: _Dialled, owner: str, *, begun: int = 0, error: str = "") -> None:
        window = self._windows.get(dialled)
        if window is None:
            if len(self._windows) >= BROKERS_MAX:
                return
            window = self._windows[dialled] = _Window()
        counts = window.owners.get(owner)
        if counts is None:
            if len(window.owners) >= OWNERS_MAX:
                return
            counts = window.owners[owner] = [0, 0]
        counts[0] += begun
        counts[1] += bool(error)
        window.last_error = error or window.last_error

    def judge_window(self) -> None:
        """Report the outliers among the brokers of the window that ends, and begin the next one."""
        windows, self._windows = self._windows, {}
        for (addresses, port), window in windows.items():
            owners, failing = len(window.owners), window.owners_failing
            if failing >= OWNERS_FAILING_MIN and 2 * failing >= owners:
                outlier = ReportOutlierRequest(
                    addresses=addresses,
                    port=port,
                    owners=owners,
                    owners_failing=failing,
                    last_error=window.last_error[:ERROR_CHARACTERS_MAX],
                    window_ms=int(WINDOW_S * 1000),
                )
                self._lookup.notify_all(Method.REPORT_OUTLIER, outlier, timeout_s=_REPORT_TIMEOUT_S)


def _dialled(target: ResolveTargetResponse | OtherBroker) -> _Dialled:
    """Return what tells a broker from others, under any of its names and in any order of its addresses."""
    return tuple(sorted(target.addresses)), target.port
