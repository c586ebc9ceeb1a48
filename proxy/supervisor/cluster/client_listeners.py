"""The sockets of the cluster's listeners: bound or taken over, passed to workers, closed in a drain."""

import socket
from collections.abc import Iterable

from proxy.common.logs import get_logger
from proxy.config.types import HttpListener, Listener
from proxy.supervisor.startup.sockets import BACKLOG, StartFailed, bind_tcp


class ClientListeners:
    """Sockets of one kind of listener by their configured address. Those of the program before an exec are taken over.

    ``key``: the listeners' table. ``inherited``: the sockets of the program before by address, of which those that are
    taken over are removed. Raises StartFailed for an address that cannot be bound. After an exec, the cluster goes on
    without that listener: the connections that the program before has left must not end by it.
    """

    def __init__(
        self,
        key: str,
        listeners: Iterable[Listener | HttpListener],
        inherited: dict[str, socket.socket],
        generation: int,
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._indexes: list[int] = []
        self._binds: list[str] = []
        for index, listener in enumerate(listeners):
            sock = inherited.pop(listener.bind, None)
            try:
                sock = sock or bind_tcp(f"{key}[{index}].bind", listener.bind)
            except StartFailed as error:
                if generation == 1:
                    raise
                get_logger().error("the cluster goes on without a listener", reason=str(error))
                continue
            self.sockets.append(sock)
            self._indexes.append(index)
            self._binds.append(listener.bind)

    def start_listening(self) -> None:
        """Accept clients into the backlog; called once all workers that serve them are ready."""
        for sock in self.sockets:
            sock.listen(BACKLOG)

    def descriptors(self) -> list[int]:
        """Return the descriptors of the sockets that are still open."""
        return [sock.fileno() for sock in self.sockets if sock.fileno() >= 0]

    def descriptors_by_index(self) -> dict[int, int]:
        """Return the descriptors of the sockets that are still open, each by its place in the configuration."""
        sockets = zip(self._indexes, self.sockets, strict=True)
        return {index: sock.fileno() for index, sock in sockets if sock.fileno() >= 0}

    def descriptors_by_bind(self) -> dict[str, int]:
        """Return the descriptors by configured address, for the next program."""
        return {bind: sock.fileno() for bind, sock in zip(self._binds, self.sockets, strict=True)}

    def close(self) -> None:
        """Close all sockets: the kernel refuses further clients."""
        for sock in self.sockets:
            sock.close()
