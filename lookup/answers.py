"""The answers to one Envelope's requests, handed back in parts as they come."""

from lookup.turn import Turn
from proto.rpc_pb2 import EmbeddedResponse, EnvelopeResponse
from proxy.runtime.rpc_server import Answer

PART_BYTES_MAX = 256 * 1024
"""A part holds as many answers as are there, up to this size; a larger answer is a part of its own."""


class Answers:
    """``put`` and ``refuse`` for each of ``count`` requests once, in any order."""

    def __init__(self, count: int, answer: Answer, turn: Turn) -> None:
        self._missing = count
        self._answer = answer
        self._turn = turn
        self._ready: list[EmbeddedResponse] = []

    def put(self, index: int, response: bytes) -> None:
        """The answer to a request, a serialized BaseCommand."""
        self._add(EmbeddedResponse(index=index, response=response))

    def refuse(self, index: int, error: str, message: str) -> None:
        """A request that is not accepted: the name of an EnvelopeError, and why."""
        self._add(EmbeddedResponse(index=index, error=error, error_message=message))

    def _add(self, response: EmbeddedResponse) -> None:
        self._missing -= 1
        self._ready.append(response)
        self._turn.touch(self)

    def push(self) -> None:
        """Send what is there."""
        ready, self._ready = self._ready, []
        start, size = 0, 0
        for position, response in enumerate(ready):
            if size and size + len(response.response) > PART_BYTES_MAX:
                self._answer(_part(ready[start:position]), True)
                start, size = position, 0
            size += len(response.response)
        self._answer(_part(ready[start:]), self._missing > 0)


def _part(responses: list[EmbeddedResponse]) -> bytes:
    return EnvelopeResponse(responses=responses).SerializeToString()
