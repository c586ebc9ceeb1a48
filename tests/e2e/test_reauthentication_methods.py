"""Sessions by several methods and at several listeners, each with a lifetime of its own; renewals of several rounds."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from passlib.hash import bcrypt

from auth.providers.scram import ITERATIONS_MIN, credential_line
from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.certificates import Authority
from .lab.cluster import Tables, merged
from .lab.listeners import ManyListenersCluster
from .lab.scram import MECHANISMS
from .lab.scram_session import ScramSession
from .lab.security import NAMESPACE
from .lab.sessions import (
    DENIED,
    EXPIRED,
    SUCCESS,
    Session,
    at_the_same_time,
    challenged_after_s,
    counting,
)

SHA_256, SHA_512 = MECHANISMS
PASSWORD = "not-to-be-seen"
TOPIC = f"persistent://{NAMESPACE}/methods"

# ---- lifetimes by method and by listener

LISTENERS_LIFETIME_S = 3.0
SCRAM_LIFETIME_S = 7.0
LIFETIME_OF_ALL_S = 16.0
"""So far apart that none can be taken for another, however late a busy machine is."""

EARLIEST = 0.85
"""No client is asked before this part of its credentials' life is over."""


@dataclass
class House:
    """A cluster with four listeners: one that says nothing of sessions, the same with TLS, one with a maximum of its
    own, one without any; and its broker. alice and bob have a password, and tokens without an end.
    """

    cluster: ManyListenersCluster
    context: ssl.SSLContext
    broker: Standalone

    def token(self, **options: Any) -> Session:
        """By token."""
        return Session(self.cluster, self.broker.token("alice"), TOPIC, **options)

    def basic(self, **options: Any) -> Session:
        """By password."""
        return BasicSession(self.cluster, "", TOPIC, **options)

    def scram(self, mechanism: str, **options: Any) -> ScramSession:
        """By several rounds."""
        return ScramSession(self.cluster, "alice", PASSWORD, TOPIC, mechanism=mechanism, **options)

    @property
    def strict(self) -> dict[str, Any]:
        """The options of a connection to the listener with a maximum."""
        return {"port": self.cluster.ports[1]}

    @property
    def lax(self) -> dict[str, Any]:
        """The options of a connection to the listener with none."""
        return {"port": self.cluster.ports[2]}

    @property
    def relay(self) -> dict[str, Any]:
        """The options of one."""
        return {"broker": self.broker}

    @property
    def secure_relay(self) -> dict[str, Any]:
        """The options of one with TLS."""
        return {"broker": self.broker, "tls": self.context, "port": self.cluster.ports[0]}


class BasicSession(Session):
    """By user and password, said at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.method = "basic"

    def _authenticate(self, **fields: Any) -> Any:
        return self.connect(auth_method_name="basic", auth_data=f"alice:{PASSWORD}".encode(), **fields)


def users(directory: Path) -> dict[str, dict[str, str]]:
    """The tables of the methods with passwords."""
    digest = bcrypt.using(rounds=5, ident="2y").hash(PASSWORD)
    (directory / "basic").write_text(f"alice:{digest}\n")
    lines = [
        credential_line(user, PASSWORD, mechanism, ITERATIONS_MIN)
        for user in ("alice", "bob")
        for mechanism in MECHANISMS
    ]
    (directory / "scram").write_text("\n".join(lines))
    return {f"authentication.{name}": {"file": str(directory / name)} for name in ("basic", "scram")}


@pytest.fixture(scope="module")
def house(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Two auth workers, so that rounds may meet the wrong one."""
    directory = tmp_path_factory.mktemp("house")
    authority = Authority(directory, "authority")
    server = authority.server("proxy")
    methods = {SHA_256: int(SCRAM_LIFETIME_S * 1000), SHA_512: int(SCRAM_LIFETIME_S * 1000), "token": 0}
    tables: Tables = {
        "cluster": {"auth_workers": 2},
        "session": {"connections_max_reauth_ms": int(LIFETIME_OF_ALL_S * 1000), "methods_max_reauth_ms": methods},
    }
    configured = merged(authentication(secured_broker), users(directory), tables)
    context = ssl.create_default_context(cafile=authority.file)
    cluster = ManyListenersCluster(
        configured,
        {"tls": {"certificate": server.certificate, "key": server.key}},
        {"connections_max_reauth_ms": int(LISTENERS_LIFETIME_S * 1000)},
        {"connections_max_reauth_ms": 0},
    )
    with running(cluster):
        it = House(cluster, context, secured_broker)
        for options in ({}, it.relay):
            with it.token(**options) as client:
                client.begin().assert_serves()  # whereupon the broker has the topic
        yield it
        log = cluster.log_text()
        assert PASSWORD not in log
        assert "Traceback" not in log


