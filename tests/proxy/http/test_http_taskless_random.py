"""The same random clients and servers, with and without tasks: the same answers, counts and log, and nothing left.

Each client has its own token, and servers answer with the role that they were told: no request may have another's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import h11
import msgspec
import pytest
import structlog.testing
import trio
from http_fakes import Received, Setup, UpstreamConnection, opened, pair
from prometheus_client import CollectorRegistry
from trio.testing import MockClock, wait_all_tasks_blocked

from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, Denied, Principal
from proxy.common.deny_list import DenyList
from proxy.config.types import Config
from proxy.http import taskless
from proxy.http.authentication import HttpAuthenticator
from proxy.http.client import HttpClient
from proxy.http.connections import Connection, Connections, WorkerRequests
from proxy.http.metrics import HttpMetrics
from proxy.http.server import HttpConnection
from proxy.http.taskless import waiting_without_task
from proxy.runtime.loop.reactor import current_reactor
from proxy.runtime.loop.tcp_stream import TcpStream

SEED = int(os.environ.get("PULSAR_PROXY_TEST_SEED", "34"))
PLANS = int(os.environ.get("PULSAR_PROXY_TEST_PLANS", "24"))
STEPS = 40
CLIENTS = 4
SHORT_S, LONG_S, IDLE_S, LONG_STEP_S = 0.001, 0.3, 9.0, 0.06
HEAD_BYTES_MAX = 1024

Step = tuple[Any, ...]

ANSWERS = {
    "plain": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b", b""),
    "chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n", b""),
    "hints": (b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b", b""),
    "pieces": (b"HTTP/1.1 200 OK\r\nContent-", b"Length: %d\r\n\r\n%b"),
    "parts": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", b"%b"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n", b"%b\r\n0\r\n\r\n"),
    "held": (b"", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"),
    "more": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%bHTTP/1.1 200 OK\r\n\r\n", b""),
    "large": (b"HTTP/1.1 200 OK\r\nContent-Length: 80000\r\n\r\n" + bytes(80_000), b""),
    "malformed": (b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n", b""),
    "unasked": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b""),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "unchanged": (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", b""),
    "missing": (b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b", b""),
    "until close": (b"HTTP/1.1 200 OK\r\n\r\n%.0d%b", b""),
    "until later": (b"HTTP/1.1 200 OK\r\n\r\n", b"%.0d%b"),
    "closing": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b", b""),
    "closed": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b", b""),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 1%d\r\n\r\n%b", b""),
    "cut later": (b"HTTP/1.1 200 OK\r\nContent-Length: 1%d\r\n\r\n", b"%b"),
    "silent": (b"", b""),
    "reset": (b"", b""),
    "elsewhere": (
        b"HTTP/1.1 307 Elsewhere\r\nLocation: http://broker-1:8080/admin/plain/x\r\nContent-Length: 0\r\n\r\n",
        b"",
    ),
}
"""What servers answer by the path's second segment: at once, and once they go on. ``%d``: the body's length."""

CLOSES = {"until close", "until later", "closing", "closed", "cut", "cut later", "silent", "reset"}

MALFORMED = [
    b"GET /admin/plain/x HTTP/1.1\nHost: x\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01",
    b"\r\n\r\nGET /",
    b"GET /admin/" + b"x" * HEAD_BYTES_MAX,
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /admin/x HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"POST /admin/plain/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


def role_of(number: int) -> str:
    """The role of a client by its number."""
    return f"role-{number}"


class Planner:
    """Makes one plan: what clients, servers and operators do, in this order."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._unsent: dict[int, bytes] = {}
        self._numbers = list(range(CLIENTS))
        self._count = 0

    def plan(self) -> list[Step]:
        """All steps."""
        steps: list[Step] = [("connect", number, b"") for number in self._numbers]
        for _ in range(self._chance.randrange(3)):
            steps += [("send", number, self._request(number, "plain")) for number in self._numbers] + [("settle",)]
        steps += [self._step() for _ in range(STEPS)]
        if self._chance.random() < 0.3:
            steps.insert(self._chance.randrange(len(steps) // 2, len(steps)), ("drain",))
        return steps

    def _step(self) -> Step:
        chance, number = self._chance, self._chance.choice(self._numbers)
        kind = chance.choices(
            [
                "send",
                "settle",
                "go on",
                "wait",
                "end",
                "leave",
                "reset",
                "last",
                "connect",
                "deny",
                "reload",
                "cancel",
                "auth",
            ],
            [50, 25, 10, 10, 2, 2, 2, 2, 4, 2, 2, 1, 2],
        )[0]
        if kind == "send":
            return kind, number, self._data(number)
        if kind == "last":
            return kind, number, self._request(number, "plain"), chance.choice(["leave", "end"])
        if kind == "wait":
            return kind, chance.choices([SHORT_S, LONG_S, 1.2, IDLE_S], [5, 3, 2, 1])[0]
        if kind == "connect":
            self._numbers.remove(number)
            self._numbers.append(new := max([*self._numbers, number]) + 1)
            return kind, new, self._data(new) if chance.random() < 0.5 else b""
        return kind, number

    def _data(self, number: int) -> bytes:
        chance = self._chance
        data = self._unsent.pop(number, b"")
        if not data or chance.random() < 0.3:
            for _ in range(chance.choice([1, 1, 1, 1, 1, 2, 3])):
                data += self._request(number)
        if chance.random() < 0.2:
            cut = chance.randrange(len(data))
            data, self._unsent[number] = data[:cut], data[cut:]
        return data

    def _request(self, number: int, answer: str = "") -> bytes:
        chance = self._chance
        self._count += 1
        answer = answer or chance.choices(list(ANSWERS), [30 if one in {"plain", "held"} else 2 for one in ANSWERS])[0]
        target = f"/admin/{answer.replace(' ', '-')}/{self._count}"
        shape = chance.choices(
            [
                "GET",
                "HEAD",
                "DELETE",
                "POST",
                "chunks",
                "other",
                "nobody",
                "1.0",
                "close",
                "status",
                "nowhere",
                "bad",
                "largest",
            ],
            [60, 4, 3, 4, 2, 4, 1, 1, 1, 2, 2, 1, 2],
        )[0]
        if shape == "bad":
            return chance.choice(MALFORMED)
        method = shape if shape in {"HEAD", "DELETE", "POST"} else "POST" if shape == "chunks" else "GET"
        target = {"status": "/status.html", "nowhere": "/elsewhere"}.get(shape, target)
        credentials = f"Authorization: Bearer {role_of(number)}\r\n" if shape != "nobody" else ""
        further = {
            "POST": "Content-Length: 5\r\n",
            "chunks": "Transfer-Encoding: chunked\r\n",
            "other": f"X-Other: {self._count}\r\n",
            "close": "Connection: close\r\n",
        }.get(shape, "")
        body = {"POST": "12345", "chunks": "5\r\n12345\r\n0\r\n\r\n"}.get(shape, "")
        version = "1.0" if shape == "1.0" else "1.1"
        head = f"{method} {target} HTTP/{version}\r\nHost: x\r\n{credentials}{further}\r\n"
        if shape == "largest":
            head = head.replace(" HTTP", f"?{'x' * (HEAD_BYTES_MAX - len(head) - 1)} HTTP")
        return (head + body).encode()


class AuthWorkers:
    """The auth workers: a token is its role. ``is_slow``: they take their time."""

    def __init__(self) -> None:
        self.is_slow = False

    def pick_client(self) -> Any:
        """The only one."""
        return self

    def new_id(self) -> int:
        """Any."""
        return 1

    async def call(self, _method: int, request: AuthenticateRequest, *_: object, **__: object) -> AuthenticateResponse:
        """The role of a token."""
        await trio.sleep(SHORT_S / 2 if self.is_slow else 0)
        if not request.data:
            return AuthenticateResponse(denied=Denied(reason="bad_credentials"))
        found = AuthenticateResponse()
        found.authenticated.principal.CopyFrom(Principal(name=request.data.decode()))
        found.authenticated.credentials.append(request.data)
        return found


class Log:
    """The audit log, as what was written."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def writes(self, _event: str) -> bool:
        """All."""
        return True

    def write(self, _event: str, **entry: Any) -> None:
        """Keep what does not depend on the time."""
        self.entries.append({name: value for name, value in entry.items() if name != "ms"})


@dataclass
class End:
    """A client's end: what it has received, and how its connection has ended."""

    stream: TcpStream
    connection: Connection
    received: bytearray = field(default_factory=bytearray)
    ended: str = ""

    async def read(self) -> None:
        """Read until the end."""
        try:
            while data := await self.stream.receive_some():
                self.received += data
            self.ended = "closed"
        except trio.BrokenResourceError:
            self.ended = "reset"
        except trio.ClosedResourceError:
            pass
        self.stream.close_now()

    def leave(self, how: str) -> None:
        """End it from this side."""
        if self.stream.socket.fileno() < 0:
            return
        if how == "end":
            with contextlib.suppress(OSError):
                self.stream.socket.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.close_now()


class Play:
    """Plays a plan; ``outcome`` is what was seen."""

    def __init__(self, setup: Setup, *, requests_max: int) -> None:
        self._setup = setup
        self._registry = CollectorRegistry()
        self._requests_max = requests_max
        self._metrics = HttpMetrics(self._registry)
        self._connections = Connections(self._config(), self._metrics)
        self._log = Log()
        log: Any = self._log
        self._requests = WorkerRequests(self._config(), self._connections, self._metrics, log)
        self._auth = AuthWorkers()
        self._ends: dict[int, End] = {}
        self._goes_on = trio.Event()
        self._asked: list[tuple[str, str]] = []
        services = setup.services
        services.requests, services.settings = self._requests, self._config().http
        services.authenticator = self._authenticator()
        setup.upstream.behave = self._behave

    def _config(self) -> Config:
        tables = {
            "brokers": {"web_service_url": "http://broker-1:8080"},
            "authentication": {"enabled": True, "token": {"secret_key": "/nowhere"}, "failure_delay_ms": 1},
            "http": {
                "access_log": False,
                "idle_timeout_ms": 7_000,
                "head_timeout_ms": 7_000,
                "max_head_bytes": HEAD_BYTES_MAX,
                "max_requests": self._requests_max,
                "max_connections": CLIENTS + 1,
            },
            "cluster": {"http_workers": 1},
        }
        return msgspec.convert(tables, Config)

    def _authenticator(self) -> HttpAuthenticator:
        pool: Any = self._auth
        return HttpAuthenticator(self._config(), pool, self._setup.nursery)

    async def _behave(self, connection: UpstreamConnection, request: Received) -> None:
        """Answer as the path says, with the role that the proxy names."""
        role = (request.header(b"x-original-principal") or b"").decode()
        kind = request.target.split(b"/")[2].decode().replace("-", " ")
        authorization = (request.header(b"authorization") or b"").decode()
        assert authorization == f"Bearer {role}", "another client's token or role"
        self._asked.append((role, request.target.decode()))
        await connection.body()
        text, later = role.encode(), ANSWERS[kind][1]
        for part in ANSWERS[kind]:
            wanted = part
            if request.method == b"HEAD":
                head, blank, _ = part.rpartition(b"\r\n\r\n")
                wanted = b"" if part is later and b"\r\n\r\n" in ANSWERS[kind][0] else head + blank or part
            if later and part is later and wanted:
                await self._goes_on.wait()
            values = {1: (text,) if b"%b" in wanted else (len(text),), 2: (len(text), text)}
            data = wanted % values[places] if (places := wanted.count(b"%")) else wanted
            while data:  # with what follows it in one step
                try:
                    data = data[connection.stream.socket.send(data) :]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(connection.stream.socket)
                except OSError as error:
                    raise trio.BrokenResourceError from error
        if kind == "reset":
            connection.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if kind in CLOSES:
            connection.stream.close_now()
            return
        connection.http.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
        connection.http.send(h11.EndOfMessage())
        connection.http.start_next_cycle()

    async def step(self, kind: str, *values: Any) -> None:
        """Do one step."""
        number = values[0] if values else 0
        match kind:
            case "connect":
                self._connect(number, values[1])
            case "send":
                with contextlib.suppress(OSError):
                    self._ends[number].stream.socket.send(values[1])
            case "leave" | "reset" | "end":
                await wait_all_tasks_blocked()
                self._ends[number].leave(kind)
            case "last":
                await wait_all_tasks_blocked()
                with contextlib.suppress(OSError):
                    self._ends[number].stream.socket.send(values[1])
                self._ends[number].leave(values[2])
            case "settle":
                await wait_all_tasks_blocked()
            case "go on":
                self._goes_on.set()
                self._goes_on = trio.Event()
            case "wait":
                await wait_all_tasks_blocked()
                await self.wait(number)
            case "drain":
                await wait_all_tasks_blocked()
                self._connections.drain()
            case "cancel":
                await wait_all_tasks_blocked()
                self._ends[number].connection.scope.cancel()
            case "deny":
                await wait_all_tasks_blocked()
                authenticator: Any = self._setup.services.authenticator
                denied = authenticator.denied.value.kinds.keys() ^ {role_of(number).encode()}
                authenticator.denied.value = DenyList(dict.fromkeys(denied, "token-sha256"))
            case "auth":
                self._auth.is_slow = not self._auth.is_slow
            case "reload":
                await wait_all_tasks_blocked()
                services = self._setup.services
                services.authenticator = self._authenticator()
                services.response_headers = [] if services.response_headers else [(b"x-reloaded", b"1")]
                services.pool.set_dial(self._setup.parts.dial)

    async def wait(self, wait_s: float) -> None:
        """Let time pass, in steps that wake everybody in turn."""
        clock: Any = trio.lowlevel.current_clock()
        left_s = wait_s
        while left_s > 0:
            clock.jump(min(left_s, LONG_STEP_S))
            left_s -= LONG_STEP_S
            await wait_all_tasks_blocked()

    def _connect(self, number: int, received: bytes) -> None:
        ours, theirs = pair()
        ip = f"203.0.113.{number + 1}"
        client = HttpClient(f"{ip}:1000", ip, "http", connection=number)
        connection = self._connections.admit(client)
        if connection is None:  # all have requests under way
            theirs.close_now()
            connection = Connection(client, "")
            self._ends[number] = End(ours, connection, ended="refused")
            ours.close_now()
            return
        connection.http = HttpConnection(theirs, connection.client, self._setup.services, received)
        self._ends[number] = end = End(ours, connection)
        self._setup.nursery.start_soon(self._serve, connection, connection.http)
        self._setup.nursery.start_soon(end.read)

    async def _serve(self, connection: Connection, http: HttpConnection) -> None:
        try:
            with connection.scope:
                await http.serve()
        finally:
            self._connections.remove(connection)

    async def outcome(self) -> dict[str, Any]:
        """End everything; return what was seen of it, and check that nothing is left."""
        await self.wait(IDLE_S / 3)
        for end in self._ends.values():
            end.leave("leave")
        await self.wait(IDLE_S / 3)
        self._goes_on.set()
        await self.wait(IDLE_S / 3)
        pool, upstream = self._setup.pool, self._setup.upstream
        pool.close_idle()
        await wait_all_tasks_blocked()
        assert len(self._connections) == self._requests.under_way == waiting_without_task() == 0
        assert not self._requests._by_network
        assert not self._connections._by_network
        assert upstream.closed == len(upstream.connections)
        reactor = current_reactor()
        assert reactor is None or not reactor._watched
        for number, end in self._ends.items():
            assert set(re.findall(rb"role-\d+", end.received)) <= {role_of(number).encode()}
        by_client: dict[str, list[Any]] = {}
        for entry in self._log.entries:
            by_client.setdefault(entry["client"], []).append(entry)
            number = int(entry["client"].split(".")[3].split(":")[0]) - 1
            assert entry["principal"] in {"", role_of(number)}
        samples = [one for metric in self._registry.collect() for one in metric.samples]
        kept = ("_total", "_count", "connections", "under_way")
        return {
            "received": {number: bytes(end.received) for number, end in self._ends.items()},
            "ended": {number: end.ended for number, end in self._ends.items()},
            "log": by_client,
            "metrics": {str((one.name, one.labels)): one.value for one in samples if one.name.endswith(kept)},
            "asked": set(self._asked),
        }


async def play(plan: list[Step], requests_max: int, *, reactor: bool) -> dict[str, Any]:
    """Play a plan in one mode."""
    async with opened(reactor=reactor) as setup:
        playing = Play(setup, requests_max=requests_max)
        for step in plan:
            await playing.step(*step)
        return await playing.outcome()


def outcome(mode: str, plan: list[Step], requests_max: int) -> dict[str, Any]:
    """What was seen of a plan in one mode: see ``setup`` of conftest.py."""
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(taskless, "IDLE_SLACK_S", 0)
        if mode == "all taskless":
            patch.setattr(HttpConnection, "may_be_as_before", True)
            patch.setattr(HttpConnection, "is_as_before", lambda *_: True)
        seen: dict[str, Any] = trio.run(lambda: play(plan, requests_max, reactor=mode != "tasks"), clock=MockClock())
    assert not [entry for entry in logs if entry["log_level"] in {"error", "critical"}]
    return seen


@pytest.mark.parametrize("number", range(PLANS))
def test_clients_and_servers_see_the_same_with_and_without_tasks(number: int) -> None:
    """Also security: each request has its own client's principal."""
    plan = Planner(f"{SEED} {number}").plan()
    requests_max = 1_024
    if number % 4 == 0:  # few may be under way: then one step is over before the next one
        requests_max, plan = 4, [one for step in plan for one in (step, ("settle",))]
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    in_tasks = outcome("tasks", plan, requests_max)
    for mode in ("as in a worker", "all taskless"):
        assert outcome(mode, plan, requests_max) == in_tasks, mode
    assert len(os.listdir("/proc/self/fd")) <= descriptors
