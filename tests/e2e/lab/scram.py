"""A SCRAM client (RFC 5802) on raw frames: it keeps to the mechanism's rounds, or does not."""

from __future__ import annotations

import re
from typing import Any

from scramp import ScramClient

from proto import commands
from proto.pulsar_pb2 import BaseCommand

from .wire import WireClient

MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


class ScramDialogue:
    """One authentication on one connection, step by step; `authenticate` does all of it in order."""

    def __init__(self, client: WireClient, user: str, password: str, mechanism: str = MECHANISMS[0]) -> None:
        self.client = client
        self.mechanism = mechanism
        self.server_first = ""
        self._scram = ScramClient([mechanism], user, password)

    def connect(self, **fields: Any) -> None:
        """CONNECT with the client's first message."""
        self.client.send_connect(auth_method_name=self.mechanism, auth_data=self.first(), **fields)

    def first(self) -> bytes:
        """The client's first message."""
        return str(self._scram.get_client_first()).encode()

    def take_first(self) -> None:
        """The server's first message."""
        self.see_first(self.client.receive())

    def see_first(self, answer: Any) -> None:
        """The same, received already."""
        self.server_first = self.challenge(answer).decode()
        self._scram.set_server_first(self.server_first)

    def final(self) -> bytes:
        """The client's final message, with its proof."""
        return str(self._scram.get_client_final()).encode()

    def take_last_word(self) -> None:
        """The server's final message: it proves that the server knows the user."""
        self.see_last_word(self.client.receive())

    def see_last_word(self, answer: Any) -> None:
        """The same, received already."""
        self._scram.set_server_final(self.challenge(answer).decode())

    def respond(self, data: bytes = b"", method: str = "") -> None:
        """AUTH_RESPONSE."""
        self.client.send_bytes(commands.auth_response("wire", 19, method or self.mechanism, data))

    def challenge(self, command: Any) -> bytes:
        """The data of a challenge, which must be one of our mechanism."""
        received = BaseCommand.FromString(command.SerializeToString())
        assert received.type == BaseCommand.AUTH_CHALLENGE, received
        assert received.auth_challenge.challenge.auth_method_name == self.mechanism
        data: bytes = received.auth_challenge.challenge.auth_data
        return data

    def begin(self, **fields: Any) -> bytes:
        """The first round; returns the final message, which is yet to be sent."""
        self.connect(**fields)
        self.take_first()
        return self.final()

    def authenticate(self, **fields: Any) -> Any:
        """All rounds; returns CONNECTED, or whatever came in its place."""
        self.respond(self.begin(**fields))
        self.take_last_word()
        self.respond()
        return self.client.receive()

    def shape(self) -> str:
        """The server's first message without what differs from exchange to exchange, and from user to user."""
        return re.sub(r"(r=)[^,]+|(s=)[^,]+", r"\1\2…", self.server_first)
