"""Auth workers are killed while clients are in the middle of a SCRAM exchange, workers of all kinds while clients with
tokens are connected to a broker: no client hangs, none gets in without a proof, and none ever becomes another.

The broker is ours: it answers a question for partitions with the number in the name of the principal that it was told.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from operator import gt
from pathlib import Path
from typing import Any, Self

import pytest
from local.tokens import make_token

from auth.providers.scram import ITERATIONS_MIN, credential_line
from proto.connect_rules import AUTHENTICATION_UNAVAILABLE
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.cluster import ProxyCluster
from .lab.fakes import FakeBroker, connected
from .lab.processes import Use, children
from .lab.schema import NO_REQUEST_ID, Command
from .lab.scram import MECHANISMS, ScramDialogue
from .lab.waiting import BUSY_S, NotInTimeError, eventually
from .lab.wire import Ended, WireClient, frame

TOPIC = "persistent://public/default/exchanges"
USERS = 10
EXCHANGES = 200
KILLS_MIN = 2
ROUNDS_MAX = 20
HANDSHAKE_TIMEOUT_MS = 30_000
DEADLINE_S = HANDSHAKE_TIMEOUT_MS / 1000 + BUSY_S
KILL_INTERVAL_S = 0.6
WHOEVER_IS_THERE_EACH = 4
PAUSE_S_MAX = 0.7
AT_ODDS = 999_999
CONNECTIONS_MAX = 2 * EXCHANGES
"""Of two forwarders, of which each may come to have all of the clients."""

KEY = b"k" * 32
PROXY_TOKEN = make_token(KEY, "proxy")


def tells_the_principal(connection: socket.socket) -> None:
    """A behaviour: `user-7` is told of 7 partitions, if the proxy has shown its token."""
    decoder, principal = FrameDecoder(max_frame_bytes=1 << 20), ""
    while data := connection.recv(1 << 16):
        decoder.receive_data(data)
        while (received := decoder.next_frame()) is not None:
            command = Command.FromString(received.command)
            if command.type == BaseCommand.CONNECT:
                principal = command.connect.original_principal
                if command.connect.auth_data != PROXY_TOKEN.encode():
                    error = {"request_id": NO_REQUEST_ID, "error": ServerError.NotAllowedError, "message": "no proxy"}
                    connection.sendall(frame(BaseCommand.ERROR, error=error))
                    return
                connection.sendall(connected())
            elif command.type == BaseCommand.PING:
                connection.sendall(frame(BaseCommand.PONG, pong={}))
            else:
                asked = command.partition_metadata
                agrees = asked.original_principal in {"", principal}
                number = int(principal.removeprefix("user-")) if agrees else AT_ODDS
                body = {"request_id": asked.request_id, "response": 0, "partitions": number}
                answer = frame(BaseCommand.PARTITIONED_METADATA_RESPONSE, partition_metadata_response=body)
                connection.sendall(answer)


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`user-1` and so on; each password is the user's name backwards."""
    path = tmp_path_factory.mktemp("scram") / "users"
    lines = [
        credential_line(f"user-{number}", password(number), mechanism, ITERATIONS_MIN)
        for number in range(1, USERS + 1)
        for mechanism in MECHANISMS
    ]
    path.write_text("\n".join(lines))
    return path


def password(number: int) -> str:
    return f"{number}-resu"


@pytest.fixture(scope="module")
def broker() -> Iterator[FakeBroker]:
    """Who tells the principal."""
    with FakeBroker(tells_the_principal) as fake:
        yield fake


@pytest.fixture(scope="module")
def proxy(user_file: Path, broker: FakeBroker) -> Iterator[ProxyCluster]:
    """A cluster with two workers of each kind."""
    token = user_file.with_name("proxy.token")
    token.write_text(PROXY_TOKEN)
    key = user_file.with_name("secret.key")
    key.write_bytes(KEY)
    url, credentials = f"pulsar://127.0.0.1:{broker.port}", {"method": "token", "file": str(token)}
    tables = {
        "cluster": {"auth_workers": 2, "lookup_workers": 2},
        "brokers": {"service_url": url, "credentials": credentials},
        "authentication": {"enabled": True},
        "authentication.scram": {"file": str(user_file)},
        "authentication.token": {"secret_key": str(key)},
        "limits": {
            "handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS,
            "max_connections": CONNECTIONS_MAX,
            "max_unauthenticated_connections": 2 * CONNECTIONS_MAX,
        },
    }
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


