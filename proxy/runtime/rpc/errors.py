"""Errors of RPC calls, on the calling side."""

from proto.rpc_pb2 import Status
from proxy.common.errors import ProxyError


class RpcError(ProxyError):
    """An RPC call that brought no response."""

    @property
    def reason(self) -> str:
        """The reason in words for an operator, without the names of statuses."""
        return str(self)


class RpcConnectionLost(RpcError):
    """Connection lost while the call was under way. The call may or may not have been carried out."""


class RpcDeadlineExceeded(RpcError):
    """No reply before the deadline. A later reply is dropped."""


class RpcCallRefused(RpcError):
    """A reply with a status other than OK."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{_status_name(status)}: {detail}")
        self.status = status
        self._detail = detail

    @property
    def reason(self) -> str:
        """The worker's own words; for an internal error of the worker, which sends none, a pointer to the log."""
        return (
            "a defect of the proxy's; its log says more" if self.status == Status.UNKNOWN_SERVER_ERROR else self._detail
        )


class RpcResponseCorrupt(RpcError):
    """A reply with bytes that do not parse as this method's response."""


def _status_name(status: int) -> str:
    try:
        return Status.Name(status)
    except ValueError:  # a newer worker's status
        return f"status {status}"
