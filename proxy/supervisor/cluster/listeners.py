"""The clients' listening sockets of the whole cluster: bound before any worker starts, shared by all forwarders."""

import socket

from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.supervisor.handover.exec_handover import HandoverState
from proxy.supervisor.startup.sockets import BACKLOG, StartFailed, bind_tcp


class ClientListeners:
    """Sockets by their configured address. Those of the program before an exec are taken over.

    Raises StartFailed for an address that cannot be bound. After an exec, the cluster goes on without that listener:
    the connections that the program before has left must not end by it.
    """

    def __init__(self, config: Config, handover: HandoverState) -> None:
        self.sockets: list[socket.socket] = []
        self._binds: list[str] = []
        for index, listener in enumerate(config.listener):
            sock = handover.take_listener(listener.bind)
            try:
                sock = sock or bind_tcp(f"listener[{index}].bind", listener.bind)
            except StartFailed as error:
                if handover.generation == 1:
                    raise
                get_logger().error("the cluster goes on without a listener", reason=str(error))
                continue
            self.sockets.append(sock)
            self._binds.append(listener.bind)

    def start_listening(self) -> None:
        """Accept clients into the backlog; called once all workers that serve them are ready."""
        for sock in self.sockets:
            sock.listen(BACKLOG)

    def descriptors(self) -> list[int]:
        """Return the descriptors of the sockets that are still open."""
        return [sock.fileno() for sock in self.sockets if sock.fileno() >= 0]

    def descriptors_by_bind(self) -> dict[str, int]:
        """Return the descriptors by configured address, for the next program."""
        return {bind: sock.fileno() for bind, sock in zip(self._binds, self.sockets, strict=True)}

    def close(self) -> None:
        """Close all sockets: the kernel refuses further clients."""
        for sock in self.sockets:
            sock.close()
