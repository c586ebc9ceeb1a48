"""proto.broker_exchange: which challenge of a relay's broker asks for what."""

import itertools

import pytest

from proto.broker_exchange import UNANSWERED, BrokerExchange, ChallengeOutOfTurn, ExchangePhase
from proto.broker_handshake import ROUNDS_MAX
from proto.commands import AUTH_REFRESH
from proto.errors import LocalProtocolError

QUIET, ASKED, UNPROVEN, ASKED_FURTHER = ExchangePhase


@pytest.mark.parametrize(
    ("phase", "data", "following"),
    [
        (QUIET, AUTH_REFRESH, ASKED),
        (QUIET, b"another provider's way to ask", ASKED),
        (UNPROVEN, b"server first", ASKED_FURTHER),
        (UNPROVEN, AUTH_REFRESH, ASKED),
        (ASKED, AUTH_REFRESH, None),
        (ASKED, b"server first", None),
        (ASKED_FURTHER, AUTH_REFRESH, None),
        (ASKED_FURTHER, b"server first", None),
    ],
)
def test_a_challenge_in_every_phase(phase: ExchangePhase, data: bytes, following: ExchangePhase | None) -> None:
    exchange = BrokerExchange(phase)
    if following is None:
        with pytest.raises(ChallengeOutOfTurn):
            exchange.on_challenge(data)
    else:
        exchange.on_challenge(data)
        assert exchange.phase is following


@pytest.mark.parametrize(("phase", "complete"), [*itertools.product(ExchangePhase, [True, False])])
def test_an_answer_in_every_phase(phase: ExchangePhase, complete: bool) -> None:
    exchange = BrokerExchange(phase)
    if phase in UNANSWERED:
        following = exchange.phase_after(complete=complete)
        exchange.on_answer_sent(complete=complete)
        assert exchange.phase is following is (QUIET if complete else UNPROVEN)
    else:
        with pytest.raises(LocalProtocolError):
            exchange.on_answer_sent(complete=complete)


@pytest.mark.parametrize(
    ("phase", "can_be_answered", "following"),
    [(QUIET, True, ASKED), (ASKED, True, ASKED), (UNPROVEN, False, QUIET), (ASKED_FURTHER, False, QUIET)],
)
def test_a_challenge_that_died_with_a_predecessor(
    phase: ExchangePhase, can_be_answered: bool, following: ExchangePhase
) -> None:
    """In the middle of rounds no other process can go on: the broker has to begin again, or to end the relay."""
    exchange = BrokerExchange(phase)
    assert exchange.on_challenge_lost() is can_be_answered
    assert exchange.phase is following


def test_rounds_are_capped() -> None:
    exchange = BrokerExchange()
    exchange.on_challenge(AUTH_REFRESH)
    for _ in range(ROUNDS_MAX - 1):
        exchange.on_answer_sent(complete=False)
        exchange.on_challenge(b"more")
    exchange.on_answer_sent(complete=False)
    with pytest.raises(ChallengeOutOfTurn, match="rounds"):
        exchange.on_challenge(b"more")


def test_each_exchange_has_rounds_of_its_own() -> None:
    exchange = BrokerExchange()
    for _ in range(3 * ROUNDS_MAX):
        exchange.on_challenge(AUTH_REFRESH)
        exchange.on_answer_sent(complete=True)


def test_a_failed_exchange_may_start_again() -> None:
    exchange = BrokerExchange(ASKED_FURTHER)
    exchange.on_failure()
    exchange.on_challenge(AUTH_REFRESH)
    assert exchange.phase is ASKED


def test_the_numbers_are_what_a_successor_reads() -> None:
    assert [int(phase) for phase in (QUIET, ASKED, UNPROVEN, ASKED_FURTHER)] == [0, 1, 2, 3]
