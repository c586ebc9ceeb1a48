"""The clients' connections of all forwarders, for operators: pages are checked and passed on, none is kept.

An operator asks for the forwarders first, then each of them for page after page. What a forwarder tells is untrusted,
since it may be compromised: a page has bounds (those of its size: proxy.runtime.rpc.replies), and the next one begins
behind it.
"""

from proto.roles import Role
from proto.rpc_pb2 import ConnectionsPage, ConnectionsRequest, ForwarderProcess, Method, Status
from proxy.common.connection_kinds import KINDS
from proxy.runtime.rpc.errors import RpcCallRefused, RpcError, RpcResponseCorrupt
from proxy.runtime.rpc.server import RpcRefused
from proxy.supervisor.cluster.cluster import Cluster
from proxy.supervisor.processes.worker_process import WorkerProcess

PAGE_TIMEOUT_S = 20.0
"""A page of connections that are ended takes longer than one that is only shown."""

ROWS_MAX = 1_000
"""Connections in a page (proxy.forwarder.client.listing.SCANNED_MAX)."""

TEXT_CHARACTERS_MAX = 4_096
"""Characters of a text in a page: a role may have 1,024, a broker's address less."""


class ClusterConnections:
    """The connections of one cluster's forwarders, those that were replaced among them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _forwarders(self) -> dict[int, tuple[int, WorkerProcess]]:
        """Return the forwarders that can be asked, by process: the slot's number, and the worker."""
        slots = self._cluster.slots_of(Role.FORWARDER)
        return {worker.pid: (slot.index, worker) for slot in slots for worker in slot.callable_workers}

    async def page(self, request: ConnectionsRequest, *, ends: bool) -> ConnectionsPage:
        """Return one page of one forwarder, or the forwarders. ``ends``: what matches is ended. Raises RpcRefused."""
        forwarders = self._forwarders()
        if not request.pid:
            processes = [ForwarderProcess(pid=pid, index=index) for pid, (index, _worker) in forwarders.items()]
            return ConnectionsPage(forwarders=processes)
        if request.pid not in forwarders:
            raise RpcRefused(Status.REQUEST_TIMED_OUT, "the forwarder has ended")
        if ends and not names_some(request):
            raise RpcRefused(Status.INVALID_REQUEST, "a filter is needed: no one ends all connections by mistake")
        _index, worker = forwarders[request.pid]
        method = Method.END_CONNECTIONS if ends else Method.LIST_CONNECTIONS
        try:
            page = await worker.call(method, request, ConnectionsPage, timeout_s=PAGE_TIMEOUT_S)
        except RpcCallRefused as refused:
            raise RpcRefused(refused.status, refused.reason) from None
        except RpcResponseCorrupt as error:
            raise RpcRefused(Status.UNKNOWN_SERVER_ERROR, f"the forwarder's answer is refused: {error}") from None
        except RpcError:
            raise RpcRefused(Status.REQUEST_TIMED_OUT, "the forwarder does not answer") from None
        if fault := page_fault(page, request):
            raise RpcRefused(Status.UNKNOWN_SERVER_ERROR, f"the forwarder's answer is refused: {fault}")
        return page


def names_some(request: ConnectionsRequest) -> bool:
    """Return whether a request's filter leaves connections out."""
    wanted = request.filter
    return bool(wanted.HasField("principal") or wanted.network or wanted.broker or wanted.kinds)


def page_fault(page: ConnectionsPage, request: ConnectionsRequest) -> str:
    """Say what no sound forwarder answers; empty: nothing."""
    if len(page.connections) > ROWS_MAX or page.forwarders:
        return "too much for a page"
    if page.next and page.next <= request.after:
        return "it goes backwards"
    for one in page.connections:
        texts = (one.client_address, one.principal, one.method, one.proxy, one.broker)
        if one.kind not in KINDS or any(len(text) > TEXT_CHARACTERS_MAX for text in texts):
            return "no such kind of connection, or a text that is too long"
    return ""