@pytest.mark.conforms("kip-368.2")
def test_each_is_asked_by_what_is_nearest_to_it(house: House) -> None:
    """The listener's maximum, else the method's, else the one for all; where that is 0 no client is asked, ever."""
    strict, lax = house.strict, house.lax
    groups: list[tuple[float, float, list[Session]]] = [
        (LIFETIME_OF_ALL_S, math.inf, [house.basic(), house.basic(**house.relay)]),
        (SCRAM_LIFETIME_S, LIFETIME_OF_ALL_S, [house.scram(SHA_256), house.scram(SHA_512, **house.relay)]),
        (
            LISTENERS_LIFETIME_S,
            SCRAM_LIFETIME_S,
            [house.token(**strict), house.basic(**strict), house.scram(SHA_256, **strict, **house.relay)],
        ),
    ]
    """How long sessions live, how long those would that the next farther one counted for, and the sessions."""
    never = [house.token(), house.token(**house.relay), house.basic(**lax), house.scram(SHA_256, **lax, **house.relay)]
    with ExitStack() as stack, counting(house.cluster), ThreadPoolExecutor(len(groups)) as pool:
        for client in never + [client for *_, clients in groups for client in clients]:
            stack.enter_context(client).begin()
        waiting = [(one, other, pool.submit(challenged_after_s, clients)) for one, other, clients in groups]
        for lifetime_s, another_s, asked in waiting:
            after_s = asked.result()
            assert EARLIEST * lifetime_s <= min(after_s) <= max(after_s) < EARLIEST * another_s, (lifetime_s, after_s)
        for client in never:
            client.wait_until(1.2 * LIFETIME_OF_ALL_S)
            assert client.ping().type == BaseCommand.PONG  # and nothing came before it
            client.assert_serves()


# ---- renewals of several rounds


@pytest.mark.conforms("kip-368.46")
def test_renewals_of_several_rounds(house: House) -> None:
    """Each client runs its mechanism's rounds twice more, on the same connection, amid its requests and messages."""
    with ExitStack() as stack, counting(house.cluster, success=8):
        clients = [
            stack.enter_context(house.scram(mechanism, **options))
            for mechanism, options in (
                (SHA_256, {}),
                (SHA_256, house.relay),
                (SHA_256, house.secure_relay),
                (SHA_512, house.relay),
            )
        ]
        at_the_same_time(*(partial(renew_twice, client) for client in clients))
        for mechanism, renewals in ((SHA_256, 6), (SHA_512, 2)):
            assert house.cluster.metrics().total(SUCCESS, method=mechanism) >= renewals


def renew_twice(client: ScramSession) -> None:
    """Each time within the time that it has."""
    client.begin()
    for _ in range(2):
        client.assert_serves()
        client.wait_for_challenge()
        client.renew(client.dialogue())
    client.wait_until(1.1 * SCRAM_LIFETIME_S)  # which would be past the end of the first life
    client.assert_serves()


def wrong_proof(client: ScramSession) -> None:
    """By who does not know the password."""
    dialogue = client.dialogue(password="another")
    dialogue.respond(dialogue.first())
    dialogue.take_first()
    dialogue.respond(dialogue.final())


def another_user(client: ScramSession) -> None:
    """Who does know his own."""
    dialogue = client.dialogue(user="bob")
    dialogue.respond(dialogue.first())
    dialogue.take_first()
    dialogue.respond(dialogue.final())
    dialogue.take_last_word()
    dialogue.respond()


def another_mechanism(client: ScramSession) -> None:
    """Good, but not the one that the session was begun by."""
    dialogue = client.dialogue(mechanism=SHA_512)
    dialogue.respond(dialogue.first())


def another_method_in_the_second_round(client: ScramSession) -> None:
    """The proof is right."""
    dialogue = client.dialogue()
    dialogue.respond(dialogue.first())
    dialogue.take_first()
    dialogue.respond(dialogue.final(), method="token")


def no_such_user(client: ScramSession) -> None:
    """No client can tell it from a user with a wrong password."""
    dialogue = client.dialogue(user="nobody")
    dialogue.respond(dialogue.first())
    dialogue.take_first()
    dialogue.respond(dialogue.final())


WRONG: dict[Callable[[ScramSession], None], str] = {
    wrong_proof: "bad_password",
    no_such_user: "unknown_user",
    another_user: "another_principal",
    another_mechanism: "another_method",
    another_method_in_the_second_round: "another_method",
}


def test_wrong_rounds_end_the_session(house: House) -> None:
    """At once and for good, with the same words whatever is wrong; the log says why."""
    with ExitStack() as stack, counting(house.cluster, failure=2 * len(WRONG)):
        works = [
            partial(ends_by, stack.enter_context(house.scram(SHA_256, **house.strict, **options)), wrong, reason)
            for wrong, reason in WRONG.items()
            for options in ({}, house.relay)
        ]
        at_the_same_time(*works)


def ends_by(client: ScramSession, wrong: Callable[[ScramSession], None], reason: str) -> None:
    """One that serves until then."""
    client.begin().assert_serves()
    client.wait_for_challenge()
    wrong(client)
    client.assert_ends_with(DENIED)
    client.cluster.wait_for_log("failed to authenticate itself again", client.address, f"reason={reason}")


def test_a_client_that_stops_between_two_rounds_ends_when_used_past_the_end(house: House) -> None:
    """A proof that is owed is none."""
    with ExitStack() as stack, counting(house.cluster, killed=2):
        clients = [
            stack.enter_context(house.scram(SHA_256, **house.strict, **options)) for options in ({}, house.relay)
        ]
        for client in clients:
            client.begin()
        for client in clients:
            client.wait_for_challenge()
            dialogue = client.dialogue()
            dialogue.respond(dialogue.first())
            dialogue.take_first()
        for client in clients:
            client.wait_until(1.1 * LISTENERS_LIFETIME_S)
            assert client.ping().type == BaseCommand.PONG
            client.use()
            client.assert_ends_with(EXPIRED)
