"""What one turn of the event loop has to say to others, said once at the end of the turn.

A chunk from a broker answers many requests, an Envelope asks many: each connection then gets all of its bytes in one
system call.
"""

from typing import Protocol

from proxy.runtime.logs import get_logger


class Pushable(Protocol):
    """Something that holds back what it has to say."""

    def push(self) -> None:
        """Say it."""
        ...


class Turn:
    """``touch`` whoever has something to say; ``end`` lets them say it."""

    def __init__(self) -> None:
        self._touched: dict[Pushable, None] = {}

    def touch(self, who: Pushable) -> None:
        """Remember somebody for the end."""
        self._touched[who] = None

    def end(self) -> None:
        """Let everybody say what they have to say."""
        while self._touched:
            touched, self._touched = self._touched, {}
            for who in touched:
                try:
                    who.push()
                except Exception as error:  # noqa: BLE001 -- what one cannot say must not keep the others from it
                    get_logger().error("what was to be said at the end of a turn met a defect", exc_info=error)
