"""Strangers who have wrong passwords checked, and come again as soon as they are turned away."""

from __future__ import annotations

import selectors
import socket
import threading
from types import TracebackType
from typing import Self

from proto.pulsar_pb2 import BaseCommand

from .wire import frame

LOOK_S = 0.2


class PasswordFlood:
    """So many connections at all times, from these addresses in turn, half of them for a user that there is."""

    def __init__(self, port: int, addresses: list[str], *, number: int, user: str) -> None:
        self._port = port
        self._places = [
            (addresses[index % len(addresses)], user if index % 2 else f"nobody-{index}") for index in range(number)
        ]
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.turned_away = 0
        """How many have been told no."""

    def __enter__(self) -> Self:
        for place in self._places:
            self._come(place)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._leave(key)
        self._selector.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(LOOK_S):
                self._leave(key)
                self.turned_away += 1
                self._come(key.data)

    def _come(self, place: tuple[str, str]) -> None:
        address, user = place
        client = socket.create_connection(("127.0.0.1", self._port), timeout=60, source_address=(address, 0))
        connect = {
            "client_version": "stranger",
            "protocol_version": 19,
            "auth_method_name": "basic",
            "auth_data": f"{user}:wrong".encode(),
        }
        client.sendall(frame(BaseCommand.CONNECT, connect=connect))
        self._selector.register(client, selectors.EVENT_READ, place)

    def _leave(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