def auth_pids(cluster: ProxyCluster) -> list[int]:
    """Of those that are ready. One that is killed before makes the supervisor wait longer each time: another matter."""
    workers = cluster.status()["workers"]
    return [worker["pid"] for worker in workers if worker["role"] == "auth" and worker["state"] == "running"]


def kill(pid: int) -> bool:
    """SIGKILL; whether there was one to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def is_let_in(cluster: ProxyCluster, number: int) -> bool:
    """As long as no auth worker is there, clients are told to come again; anything else is a failure."""
    with WireClient(cluster.port) as client:
        dialogue = ScramDialogue(client, f"user-{number}", password(number))
        dialogue.connect()
        answer = client.receive()
        if answer.type == BaseCommand.ERROR:
            assert answer.error.error == ServerError.ServiceNotReady, answer
            return False
        dialogue.see_first(answer)
        dialogue.respond(dialogue.final())
        dialogue.take_last_word()
        dialogue.respond()
        assert client.receive().type == BaseCommand.CONNECTED
        assert who_it_is(client) == number
        return True


def who_it_is(client: WireClient) -> int:
    """The number of the user as whom the proxy asks the broker; the proxy needs an auth worker for that, too."""

    def partitions() -> int:
        answer = client.partitions(TOPIC).partition_metadata_response
        assert answer.partitions or answer.error == ServerError.ServiceNotReady, answer
        return int(answer.partitions)

    return eventually(partitions, what="the broker says who it is")


# ---- a single exchange


@pytest.mark.conforms("pip-30.52")
@pytest.mark.parametrize("last_word", [False, True], ids=["before the proof", "before the last answer"])
def test_workers_killed_in_the_middle(proxy: ProxyCluster, last_word: bool) -> None:
    """The exchange is lost: an error in time, never a success, and never begun again. The next one is served."""
    with WireClient(proxy.port) as client:
        dialogue = ScramDialogue(client, "user-3", password(3))
        final = dialogue.begin()
        if last_word:
            dialogue.respond(final)
            dialogue.take_last_word()
        both = eventually(lambda: auth_pids(proxy) if len(auth_pids(proxy)) == 2 else [], what="both run")
        for pid in both:
            assert kill(pid)
        dialogue.respond(b"" if last_word else final)
        answers = client.wait_for_end(DEADLINE_S)
        assert [answer.type for answer in answers] == [BaseCommand.ERROR]
        assert answers[0].error.error == ServerError.ServiceNotReady
    eventually(lambda: is_let_in(proxy, 3), what="the next one is let in")
    eventually(lambda: not set(auth_pids(proxy)) & set(both), what="others are in their place")


# ---- many exchanges


class Killer:
    """Kills a random auth worker again and again until told to stop.

    Mostly one of two: of a busy machine's workers none would ever be there.
    """

    def __init__(self, cluster: ProxyCluster) -> None:
        self.kills = 0
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._random = random.Random(5)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(KILL_INTERVAL_S):
            pids = auth_pids(self._cluster)
            if len(pids) > 1 or (pids and self.kills % WHOEVER_IS_THERE_EACH == 0):
                self.kills += kill(self._random.choice(pids))


def one_exchange(cluster: ProxyCluster, number: int, index: int, *, right: bool) -> tuple[str, float]:
    """How it ended, and the longest time that an answer took. The client takes its time before each round."""
    pause, longest_s = random.Random(index), 0.0
    secret = password(number if right else number + 1)
    with WireClient(cluster.port) as client:
        dialogue = ScramDialogue(client, f"user-{number}", secret, MECHANISMS[index % 2])
        rounds: list[tuple[Callable[[], None], Callable[[Any], None]]] = [
            (dialogue.connect, dialogue.see_first),
            (lambda: dialogue.respond(dialogue.final()), dialogue.see_last_word),
            (dialogue.respond, expect_connected),
        ]
        for say, see in rounds:
            time.sleep(pause.uniform(0.0, PAUSE_S_MAX))
            asked_at = time.monotonic()
            try:
                say()
                answer = client.receive(DEADLINE_S)
            except (Ended, ConnectionError):
                return "ended", longest_s
            longest_s = max(longest_s, time.monotonic() - asked_at)
            if answer.type == BaseCommand.ERROR:
                return ServerError.Name(answer.error.error), longest_s
            see(answer)
        return f"is {who_it_is(client)}", longest_s


def expect_connected(answer: Any) -> None:
    assert answer.type == BaseCommand.CONNECTED


def test_two_hundred_exchanges_while_workers_are_killed(proxy: ProxyCluster) -> None:
    """Half of them with another's password. Every one ends in time, and who is let in is who has proved it."""
    numbers = [index % USERS + 1 for index in range(EXCHANGES)]
    rights = [index // USERS % 2 == 0 for index in range(EXCHANGES)]
    results: list[tuple[str, float]] = []
    with Killer(proxy) as killer, ThreadPoolExecutor(EXCHANGES) as pool:
        # Once more where a fast machine is done with all of them before a second worker is there to be killed.
        while killer.kills < KILLS_MIN and len(results) < EXCHANGES * ROUNDS_MAX:
            ends = [
                pool.submit(one_exchange, proxy, number, index, right=right)
                for index, (number, right) in enumerate(zip(numbers, rights, strict=True))
            ]
            results += [end.result(300) for end in ends]
    seen: Counter[str] = Counter()
    for index, (end, _) in enumerate(results):
        number, right = numbers[index % EXCHANGES], rights[index % EXCHANGES]
        seen[f"{'right' if right else 'wrong'} password: {'let in' if end.startswith('is ') else end}"] += 1
        assert not end.startswith("is ") or (right and end == f"is {number}"), (number, right, end)
    longest_s = max(took for _, took in results)
    print(f"{killer.kills} kills; {dict(seen)}; longest wait {longest_s:.2f} s")
    assert longest_s < DEADLINE_S
    assert killer.kills >= KILLS_MIN
    assert seen["right password: let in"]
    assert not seen["right password: AuthenticationError"]
    eventually(lambda: len(auth_pids(proxy)) == 2, what="both auth workers run again")
    for number in range(1, USERS + 1):
        eventually(lambda number=number: is_let_in(proxy, number), what=f"user-{number} is let in")  # type: ignore[misc]


# ---- connections to brokers

CLIENTS = 32
AMONG_FORWARDERS = ["auth", "lookup", "forwarder"] * 3
AFTER_THEM = ["auth", "lookup"] * 2
"""What forwarders have left over of these calls, they still have when it is looked for."""
CALLS_STUCK = 2 * CLIENTS
"""After so many connections, calls of both forwarders wait for a worker that stands still."""
ALL_STUCK_S = 2.0
"""After so long, all clients may wait for it: the other one is just being replaced."""


def relay_opening(cluster: ProxyCluster, target: str, number: int) -> str:
    """How it ended; who is told that it is connected is so, as itself, whatever is killed."""
    token = make_token(KEY, f"user-{number}")
    with WireClient(cluster.port) as client:
        try:
            answer = client.connect(token=token, proxy_to_broker_url=target)
        except (Ended, ConnectionError):
            return "ended"
        if answer.type == BaseCommand.ERROR:
            assert answer.error.error == ServerError.ServiceNotReady, answer
            assert answer.error.message != AUTHENTICATION_UNAVAILABLE, "who has a token is never told of a kill"
            assert "took too long" not in answer.error.message
            return str(answer.error.message)
        assert answer.type == BaseCommand.CONNECTED, answer
        assert client.partitions(TOPIC).partition_metadata_response.partitions == number
        return "served"


class Regulars:
    """Clients that come again and again, each as a user of its own; `ends`: how often each has seen which end."""

    def __init__(self, cluster: ProxyCluster, target: str) -> None:
        self.ends: Counter[tuple[int, str]] = Counter()
        self._cluster, self._target = cluster, target
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._clients = [self._pool.submit(self._run, number) for number in range(1, CLIENTS + 1)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.ends[number, relay_opening(self._cluster, self._target, number)] += 1

    def count(self) -> Counter[str]:
        """How often each end was seen."""
        ends: Counter[str] = Counter()
        for (_, end), count in self.ends.copy().items():
            ends[end] += count
        return ends

    def _served(self) -> list[int]:
        return [self.ends[number, "served"] for number in range(1, CLIENTS + 1)]

    def wait_until_served(self, in_all: int = 0, within_s: float = 2 * BUSY_S) -> None:
        """Until each has been served once more, or so many times together."""
        before = self._served()

        def are_served() -> bool:
            now = self._served()
            is_enough = sum(now) >= sum(before) + in_all if in_all else all(map(gt, now, before))
            return is_enough or any(client.done() for client in self._clients)  # which has failed

        eventually(are_served, what="clients are served", within_s=within_s)


def kill_one(cluster: ProxyCluster, role: str, chosen: random.Random, regulars: Regulars) -> None:
    """A random one: a forwarder amid its work, another while it has calls that it does not answer."""

    def is_killed() -> bool:
        pids = children(cluster.pid, role)
        pid = chosen.choice(pids) if pids else 0
        if pid and role != "forwarder":
            os.kill(pid, signal.SIGSTOP)
            with suppress(NotInTimeError):
                regulars.wait_until_served(CALLS_STUCK, ALL_STUCK_S)
        return pid != 0 and kill(pid)

    eventually(is_killed, what=f"a worker that can be killed: {role}")


def files_of_all(cluster: ProxyCluster) -> dict[str, int]:
    """Descriptors of each process that are no pipe's, once all workers run and no client is left."""

    def look() -> dict[str, int]:
        workers = cluster.status()["workers"]
        if any(worker["state"] != "running" or worker.get("connections") for worker in workers):
            return {}
        pids = {f"{worker['role']}-{worker['worker']}": worker["pid"] for worker in workers}
        with suppress(OSError):  # a status may be a moment old, and the process gone
            return {name: Use.of(pid).files for name, pid in (pids | {"supervisor": cluster.pid}).items()}
        return {}

    return eventually(look, what="all workers run without a client")


@pytest.mark.conforms("pip-30.52")
def test_clients_with_tokens_reach_their_broker_while_workers_of_all_kinds_are_killed(
    proxy: ProxyCluster, broker: FakeBroker
) -> None:
    """Each is connected as itself, or is told to come again, and then is; nothing is left over."""
    order, target, ended = random.Random(3), f"127.0.0.1:{broker.port}", []
    with Regulars(proxy, target) as regulars:
        regulars.wait_until_served()
    before = files_of_all(proxy)
    with Regulars(proxy, target) as regulars:
        for roles in (AMONG_FORWARDERS, AFTER_THEM):
            for role in order.sample(roles, len(roles)):
                regulars.wait_until_served()
                kill_one(proxy, role, order, regulars)
            regulars.wait_until_served()
            ended.append(regulars.count()["ended"])
    print(f"{len(AMONG_FORWARDERS + AFTER_THEM)} kills; {dict(regulars.count())}")
    assert 0 < ended[0] == ended[1], "only a forwarder that is killed leaves a client without an answer"

    def no_more_is_open() -> bool:
        return all(count <= before[name] for name, count in files_of_all(proxy).items())

    eventually(no_more_is_open, what=f"no more is open than {before}")
    assert proxy.metrics().total("pulsar_proxy_active_connections") == 0
    proxy.wait_for_total("pulsar_proxy_stored_relays", 0)
    with ExitStack() as stack:
        clients = []
        for number in range(CONNECTIONS_MAX):  # one after the other: one that is silent would give way
            clients.append(stack.enter_context(WireClient(proxy.port)))
            assert clients[-1].connect(token=make_token(KEY, f"user-{number}")).type == BaseCommand.CONNECTED
        for client in clients:
            assert client.ping().type == BaseCommand.PONG, "its place was left to it"
