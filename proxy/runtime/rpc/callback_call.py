"""A call whose outcome comes by callback: it takes a task only where its worker is not there at once, or is lost."""

from collections.abc import Callable
from typing import Generic, TypeVar

import trio
from google.protobuf.message import Message

from proto.rpc_frames import Reply
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import ignore
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcDeadlineExceeded, RpcError
from proxy.runtime.rpc.replies import ResponseT, parse_whole, response_of

OutcomeT = TypeVar("OutcomeT")


class CallbackCall(Generic[ResponseT, OutcomeT]):
    """A call that is under way. ``on_outcome`` is called once, with what ``read`` makes of the response that
    ``RpcClient.call`` would return, or with the error that it would raise, unless the call is cancelled before.

    ``tasks``: for a call that cannot be sent at once or has to be repeated. The other arguments are those of
    ``RpcClient.call``.
    """

    __slots__ = (
        "_client",
        "_deadline",
        "_method",
        "_number",
        "_on_outcome",
        "_read",
        "_request",
        "_response_type",
        "_retry",
        "_scope",
        "_tasks",
        "_timeout_s",
    )

    def __init__(
        self,
        client: RpcClient,
        method: int,
        request: Message,
        response_type: type[ResponseT],
        *,
        tasks: TaskSpawner,
        read: Callable[[ResponseT], OutcomeT],
        on_outcome: Callable[[OutcomeT | RpcError], None],
        timeout_s: float,
        retry: bool = False,
    ) -> None:
        self._client, self._tasks = client, tasks
        self._method, self._request, self._response_type = method, request, response_type
        self._read, self._on_outcome = read, on_outcome
        self._timeout_s, self._deadline = timeout_s, trio.current_time() + timeout_s
        self._retry = retry
        self._scope: trio.CancelScope | None = None
        timeout_ms = max(1, int(timeout_s * 1000))
        self._number = client.start_call(
            method, request.SerializeToString(), self._on_reply, timeout_ms=timeout_ms, deadline=self._deadline
        )
        if self._number is None:
            self._start_task()

    def cancel(self) -> None:
        """Have the worker drop the call, and ``on_outcome`` called no more. After the outcome this does nothing."""
        if self._number is not None:
            self._client.cancel_call(self._number)
            self._number = None
        if self._scope is not None:
            self._scope.cancel()
        self._drop_callbacks()

    def _drop_callbacks(self) -> None:
        """Leave no circle of references behind: they lead back to who has the call."""
        self._on_outcome = self._read = ignore  # type: ignore[assignment]

    def _start_task(self) -> None:
        self._scope = trio.CancelScope()
        self._tasks.start_soon(self._call_in_task, self._scope)

    async def _call_in_task(self, scope: trio.CancelScope) -> None:
        with scope:
            left_s = max(0.0, self._deadline - trio.current_time())
            response: ResponseT | RpcError
            try:
                response = await self._client.call(
                    self._method, self._request, self._response_type, timeout_s=left_s, retry=self._retry
                )
            except RpcError as error:
                response = error
        if not scope.cancel_called:
            self._report(response)

    def _on_reply(self, reply: Reply | None) -> None:
        if self._number is None:  # cancelled since the connection was lost, a moment ago
            return
        self._number = None
        if reply is None and self._retry and trio.current_time() < self._deadline:
            self._start_task()
            return
        response: ResponseT | RpcError
        try:
            response = self._response(reply)
        except RpcError as error:
            response = error
        self._report(response)

    def _report(self, response: ResponseT | RpcError) -> None:
        on_outcome, read = self._on_outcome, self._read
        self._drop_callbacks()
        on_outcome(response if isinstance(response, RpcError) else read(response))

    def _response(self, reply: Reply | None) -> ResponseT:
        if reply is None:
            if trio.current_time() >= self._deadline:
                raise RpcDeadlineExceeded(f"no answer within {self._timeout_s} s")
            raise RpcConnectionLost("the worker went away")
        return parse_whole(response_of(reply), self._response_type, more=reply.has_more)
