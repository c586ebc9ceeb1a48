"""Requests of lookup mode that travel in one Envelope."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from proxy.runtime.rpc.errors import RpcDeadlineExceeded


class LookupBatch:
    """The requests of one Envelope. ``waiting``: those without an answer, by their number in the Envelope.

    ``deadline``: in Trio's time, for all attempts together. ``answer_bytes``: how much was sent to the client in answer
    to them.
    """

    __slots__ = ("answer_bytes", "deadline", "waiting")

    def __init__(self, requests: Sequence[bytes], deadline: float) -> None:
        self.answer_bytes = 0
        self.deadline = deadline
        self.waiting = dict(enumerate(requests))

    def take_waiting(self) -> list[bytes]:
        """Return the requests without an answer, which wait no longer."""
        left = list(self.waiting.values())
        self.waiting.clear()
        return left

    def renumber_waiting(self) -> None:
        """Give the requests without an answer numbers from 0 on, for another Envelope."""
        self.waiting = dict(enumerate(self.waiting.values()))

    @contextmanager
    def fail_at_deadline(self) -> Iterator[None]:
        """Raise RpcDeadlineExceeded where the body takes until the deadline."""
        try:
            with trio.fail_at(self.deadline):
                yield
        except trio.TooSlowError:
            raise RpcDeadlineExceeded("no answer in time") from None
