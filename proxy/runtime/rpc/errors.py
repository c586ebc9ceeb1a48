"""Errors of RPC calls, on the calling side."""

from proto.rpc_pb2 import Status


class RpcError(Exception):
    """A call that brought no response."""

    @property
    def reason(self) -> str:
        """What an operator is told: words, without the names of statuses."""
        return str(self)


class RpcConnectionLost(RpcError):
    """The connection broke while the call was under way; whether it was carried out is unknown."""


class RpcDeadlineExceeded(RpcError):
    """No answer in time. One that comes later is dropped."""


class RpcCallRefused(RpcError):
    """The other side answered with a status other than OK."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{_status_name(status)}: {detail}")
        self.status = status
        self._detail = detail

    @property
    def reason(self) -> str:
        """What the other side said of it; of a defect of its own it says nothing of use."""
        return (
            "a defect of the proxy's; its log says more" if self.status == Status.UNKNOWN_SERVER_ERROR else self._detail
        )


class RpcResponseCorrupt(RpcError):
    """The other side answered with bytes that are no response to this call."""


def _status_name(status: int) -> str:
    try:
        return Status.Name(status)
    except ValueError:  # a newer worker's
        return f"status {status}"
