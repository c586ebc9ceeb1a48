"""The answers to one Envelope's requests, handed back in parts as they come."""

import trio

from proto.rpc_pb2 import EnvelopeResponse, RefusedRequest
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc.server import ReplyStream

PART_BYTES_MAX = 256 * 1024
"""A part holds as many answers as are there, up to this size; a larger answer is a part of its own."""


class Answers:
    """``put`` and ``refuse`` for each of ``count`` requests once, in any order."""

    def __init__(self, count: int, answer: ReplyStream) -> None:
        self._missing = count
        self._answer = answer
        self._turn = current_tick()
        self._forget()

    def _forget(self) -> None:
        self._frames = bytearray()
        self._answered: list[int] = []
        self._refused: list[RefusedRequest] = []

    def put(self, index: int, frame: bytes) -> None:
        """The answer to a request: a frame, ready for the client."""
        if self._frames and len(self._frames) + len(frame) > PART_BYTES_MAX:
            self._send()
        self._frames += frame
        self._answered.append(index)
        if len(self._answered) == 1:
            self._turn.schedule_flush(self)

    def refuse(self, index: int, error: str, message: str) -> None:
        """A request that is not accepted: the name of an EnvelopeResponse.Error, and why."""
        self._refused.append(RefusedRequest(index=index, error=error, error_message=message))
        self._turn.schedule_flush(self)

    def flush(self) -> None:
        """Send what is there."""
        self._send()

    async def until_sent(self, timeout_s: float) -> None:
        """Wait until the forwarder has got what was sent so far. One that does not take it in time loses its
        connection, and with it what is kept for it.
        """
        with trio.move_on_after(timeout_s) as waiting:
            await self._answer.wait_until_sent()
        if waiting.cancelled_caught:
            self._answer.close_connection("the caller does not take its replies")

    def _send(self) -> None:
        self._missing -= len(self._answered) + len(self._refused)
        part = EnvelopeResponse(frames=bytes(self._frames), answered=self._answered)
        if self._refused:
            part.refused.extend(self._refused)
        self._forget()
        self._answer(part.SerializeToString(), self._missing > 0)
