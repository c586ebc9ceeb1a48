"""Strangers who have many wrong passwords checked do not keep a user out: checks are made in turn by client address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from passlib.hash import bcrypt

from auth.check_queue import FAILED_IN_NETWORK_MIN
from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.password_flood import PasswordFlood
from .lab.schema import LOOKUP_CONNECT
from .lab.waiting import eventually
from .lab.wire import WireClient

PASSWORD = "not-to-be-seen"
COST = 11
STRANGERS = 400
"""Three times as many as may wait."""
LOGINS = 6
FAILURES = "pulsar_authentication_failures_total"
USERS = ("alice", "bob", "carol", "dave", "erin")
"""One for each test, so that none has come in before."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyCluster]:
    """A cluster of one auth worker that checks one password at a time."""
    file = tmp_path_factory.mktemp("users") / "users"
    hashes = bcrypt.using(rounds=COST)
    file.write_text("".join(f"{user}:{hashes.hash(PASSWORD)}\n" for user in USERS))
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT})) as broker:
        tables: Tables = {
            "cluster": {"auth_workers": 1},
            "brokers": {"service_url": f"pulsar://127.0.0.1:{broker.port}"},
            "limits": {"handshake_timeout_ms": 60_000},
            "authentication": {"enabled": True, "failure_delay_ms": 1000},  # or strangers that come again are all we do
            "authentication.basic": {"file": str(file), "threads_max": 1},
        }
        with running(ProxyCluster(tables, ready_timeout_s=90)) as cluster:
            yield cluster


def is_let_in(proxy: ProxyCluster, user: str, source: str) -> bool:
    """Whether a user who comes with the right password is connected."""
    with WireClient(proxy.port, source=source) as client:
        client.send_connect(auth_method_name="basic", auth_data=f"{user}:{PASSWORD}".encode())
        return bool(client.receive(within_s=70).type == BaseCommand.CONNECTED)


def refused_checks(proxy: ProxyCluster) -> float:
    """How many passwords were checked and refused."""
    return sum(proxy.metrics().total(FAILURES, reason=reason) for reason in ("bad_password", "unknown_user"))


def wait_until_no_room_is_left(proxy: ProxyCluster) -> None:
    """Wait until a stranger is refused from now on, because too many wait."""
    overloads = proxy.metrics().total(FAILURES, reason="overloaded")
    eventually(lambda: proxy.metrics().total(FAILURES, reason="overloaded") > overloads, what="strangers find no room")


def assert_is_let_in_among(strangers: list[str], proxy: ProxyCluster, user: str, source: str) -> None:
    """One login after the other, while there is no room for more strangers."""
    with PasswordFlood(proxy.port, strangers, number=STRANGERS, user=user) as flood:
        wait_until_no_room_is_left(proxy)
        outcomes = [is_let_in(proxy, user, source) for _ in range(LOGINS)]
        before = flood.turned_away
        eventually(lambda: flood.turned_away > before, what="the flood goes on")
    assert outcomes == [True] * LOGINS, f"{outcomes.count(False)} of {LOGINS} logins failed"


@pytest.mark.parametrize(("number", "user"), [(1, "alice"), (8, "bob")])
def test_strangers_at_other_addresses_keep_no_user_out(proxy: ProxyCluster, number: int, user: str) -> None:
    addresses = [f"127.0.0.{20 + index}" for index in range(number)]
    assert_is_let_in_among(addresses, proxy, user, "127.0.0.2")


def test_strangers_at_the_same_address_keep_no_user_out_who_came_in_before(proxy: ProxyCluster) -> None:
    assert is_let_in(proxy, "carol", "127.0.0.3")
    assert_is_let_in_among(["127.0.0.3"], proxy, "carol", "127.0.0.3")


def test_strangers_with_a_check_at_each_of_many_addresses_do_not_hold_the_queue(proxy: ProxyCluster) -> None:
    """As many addresses as may wait, all of which have failed or are in a network where others have: they give way to
    several logins at a time.
    """
    addresses = [f"127.0.4.{1 + index}" for index in range(200)]
    failures = refused_checks(proxy)
    with PasswordFlood(proxy.port, addresses, number=STRANGERS, user="dave"), ExitStack() as stack:
        eventually(lambda: refused_checks(proxy) >= failures + FAILED_IN_NETWORK_MIN, what="strangers are denied")
        wait_until_no_room_is_left(proxy)
        clients = [stack.enter_context(WireClient(proxy.port, source="127.0.5.1")) for _ in range(4)]
        for client in clients:
            client.send_connect(auth_method_name="basic", auth_data=f"dave:{PASSWORD}".encode())
        outcomes = [client.receive(within_s=70).type for client in clients]
    assert outcomes == [BaseCommand.CONNECTED] * len(clients)


def test_strangers_leave_a_client_its_turn_that_logged_in_before(proxy: ProxyCluster) -> None:
    """At an address from which a user has come in, another one is new."""
    assert is_let_in(proxy, "dave", "127.0.6.1")
    addresses = [f"127.{number}.0.1" for number in range(20, 220)]
    assert_is_let_in_among(addresses, proxy, "erin", "127.0.6.1")
