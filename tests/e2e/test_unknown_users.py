"""Strangers who try names find out by no answer which users exist: an unknown one looks like a user of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from auth.providers.scram import credential_line

from .conftest import running
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.schema import LOOKUP_CONNECT
from .lab.scram import ScramDialogue
from .lab.waiting import eventually
from .lab.wire import WireClient

MECHANISM = "SCRAM-SHA-256"
USERS = {"alice": 4096, "bob": 4096, "carol": 4096, "admin": 6000}
UNKNOWN = [f"nobody-{number}" for number in range(60)]
WORKERS = 2
ASKED = 2 * WORKERS
"""Connections for one name that are open at a time, so that each worker answers."""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The users' file."""
    file = tmp_path_factory.mktemp("users") / "scram"
    lines = [credential_line(user, "first", MECHANISM, iterations) for user, iterations in USERS.items()]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def proxy(users: Path) -> Iterator[ProxyCluster]:
    """A cluster of two auth workers."""
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT})) as broker:
        tables: Tables = {
            "cluster": {"auth_workers": WORKERS},
            "brokers": {"service_url": f"pulsar://127.0.0.1:{broker.port}"},
            "authentication": {"enabled": True},
            "authentication.scram": {"file": str(users)},
        }
        with running(ProxyCluster(tables)) as cluster:
            yield cluster


def told(proxy: ProxyCluster, user: str, asked: int = ASKED) -> set[tuple[str, int]]:
    """Salts and iterations that some connections are told of one user."""
    answers = set()
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(proxy.port)) for _ in range(asked)]
        dialogues = [ScramDialogue(client, user, "wrong", MECHANISM) for client in clients]
        for dialogue in dialogues:
            dialogue.connect()
            dialogue.take_first()
            found = re.search(r"s=([^,]+),i=([0-9]+)$", dialogue.server_first)
            assert found
            answers.add((found[1], int(found[2])))
    return answers


def test_unknown_users_have_iterations_that_users_have_and_one_salt_in_all_workers(proxy: ProxyCluster) -> None:
    seen = [told(proxy, name) for name in (*USERS, *UNKNOWN)]
    assert {len(answers) for answers in seen} == {1}
    unknown = [iterations for answers in seen[len(USERS) :] for _, iterations in answers]
    assert set(unknown) == set(USERS.values())
    assert unknown.count(USERS["admin"]) < len(unknown) / 2


def test_a_changed_password_of_the_first_line_does_not_tell_users_by_the_salts_that_stay(
    proxy: ProxyCluster, users: Path
) -> None:
    names = [*USERS, *UNKNOWN]
    before = {name: told(proxy, name, 1) for name in names}
    _, *others = users.read_text().splitlines()
    users.write_text("\n".join([credential_line("alice", "second", MECHANISM, USERS["alice"]), *others]))
    eventually(lambda: not told(proxy, "alice") & before["alice"], what="both workers know the new password")
    stays = [name for name in names if told(proxy, name, 1) == before[name]]
    assert stays[: len(USERS) - 1] == ["bob", "carol", "admin"]
    share = (len(stays) - len(USERS) + 1) / len(UNKNOWN)
    assert 1 / 4 < share < 7 / 8, f"of the unknown names {share} stay"
