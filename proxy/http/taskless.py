"""Requests that are served by callback: the connection's task sleeps as long as nothing but such requests come.

To wake a Trio task for a request, and once more for its response, with a scope for the wait, takes as long as all the
rest of a small exchange. A client's next request mostly has the headers of its last one, an upstream's connection is at
hand, and the response comes at once and whole. The very coroutine that serves a request in the connection's task
(``HttpConnection.serve_received``) is run eagerly then (proxy.common.eager), in the reactor's callback. Whatever would
wait goes on in the task, with the same coroutine: there is one set of rules.
"""

import math
import select
from collections.abc import Coroutine
from typing import Any, Final, Protocol

import outcome
import trio

from proxy.common.eager import Finished, continue_in_task, step_eagerly
from proxy.http.messages import MessageCut, MessageStream
from proxy.runtime.loop.reactor import Reactor, current_reactor

WATCH_AFTER_S: Final = 0.05
"""A response that takes longer than that is waited for in the task, which watches the client."""

IDLE_SLACK_S: Final = 1.0
"""By so much an idle connection may be closed late: its deadline is not renewed for each request."""


class Connection(Protocol):
    """A client's connection, as HttpConnection is one."""

    scope: trio.CancelScope
    is_idle: bool

    @property
    def idle_timeout_s(self) -> float:
        """How long it may be without a request."""
        ...

    @property
    def head_bytes_max(self) -> int:
        """Bound of a request's head."""
        ...

    def is_as_before(self, received: bytes) -> bool:
        """Return whether what was received is one whole request without a body, with the headers of the last one."""
        ...

    async def serve_received(self) -> bool:
        """Serve a request of which bytes are there, eagerly; return False where the connection is to be closed."""
        ...


class _Slow:
    """Requests that wait for their response without a task, in the order in which they began to."""

    def __init__(self) -> None:
        self.waiting: dict[TasklessServing, int] = {}
        self._round = 0
        self._is_watched = False

    def add(self, one: "TasklessServing") -> None:
        """Have ``took_long`` called after WATCH_AFTER_S, at most twice that, unless it is removed before."""
        self.waiting[one] = self._round
        if not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(self._watch)

    async def _watch(self) -> None:
        try:
            while self.waiting:
                await trio.sleep(WATCH_AFTER_S)
                for one, since in list(self.waiting.items()):
                    if since < self._round:
                        one.took_long()
                self._round += 1
        finally:
            self._is_watched = False


_slow: trio.lowlevel.RunVar[_Slow] = trio.lowlevel.RunVar("http_slow")


def taskless_serving(connection: Connection, wire: MessageStream) -> "TasklessServing | None":
    """Return what serves a connection's next requests; None where that needs a task: there is TLS, or no reactor."""
    reactor = current_reactor()
    if reactor is None or not wire.is_plain:
        return None
    try:
        slow = _slow.get()
    except LookupError:
        slow = _Slow()
        _slow.set(slow)
    return TasklessServing(connection, wire, reactor, slow)


class TasklessServing:
    """The service of a connection from one request on, until there is something for its task. ``run`` it once."""

    def __init__(self, connection: Connection, wire: MessageStream, reactor: Reactor, slow: _Slow) -> None:
        self._connection = connection
        self._wire = wire
        self._reactor = reactor
        self._slow = slow
        self._task = trio.lowlevel.current_task()
        self._client = wire.transport.socket.fileno()
        self._request: Coroutine[Any, Any, bool] | None = None
        self._upstream: MessageStream | None = None
        self._has_more = False
        self._idle_until = 0.0

    async def run(self) -> bool:
        """Serve requests; return False where the connection is to be closed. Raises what ``serve_received`` raises."""
        self._postpone_idle_end()
        try:
            try:
                self._reactor.watch(self._client, select.EPOLLIN, self._on_client)
            except OSError:  # the kernel has no room for it
                return await self._wire.fill(self._connection.head_bytes_max)
            goes_on: bool = await trio.lowlevel.wait_task_rescheduled(self._abort)
        except BaseException as error:
            if self._request is not None:
                self._request.throw(error)  # so that it ends what it has begun
            raise
        finally:
            self._connection.scope.deadline = math.inf
        return goes_on if self._request is None else await continue_in_task(self._request)

    def took_long(self) -> None:
        """Go on in the task: the upstream does not answer at once."""
        self._wake(outcome.Value(True))

    def _on_client(self) -> None:
        """Serve what a client sends. During a request that is only remembered.

        It would be told of again and again as long as it is unread; that something is left, or the connection's end,
        behind what was read, it must be told of. So it is watched for less meanwhile (errors, each once).
        """
        if self._request is not None:
            self._has_more = True
            self._reactor.watch(self._client, select.EPOLLET, self._on_client)
            return
        connection, wire = self._connection, self._wire
        try:
            received = wire.transport.socket.recv(connection.head_bytes_max)
        except BlockingIOError:
            return
        except OSError as error:
            self._wake(outcome.Error(MessageCut(str(error))))
            return
        wire.unread = received
        if received and connection.is_as_before(received):
            connection.is_idle = False
            self._postpone_idle_end()
            self._request = connection.serve_received()
            self._step()
        else:
            self._wake(outcome.Value(bool(received)))

    def _on_upstream(self) -> None:
        self._forget_upstream()
        self._step(is_readable=True)

    def _step(self, *, is_readable: bool = False) -> None:
        """Serve the request until it has ended, or waits."""
        assert self._request is not None
        try:
            found = step_eagerly(self._request, is_readable=is_readable)
        except BaseException as error:  # noqa: BLE001 -- raised in the task
            self._request = None
            self._wake(outcome.Error(error))
            return
        if isinstance(found, Finished):
            self._request = None
            if not found.value or self._wire.unread:
                self._wake(outcome.Value(found.value))
                return
            self._connection.is_idle = True
            if self._has_more:
                self._has_more = False
                self._reactor.watch(self._client, select.EPOLLIN, self._on_client)
        elif found is None:
            self._wake(outcome.Value(True))
        else:
            assert isinstance(found, MessageStream)
            try:
                found.call_when_readable(self._reactor, self._on_upstream)
            except OSError:  # the kernel has no room for it
                self._wake(outcome.Value(True))
                return
            self._upstream = found
            self._slow.add(self)

    def _forget_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.on_readable = None
            self._upstream = None
            del self._slow.waiting[self]

    def _stop(self) -> None:
        """Be called back no more."""
        self._forget_upstream()
        self._reactor.forget(self._client)

    def _wake(self, result: "outcome.Outcome[bool]") -> None:
        """Have the task go on; a request under way is its own from now on."""
        self._stop()
        self._connection.scope.deadline = math.inf
        trio.lowlevel.reschedule(self._task, result)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._stop()
        return trio.lowlevel.Abort.SUCCEEDED

    def _postpone_idle_end(self) -> None:
        """Have the connection end where no request comes for the idle timeout."""
        until = trio.current_time() + self._connection.idle_timeout_s
        if self._idle_until < until + IDLE_SLACK_S / 2:
            self._idle_until = self._connection.scope.deadline = until + IDLE_SLACK_S


def waiting_without_task() -> int:
    """Return how many requests wait for their responses without a task."""
    try:
        return len(_slow.get().waiting)
    except LookupError:
        return 0
