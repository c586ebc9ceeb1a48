"""A broker that answers every lookup, counts what it is asked, and has a namespace with very many topics."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import Any

from proto.frames import FrameDecoder, encode_frame
from proto.pulsar_pb2 import BaseCommand
from proto.varints import varint

from .fakes import connected
from .schema import LOOKUP_CONNECT, Command
from .wire import frame

_TOPICS_TAG = 0x12
"""Field 2 of Pulsar's CommandGetTopicsOfNamespaceResponse, strings."""

_SCHEMA_TAG = 0x22
"""Field 4 of Pulsar's CommandGetSchemaResponse, a message that is not parsed here."""


class CountingBroker:
    """A behaviour for FakeBroker. ``list_bytes``: about how large the answer with all topics of a namespace is;
    ``schema_bytes``: how large the schema of every topic is.

    It answers nothing as long as ``may_answer`` is not set.
    """

    def __init__(self, list_bytes: int = 0, schema_bytes: int = 0) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: Counter[str] = Counter()
        """How often each topic or namespace was asked for."""
        self.connections = 0
        """Connections that came past their CONNECT."""
        self._lock = threading.Lock()
        name = b"persistent://public/many/a-topic-with-a-name-of-a-usual-length-"
        topics = (name + b"%08d" % number for number in range(list_bytes // (len(name) + 10)))
        self._schema = bytes([_SCHEMA_TAG]) + varint(schema_bytes) + bytes(schema_bytes)
        self._topics = b"".join(bytes([_TOPICS_TAG, len(topic)]) + topic for topic in topics)

    @property
    def list_bytes(self) -> int:
        """How large a topic list is."""
        return len(self._topics)

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        decoder = FrameDecoder(max_frame_bytes=1 << 20)
        while data := connection.recv(1 << 16):
            decoder.receive_data(data)
            answers = []
            while (received := decoder.next_frame()) is not None:
                answers.append(self._answer(received.command))
            self.may_answer.wait(100)
            connection.sendall(b"".join(answers))

    def _answer(self, data: bytes) -> bytes:
        command = Command.FromString(data)
        match command.type:
            case BaseCommand.PING:
                return frame(BaseCommand.PONG, pong={})
            case BaseCommand.CONNECT:
                with self._lock:
                    self.connections += 1
                return connected()
            case BaseCommand.LOOKUP:
                return self._found(command.lookup_topic)
            case BaseCommand.GET_TOPICS_OF_NAMESPACE:
                return self._list(BaseCommand.FromString(data).get_topics_of_namespace)
            case BaseCommand.GET_SCHEMA:
                return self._schema_of(BaseCommand.FromString(data).get_schema)
        return b""

    def _count(self, name: str) -> None:
        with self._lock:
            self.asked[name] += 1

    def _found(self, request: Any) -> bytes:
        """The broker of a topic carries the topic's name, so that a mix-up shows."""
        self._count(request.topic)
        body = {
            "request_id": request.request_id,
            "response": LOOKUP_CONNECT,
            "broker_service_url": broker_of(request.topic),
            "authoritative": True,
        }
        return frame(BaseCommand.LOOKUP_RESPONSE, lookup_topic_response=body)

    def _list(self, request: Any) -> bytes:
        self._count(request.namespace)
        answer = BaseCommand(type=BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE)
        answer.get_topics_of_namespace_response.request_id = request.request_id
        answer.get_topics_of_namespace_response.MergeFromString(self._topics)
        return encode_frame(answer.SerializeToString())

    def _schema_of(self, request: Any) -> bytes:
        self._count(request.topic)
        answer = BaseCommand(type=BaseCommand.GET_SCHEMA_RESPONSE)
        answer.get_schema_response.request_id = request.request_id
        answer.get_schema_response.MergeFromString(self._schema)
        return encode_frame(answer.SerializeToString())


def broker_of(topic: str) -> str:
    """The broker that has a topic, says CountingBroker."""
    return f"pulsar://{topic.rpartition('/')[2]}.example:6650"
