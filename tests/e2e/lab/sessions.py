"""A raw client whose session can end: it answers challenges as a test wants it, or does not."""

from __future__ import annotations

import selectors
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

from local.standalone import Standalone

from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.varints import varint

from .cluster import ProxyCluster
from .schema import NO_REQUEST_ID
from .waiting import eventually
from .wire import REPLY_TIMEOUT_S, WireClient, frame

REFRESH = b"PulsarAuthRefresh"
EXPIRED = "The proxy closes this connection: session expired"
DENIED = "Failed to authenticate"
PROXY_VERSION = "pulsar-trio-proxy-"
PRODUCER_ID = CONSUMER_ID = 1
SHARED, EARLIEST = 1, 1


def auth_response(credentials: bytes, method: str = "token") -> bytes:
    """An answer, to a challenge or unasked."""
    command = BaseCommand(type=BaseCommand.AUTH_RESPONSE)
    command.auth_response.client_version = "wire"
    command.auth_response.protocol_version = 19
    command.auth_response.response.auth_method_name = method
    command.auth_response.response.auth_data = credentials
    return encode_frame(command.SerializeToString())


def lookup_frame(topic: str, request_id: int) -> bytes:
    """One question."""
    return frame(BaseCommand.LOOKUP, lookup_topic={"topic": topic, "request_id": request_id})


def _send_frame(producer_name: bytes, number: int, payload: bytes) -> bytes:
    """A message: a SEND, and behind it the metadata and the payload."""
    command = BaseCommand(type=BaseCommand.SEND)
    command.send.producer_id = PRODUCER_ID
    command.send.sequence_id = number
    # MessageMetadata: producer_name = 1, sequence_id = 2, publish_time = 3.
    metadata = b"\x0a" + varint(len(producer_name)) + producer_name + b"\x10" + varint(number) + b"\x18\x01"
    return encode_frame(command.SerializeToString(), len(metadata).to_bytes(4, "big") + metadata + payload)


