"""The reply to one Envelope: answers to its requests, sent back in parts as they come."""

import trio

from proto.rpc_pb2 import EnvelopeResponse, RefusedRequest
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc.server import ReplyStream

PART_BYTES_MAX = 256 * 1024
"""A part holds as many answers as are there, up to this size; a larger answer is a part of its own."""


class EnvelopeReply:
    """Reply to one Envelope: takes one answer or refusal for each of ``count`` requests, in any order."""

    def __init__(self, count: int, answer: ReplyStream) -> None:
        self._missing_count = count
        self._answer = answer
        self._tick = current_tick()
        self._reset_part()

    def _reset_part(self) -> None:
        self._frames = bytearray()
        self._answered: list[int] = []
        self._refused: list[RefusedRequest] = []

    def add_answer(self, index: int, frame: bytes) -> None:
        """Add the answer to a request: a frame, ready for the client. It is sent at the end of the tick."""
        if self._frames and len(self._frames) + len(frame) > PART_BYTES_MAX:
            self._send_part()
        self._frames += frame
        self._answered.append(index)
        if len(self._answered) == 1:
            self._tick.schedule_flush(self)

    def add_refusal(self, index: int, error: str, message: str) -> None:
        """Add a request that is not accepted: the name of an EnvelopeResponse.Error, and why."""
        self._refused.append(RefusedRequest(index=index, error=error, error_message=message))
        self._tick.schedule_flush(self)

    def flush(self) -> None:
        """Send what is there."""
        self._send_part()

    async def wait_until_sent(self, timeout_s: float) -> None:
        """Wait until the forwarder has taken all that was sent so far.

        A forwarder that does not take it in time loses its connection, and with it what is kept for it.
        """
        with trio.move_on_after(timeout_s) as waiting:
            await self._answer.wait_until_sent()
        if waiting.cancelled_caught:
            self._answer.close_connection("the caller does not take its replies")

    def _send_part(self) -> None:
        self._missing_count -= len(self._answered) + len(self._refused)
        part = EnvelopeResponse(frames=bytes(self._frames), answered=self._answered)
        if self._refused:
            part.refused.extend(self._refused)
        self._reset_part()
        self._answer(part.SerializeToString(), self._missing_count > 0)
