"""Connections that are read by callback: all of a process in one epoll, drained by one task.

To wake a Trio task for each chunk costs several times what the chunk itself does. So one task waits for the epoll
(epolls nest), reads whatever is there from all of its sockets, and gives it to whoever wants it; what they have to say
leaves at the end of the round (proxy.runtime.loop.tick).

What is no plain socket (TLS, a stream in a test) is read by its own task instead, behind the same call.
"""

import os
import select
import time
from collections.abc import Callable

import trio

from proxy.runtime.loop.tick import current_tick
from proxy.runtime.loop.timer_fd import TimerFd

RECEIVE_BYTES = 65_536
EVENTS_PER_ROUND = 64
LINGER_S = 0.001
BUSY_GAP_S = 0.0003
"""How long the next bytes are waited for without Trio, and how closely they must follow for that to be worth it."""

OnData = Callable[[bytes | bytearray], None]
OnEnd = Callable[[Exception | None], None]


class Reading:
    """One socket that is being read.

    ``on_end`` is called once: with None at the end of the stream, with trio.BrokenResourceError, or with what
    ``on_data`` raised. Whoever closes the socket calls ``pause`` before.
    """

    def __init__(
        self,
        epoll: select.epoll,
        readings: "dict[int, Reading]",
        descriptor: int,
        on_data: OnData,
        on_end: OnEnd,
    ) -> None:
        self._epoll = epoll
        self._readings = readings
        self._descriptor = descriptor
        self._on_data = on_data
        self._on_end = on_end
        self._registered = False
        self._ended = False

    def pause(self) -> None:
        """Leave what comes in the kernel."""
        if self._registered:
            self._registered = False
            del self._readings[self._descriptor]
            if not self._epoll.closed:
                self._epoll.unregister(self._descriptor)

    def resume(self) -> None:
        """Read what comes."""
        if not self._registered and not self._ended and not self._epoll.closed:
            self._epoll.register(self._descriptor, select.EPOLLIN)
            self._registered = True
            self._readings[self._descriptor] = self

    def on_readable(self) -> None:
        """Take what is there."""
        try:
            data = os.read(self._descriptor, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            broken = trio.BrokenResourceError(str(error))
            broken.__cause__ = error
            self._end(broken)
            return
        if not data:
            self._end(None)
            return
        try:
            self._on_data(data)
        except Exception as error:  # noqa: BLE001 -- the owner's to handle, not the other connections'
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.pause()
        self._ended = True
        self._on_end(error)


class Reactor:
    """See the module. ``may_linger`` says whether nobody else in this process is in a hurry; to be set by who knows.

    ``clock``: seconds that only go forward; a test brings its own, since a slow machine may need any time for any step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoll = select.epoll()
        self._alarm = TimerFd()
        self._epoll.register(self._alarm, select.EPOLLIN | select.EPOLLET)
        self.may_linger: Callable[[], bool] = lambda: True
        self._readings: dict[int, Reading] = {}
        self._served_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether something was read a moment ago."""
        return self._clock() - self._served_at < BUSY_GAP_S

    async def run(self) -> None:
        """Read until cancelled."""
        _current.set(self)
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                self._serve()
        finally:
            _current.set(None)
            self._epoll.close()
            self._alarm.close()

    def start_reading(self, descriptor: int, on_data: OnData, on_end: OnEnd) -> Reading:
        """Begin to read a non-blocking socket."""
        reading = Reading(self._epoll, self._readings, descriptor, on_data, on_end)
        reading.resume()
        return reading

    def _serve(self) -> None:
        """Read what is there; where much goes on, also what comes in the next moment."""
        clock = self._clock
        now = clock()
        until = now + LINGER_S
        lingers = now - self._served_at < BUSY_GAP_S and self.may_linger()
        if lingers:
            self._alarm.arm(LINGER_S)
        turn, readings = current_tick(), self._readings
        events = self._epoll.poll(0, EVENTS_PER_ROUND)
        while events:
            with turn:
                for descriptor, _mask in events:
                    reading = readings.get(descriptor)
                    if reading is not None:  # else it was ended earlier in this round
                        reading.on_readable()
            now = clock()
            if now >= until:
                break
            # Without a timeout: the alarm ends it.
            events = self._epoll.poll(-1 if lingers else 0, EVENTS_PER_ROUND)
        self._served_at = now


_current: trio.lowlevel.RunVar[Reactor | None] = trio.lowlevel.RunVar("reactor", None)


def current_reactor() -> Reactor | None:
    """The reactor of this process, where one runs."""
    return _current.get()


async def read_all(stream: trio.abc.ReceiveStream, on_data: OnData) -> None:
    """Give all that comes to ``on_data``, until the stream's end. Raises what ``on_data`` raises, and
    trio.BrokenResourceError.
    """
    reactor = current_reactor()
    if reactor is not None and isinstance(stream, trio.SocketStream):
        await _until_end(reactor, stream.socket.fileno(), on_data)
        return
    turn = current_tick()
    while data := await stream.receive_some(RECEIVE_BYTES):
        with turn:
            on_data(data)


async def _until_end(reactor: Reactor, descriptor: int, on_data: OnData) -> None:
    ended = trio.Event()
    errors: list[Exception] = []

    def on_end(error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        ended.set()

    reading = reactor.start_reading(descriptor, on_data, on_end)
    try:
        await ended.wait()
    finally:
        reading.pause()
    if errors:
        raise errors[0]
