"""A raw client whose session can end: it answers challenges as a test wants it, or does not."""

from __future__ import annotations

import selectors
import ssl
import time
from collections.abc import Sequence
from typing import Any, Self

from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .cluster import ProxyCluster
from .schema import NO_REQUEST_ID
from .wire import REPLY_TIMEOUT_S, WireClient, frame

REFRESH = b"PulsarAuthRefresh"
EXPIRED = "The proxy closes this connection: session expired"
DENIED = "Failed to authenticate"
PRODUCER_ID = 1


def auth_response(credentials: bytes, method: str = "token") -> bytes:
    """An answer, to a challenge or unasked."""
    command = BaseCommand(type=BaseCommand.AUTH_RESPONSE)
    command.auth_response.client_version = "wire"
    command.auth_response.protocol_version = 19
    command.auth_response.response.auth_method_name = method
    command.auth_response.response.auth_data = credentials
    data = command.SerializeToString()
    return (len(data) + 4).to_bytes(4, "big") + len(data).to_bytes(4, "big") + data


def lookup_frame(topic: str, request_id: int) -> bytes:
    """One question."""
    return frame(BaseCommand.LOOKUP, lookup_topic={"topic": topic, "request_id": request_id})


class Session(WireClient):
    """One connection, in lookup mode, or, with ``broker``, a relay to it with a producer on ``topic``."""

    def __init__(
        self,
        cluster: ProxyCluster,
        token: str,
        topic: str,
        *,
        broker: Standalone | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(cluster.port)
        self.cluster = cluster
        self.began_at = self.connected_at = 0.0
        """Before the proxy began to count, and after it had."""
        self._topic = topic
        self._in_relay = broker is not None
        self._hello = {"token": token}
        if broker is not None:
            self._hello["proxy_to_broker_url"] = f"localhost:{broker.broker_port}"
        self._producer_name = ""
        self._sequence = 0
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def begin(self, *, producer: bool = True, **fields: Any) -> Self:
        """CONNECT, and in a relay PRODUCER."""
        self.began_at = time.monotonic()
        answer = self.connect(**{**self._hello, **fields})
        assert answer.type == BaseCommand.CONNECTED, answer
        self.connected_at = time.monotonic()
        if self._in_relay and producer:
            answer = self.producer(self._topic)
            assert answer.type == BaseCommand.PRODUCER_SUCCESS, answer
            self._producer_name = answer.producer_success.producer_name
        return self

    def use(self) -> None:
        """Something that an expired session does not allow; the answer is not waited for."""
        if self._in_relay:
            self.send_bytes(self._send_frame())
        else:
            self.send_bytes(lookup_frame(self._topic, 7))

    def assert_serves(self) -> None:
        """It can be used: the broker answers."""
        self.use()
        answer = self.receive()
        assert answer.type == (BaseCommand.SEND_RECEIPT if self._in_relay else BaseCommand.LOOKUP_RESPONSE), answer
        assert not answer.lookup_topic_response.error, answer

    def _send_frame(self) -> bytes:
        """A message: a SEND, and behind it the metadata and a payload."""
        command = BaseCommand(type=BaseCommand.SEND)
        command.send.producer_id = PRODUCER_ID
        command.send.sequence_id = self._sequence
        name = self._producer_name.encode()
        # MessageMetadata: producer_name = 1, sequence_id = 2, publish_time = 3.
        metadata = b"\x0a" + bytes([len(name)]) + name + b"\x10" + bytes([self._sequence]) + b"\x18\x01"
        self._sequence += 1
        data = command.SerializeToString()
        rest = len(metadata).to_bytes(4, "big") + metadata + b"payload"
        return (len(data) + 4 + len(rest)).to_bytes(4, "big") + len(data).to_bytes(4, "big") + data + rest

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def wait_for_challenge(self) -> None:
        """The next command must be one."""
        command = self.receive()
        assert command.type == BaseCommand.AUTH_CHALLENGE, command
        challenge = BaseCommand.FromString(command.SerializeToString()).auth_challenge.challenge
        assert (challenge.auth_method_name, challenge.auth_data) == ("token", REFRESH)

    def wait_until(self, age_s: float) -> None:
        """Until the session is so old, at least."""
        time.sleep(max(0.0, self.connected_at + age_s - time.monotonic()))

    def answer(self, credentials: str, method: str = "token") -> None:
        """Answer it, or come unasked."""
        self.send_bytes(auth_response(credentials.encode(), method))

    def goes_on_until_it_ends(self, credentials: str) -> str:
        """It is used again and again, and says the same credentials whenever it is asked; its last word."""
        deadline = time.monotonic() + 10.0
        while True:
            assert time.monotonic() < deadline, "it does not end"
            self.use()
            command = self.receive()
            if command.type == BaseCommand.AUTH_CHALLENGE:
                self.answer(credentials)
                command = self.receive()
            if command.type == BaseCommand.ERROR:
                assert self.wait_for_end() == []
                return str(command.error.message)
            time.sleep(0.05)

    def assert_ends_with(self, text: str) -> None:
        """An error that answers no request, and then the end, in order."""
        (error,) = self.wait_for_end()
        assert error.type == BaseCommand.ERROR, error
        said = (error.error.request_id, error.error.error, error.error.message)
        assert said == (NO_REQUEST_ID, ServerError.AuthenticationError, text)


def challenged_after_s(sessions: Sequence[Session]) -> list[float]:
    """After how many seconds each was challenged, in the order of that."""
    after = []
    with selectors.DefaultSelector() as selector:
        for session in sessions:
            selector.register(session, selectors.EVENT_READ, session)
        while selector.get_map():
            ready = selector.select(REPLY_TIMEOUT_S)
            assert ready, "somebody is not challenged"
            now = time.monotonic()
            for key, _ in ready:
                key.data.wait_for_challenge()
                after.append(now - key.data.began_at)
                selector.unregister(key.data)
    return after
