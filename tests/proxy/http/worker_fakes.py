"""Auth and lookup workers for an HTTP worker: their real services, called without a socket."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import trio
from eager_calls import carry_out
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from auth.service import AuthService
from lookup.service import LookupService
from proto.http_rules import RequestHead, read_request
from proto.roles import Role
from proxy.config.types import Config
from proxy.config.worker_config import decode_config, encode_config, without_secrets
from proxy.http.client import HttpClient
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import AnyHandler, RpcRefused

SEAL_KEY = b"k" * 32
CLIENT = HttpClient("192.0.2.7:4000", "192.0.2.7", "https")


def make_config(**tables: Any) -> Config:
    """A configuration with a listener for HTTP."""
    return msgspec.convert({"http_listener": [{}], **tables}, Config)


def as_told(config: Config) -> Config:
    """The configuration as an HTTP worker gets it."""
    return decode_config(encode_config(without_secrets(config)))


def service_context(role: Role, config: Config, nursery: trio.Nursery) -> WorkerContext:
    """What a service is made with."""
    no_reactor: Any = None
    descriptors = Descriptors(channel=-1, liveness=-1)
    return WorkerContext(role, 0, config, SEAL_KEY, descriptors, CollectorRegistry(), nursery, no_reactor)


def auth_worker(config: Config, nursery: trio.Nursery) -> WorkerPool:
    """An auth worker."""
    return WorkerPool(AuthService(service_context(Role.AUTH, config, nursery)).handlers())


async def lookup_worker(config: Config, nursery: trio.Nursery) -> WorkerPool:
    """A lookup worker, which has looked for its brokers."""
    service = LookupService(service_context(Role.LOOKUP, as_told(config), nursery))
    await service.start()
    await trio.testing.wait_all_tasks_blocked()
    return WorkerPool(service.handlers())


class WorkerPool:
    """An RpcPool and its only client in one; calls reach the handlers of a real service."""

    def __init__(self, handlers: Mapping[int, AnyHandler]) -> None:
        self.handlers: Mapping[int, Any] = handlers
        self.calls: list[Message] = []
        self.notified: list[Message] = []
        self.is_lost = False
        self.answers: list[Message] = []
        """Instead of the service's own, the next ones first."""
        self.gate: trio.Event | None = None
        """What calls wait for before they are carried out."""
        self._ids = itertools.count(1)

    def pick_client(self) -> Any:
        return self

    def new_id(self) -> int:
        return next(self._ids)

    async def call(self, method: int, request: Message, response_type: Any, *, timeout_s: float, retry: bool) -> Any:
        assert timeout_s > 0
        assert retry, "a worker that is replaced is no reason to refuse a request"
        self.calls.append(request)
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.is_lost:
            raise RpcConnectionLost("the worker has gone")
        if self.answers:
            return self.answers.pop(0)
        try:
            answer = await carry_out(self.handlers[method], request.SerializeToString(), Caller(Role.HTTP, 1))
        except RpcRefused as refused:
            raise RpcCallRefused(refused.status, refused.detail) from None
        return response_type.FromString(answer)

    def send_notification(self, _method: int, request: Message, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.notified.append(request)


def request_head(target: str = "/admin/v2/clusters", **headers: str | bytes) -> RequestHead:
    """The head of a request; ``headers``: with _ for -."""
    encoded = {name: value if isinstance(value, bytes) else value.encode() for name, value in headers.items()}
    given = [(name.replace("_", "-").encode(), value) for name, value in encoded.items()]
    return read_request(b"GET", target.encode(), [(b"host", b"proxy.example.com"), *given], b"1.1")
