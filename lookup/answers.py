"""The answers to one Envelope's requests, handed back in parts as they come."""

from collections import deque

import trio

from proto.rpc_pb2 import EmbeddedResponse, EnvelopeResponse

PART_BYTES_MAX = 256 * 1024
"""A part holds as many answers as are there, up to this size; a larger answer is a part of its own."""


class Answers:
    """``put`` and ``refuse`` for each of ``count`` requests once, in any order; ``next_part`` until there is no more."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._ready: deque[EmbeddedResponse] = deque()
        self._something = trio.Event()

    def put(self, index: int, response: bytes) -> None:
        """The answer to a request, a serialized BaseCommand."""
        self._add(EmbeddedResponse(index=index, response=response))

    def refuse(self, index: int, error: str, message: str) -> None:
        """A request that is not accepted: the name of an EnvelopeError, and why."""
        self._add(EmbeddedResponse(index=index, error=error, error_message=message))

    def _add(self, response: EmbeddedResponse) -> None:
        self._missing -= 1
        self._ready.append(response)
        self._something.set()

    async def next_part(self) -> tuple[bytes, bool]:
        """A serialized EnvelopeResponse with what is there (once something is), and whether more follow it."""
        while not self._ready and self._missing:
            self._something = trio.Event()
            await self._something.wait()
        part = EnvelopeResponse()
        size = 0
        while self._ready and (not size or size + len(self._ready[0].response) <= PART_BYTES_MAX):
            response = self._ready.popleft()
            size += len(response.response)
            part.responses.append(response)
        return part.SerializeToString(), bool(self._ready or self._missing)