class Session(WireClient):
    """One connection, in lookup mode, or, with ``broker``, a relay to it, as a rule with a producer on ``topic``.

    ``port``: of a listener that is not the cluster's first.
    """

    def __init__(
        self,
        cluster: ProxyCluster,
        token: str,
        topic: str,
        *,
        broker: Standalone | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(port or cluster.port)
        self.cluster = cluster
        self.method = "token"
        self.began_at = self.connected_at = 0.0
        """Before the proxy began to count, and after it had."""
        self._token = token
        self._topic = topic
        self._target = {} if broker is None else {"proxy_to_broker_url": f"localhost:{broker.broker_port}"}
        self._producer_name = ""
        self._used = self._answered = 0
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def begin(self, *, producer: bool = True, **fields: Any) -> Self:
        """CONNECT, and in a relay PRODUCER."""
        self.began_at = time.monotonic()
        answer = self._authenticate(**{**self._target, **fields})
        assert answer.type == BaseCommand.CONNECTED, answer
        self.connected_at = time.monotonic()
        if self._target and producer:
            answer = self.producer(self._topic)
            assert answer.type == BaseCommand.PRODUCER_SUCCESS, answer
            self._producer_name = answer.producer_success.producer_name
        return self

    def _authenticate(self, **fields: Any) -> Any:
        return self.connect(**{"token": self._token, **fields})

    # ---- what it is there for

    def use(self, payload: bytes = b"payload") -> None:
        """Something that an expired session does not allow; the answer is not waited for."""
        self.send_bytes(self.next_use(payload))

    def next_use(self, payload: bytes = b"payload") -> bytes:
        """Its bytes: of a message where there is a producer, else of a question."""
        number, self._used = self._used, self._used + 1
        if self._producer_name:
            return _send_frame(self._producer_name.encode(), number, payload)
        return lookup_frame(self._topic, number)

    def assert_serves(self) -> None:
        """It can be used: the broker answers."""
        self.use()
        self.assert_answers(self.receive())

    def assert_answers(self, answer: Any) -> None:
        """This is the answer to the first use that had none yet."""
        sends = bool(self._producer_name)
        assert answer.type == (BaseCommand.SEND_RECEIPT if sends else BaseCommand.LOOKUP_RESPONSE), answer
        assert not answer.lookup_topic_response.error, answer
        number = answer.send_receipt.sequence_id if sends else answer.lookup_topic_response.request_id
        assert number == self._answered, f"an answer to {number} in place of {self._answered}"
        self._answered += 1

    def assert_all_answered(self) -> None:
        """Every use, in order, and nothing else."""
        while self._answered < self._used:
            self.assert_answers(self.receive())

    def subscribe(self, permits: int = 0) -> Self:
        """To the topic from its beginning; so many messages may come."""
        body = {"topic": self._topic, "subscription": uuid.uuid4().hex, "consumer_id": CONSUMER_ID, "request_id": 1}
        self.send(BaseCommand.SUBSCRIBE, subscribe={**body, "sub_type": SHARED, "initial_position": EARLIEST})
        answer = self.receive()
        assert answer.type == BaseCommand.SUCCESS, answer
        if permits:
            self.let_come(permits)
        return self

    def let_come(self, permits: int) -> None:
        """So many more messages."""
        self.send(BaseCommand.FLOW, flow={"consumer_id": CONSUMER_ID, "permits": permits})

    # ---- its end, and what comes before

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def wait_for_challenge(self, *, by_broker: bool = False) -> None:
        """The next command must be one, by the proxy unless it is to be the broker's own."""
        command = self.receive()
        assert command.type == BaseCommand.AUTH_CHALLENGE, command
        said = BaseCommand.FromString(command.SerializeToString()).auth_challenge
        assert (said.challenge.auth_method_name, said.challenge.auth_data) == (self.method, REFRESH)
        assert said.server_version.startswith(PROXY_VERSION) is not by_broker, said

    def wait_until(self, age_s: float) -> None:
        """Until the session is so old, at least."""
        time.sleep(max(0.0, self.connected_at + age_s - time.monotonic()))

    def answer(self, credentials: str, method: str = "token") -> None:
        """Answer it, or come unasked."""
        self.send_bytes(auth_response(credentials.encode(), method))

    def goes_on_until_it_ends(self, credentials: str) -> str:
        """It is used again and again, and says the same credentials whenever it is asked; its last word."""
        deadline = time.monotonic() + REPLY_TIMEOUT_S
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


SUCCESS = "pulsar_proxy_reauthentication_success_total"
FAILURE = "pulsar_proxy_reauthentication_failure_total"
NO_REAUTH = "pulsar_proxy_authentication_no_reauth_total"
KILLED = "pulsar_proxy_expired_connections_killed_total"
COUNTERS = {"success": SUCCESS, "failure": FAILURE, "no_reauth": NO_REAUTH, "killed": KILLED}


@contextmanager
def counting(*clusters: ProxyCluster, **expected: int) -> Iterator[None]:
    """What each of KIP-368's counters rises by in the block, in all clusters together; 0 where it is not named."""

    def counters() -> dict[str, float]:
        scrapes = [cluster.metrics() for cluster in clusters]
        return {short: sum(scrape.total(name) for scrape in scrapes) for short, name in COUNTERS.items()}

    before = counters()
    yield
    goal = {name: value + expected.get(name, 0) for name, value in before.items()}
    eventually(lambda: counters() == goal, what=f"the counters are {goal}; they were {before}")


def at_the_same_time(*works: Callable[[], object]) -> None:
    """All of them, each to its end; the first error of one is raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for work in [pool.submit(work) for work in works]:
            work.result()


def challenged_after_s(sessions: Sequence[Session]) -> list[float]:
    """After how many seconds each was challenged, in the order of that."""
    after = []
    with selectors.DefaultSelector() as selector:
        for session in sessions:
            selector.register(session, selectors.EVENT_READ, session)
        while selector.get_map():
            ready = selector.select(REPLY_TIMEOUT_S)
            assert ready, "a client is not challenged"
            now = time.monotonic()
            for key, _ in ready:
                key.data.wait_for_challenge()
                after.append(now - key.data.began_at)
                selector.unregister(key.data)
    return after
