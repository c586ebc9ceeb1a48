"""The reactor: sockets of a process that are read by callback, all in one epoll.

To wake a Trio task for each chunk costs several times what the chunk itself does. So one task drains the epoll
(proxy.runtime.loop.epoll_loop), reads what is there from each socket, and passes it to the socket's callback. What the
callbacks want to send leaves at the end of the batch (proxy.runtime.loop.tick).

What is no plain socket (TLS, a stream in a test) is read by a task of its own instead, behind the same call.
"""

import os
import select
import time
from collections.abc import Callable

import trio

from proxy.common.logs import get_logger
from proxy.runtime.loop.epoll_loop import EpollLoop, Events
from proxy.runtime.loop.tcp_stream import RECEIVE_BYTES, plain_socket
from proxy.runtime.loop.tick import Tick, current_tick

OnData = Callable[[bytes | bytearray], None]
TurnOnData = Callable[[bytes | bytearray], bool | None]
OnEnd = Callable[[Exception | None], None]


class Reading:
    """The reading of one socket, which can be paused and resumed.

    ``on_end`` is called once: with None at the end of the stream, with trio.BrokenResourceError, or with the exception
    that ``on_data`` raised. The owner calls ``pause`` before it closes the socket.
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
        """Leave what arrives in the kernel; does nothing if already paused."""
        if self._registered:
            self._registered = False
            del self._readings[self._descriptor]
            if not self._epoll.closed:
                self._epoll.unregister(self._descriptor)

    def resume(self) -> None:
        """Read what arrives, unless the stream has ended."""
        if not self._registered and not self._ended and not self._epoll.closed:
            self._epoll.register(self._descriptor, select.EPOLLIN)
            self._registered = True
            self._readings[self._descriptor] = self

    def on_readable(self) -> None:
        """Read what is there, at most RECEIVE_BYTES, and pass it to ``on_data``."""
        try:
            data = os.read(self._descriptor, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            broken = trio.BrokenResourceError(str(error))
            broken.__cause__ = error
            self.end(broken)
            return
        if not data:
            self.end(None)
            return
        try:
            self._on_data(data)
        except Exception as error:  # noqa: BLE001 -- the owner's to handle, not the other connections'
            self.end(error)

    def end(self, error: Exception | None) -> None:
        """End the reading for good, also for ``on_data``, which may find the stream's end in what it was given."""
        if self._ended:
            return
        self.pause()
        self._ended = True
        self._on_end(error)


class Reactor(EpollLoop):
    """The sockets of a process that are read by callback; ``run`` is the task that reads them.

    ``clock``: monotonic seconds; a test brings its own, since a slow machine may need any time for any step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(self._process_events, clock=clock)
        self._readings: dict[int, Reading] = {}
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}
        self._tick: Tick

    async def run(self) -> None:
        """Read until cancelled."""
        _current.set(self)
        self._tick = current_tick()
        try:
            await super().run()
        finally:
            _current.set(None)

    def start_reading(self, descriptor: int, on_data: OnData, on_end: OnEnd) -> Reading:
        """Start to read a non-blocking socket."""
        reading = Reading(self.epoll, self._readings, descriptor, on_data, on_end)
        reading.resume()
        return reading

    def watch(self, descriptor: int, mask: int, on_ready: Callable[[], None]) -> None:
        """Call ``on_ready`` whenever a descriptor is ready for one of the mask's events (epoll's), until ``forget``.

        May be repeated, with another mask. An error in the callback is logged; the owner must not raise any.
        """
        watched = self._watched.get(descriptor)
        if watched is None:
            self.epoll.register(descriptor, mask)
            self._watched[descriptor] = mask, on_ready
        elif watched[0] != mask:
            self.epoll.modify(descriptor, mask)
            self._watched[descriptor] = mask, on_ready

    def forget(self, descriptor: int) -> None:
        """Watch a descriptor no more, before it is closed or read by another; does nothing if it is not watched."""
        if self._watched.pop(descriptor, None) is not None and not self.epoll.closed:
            self.epoll.unregister(descriptor)

    def _process_events(self, events: Events) -> None:
        readings, watched = self._readings, self._watched
        with self._tick:
            for descriptor, _mask in events:
                if (reading := readings.get(descriptor)) is not None:
                    reading.on_readable()
                elif (one := watched.get(descriptor)) is not None:  # else it has ended earlier in this batch
                    try:
                        one[1]()
                    except Exception as error:  # noqa: BLE001 -- the other connections go on
                        get_logger().error("a descriptor that is ready met a defect", exc_info=error)
                        self.forget(descriptor)


_current: trio.lowlevel.RunVar[Reactor | None] = trio.lowlevel.RunVar("reactor", None)


def current_reactor() -> Reactor | None:
    """Return the reactor of this process; None where none runs."""
    return _current.get()


async def read_all(
    stream: trio.abc.ReceiveStream, on_data: TurnOnData, process_turn: Callable[[], bool] = lambda: False
) -> None:
    """Pass all that arrives to ``on_data`` until the stream's end.

    Where ``on_data`` returns True, it has left much to do: nothing is read until ``process_turn`` has returned False.
    Before each of its calls it is the turn of other connections and tasks. Raises what the two raise, and
    trio.BrokenResourceError.
    """
    reactor, sock = current_reactor(), plain_socket(stream)
    if reactor is not None and sock is not None:
        await _until_end(reactor, sock.fileno(), on_data, process_turn)
        return
    tick = current_tick()
    while data := await stream.receive_some(RECEIVE_BYTES):
        with tick:
            much_left = on_data(data)
        if much_left:
            await _process_turns(process_turn)


async def _process_turns(process_turn: Callable[[], bool]) -> None:
    much_left, tick = True, current_tick()
    while much_left:
        await trio.lowlevel.checkpoint()
        with tick:
            much_left = process_turn()


async def _until_end(reactor: Reactor, descriptor: int, on_data: TurnOnData, process_turn: Callable[[], bool]) -> None:
    ended = False
    errors: list[Exception] = []
    wake = trio.Event()

    def on_chunk(data: bytes | bytearray) -> None:
        if on_data(data):
            reading.pause()
            wake.set()

    def on_end(error: Exception | None) -> None:
        nonlocal ended
        ended = True
        if error is not None:
            errors.append(error)
        wake.set()

    reading = reactor.start_reading(descriptor, on_chunk, on_end)
    try:
        while not ended:
            await wake.wait()
            if not ended:
                wake = trio.Event()
                await _process_turns(process_turn)
                reading.resume()
    finally:
        reading.pause()
    if errors:
        raise errors[0]
