"""The states of PIP-30: one round, once."""

import pytest

from auth.state import (
    ROLE_CHARACTERS_MAX,
    AuthenticationDenied,
    ClientContext,
    Identity,
    OneStageAuthState,
    is_fit_for_a_role,
)

CLIENT = ClientContext("10.0.0.1:1234")


class Provider:
    """Takes one word for an identity."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, ClientContext]] = []

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        self.asked.append((data, client))
        if data != b"good":
            raise AuthenticationDenied("bad_word")
        return Identity("alice", 4711)


@pytest.mark.conforms("pip-30.19", "pip-30.29", "pip-30.30", "pip-30.31", "pip-30.33")
async def test_a_one_stage_exchange_is_complete_after_one_round() -> None:
    provider = Provider()
    state = OneStageAuthState(provider, CLIENT)
    assert not state.is_complete()
    assert await state.authenticate(b"good") is None
    assert state.is_complete()
    assert state.get_auth_role() == "alice"
    assert state.get_identity() == Identity("alice", 4711)
    assert provider.asked == [(b"good", CLIENT)]


@pytest.mark.parametrize("first", [b"good", b"bad"])
async def test_a_second_round_is_denied_however_the_first_went(first: bytes) -> None:
    provider = Provider()
    state = OneStageAuthState(provider, CLIENT)
    try:
        await state.authenticate(first)
    except AuthenticationDenied:
        assert first == b"bad"
    with pytest.raises(AuthenticationDenied) as denied:
        await state.authenticate(b"good")
    assert denied.value.reason == "unexpected_round"
    assert len(provider.asked) == 1


@pytest.mark.conforms("pip-30.29")
async def test_a_denied_client_has_no_identity() -> None:
    state = OneStageAuthState(Provider(), CLIENT)
    with pytest.raises(AuthenticationDenied):
        await state.authenticate(b"bad")
    assert not state.is_complete()
    with pytest.raises(RuntimeError):
        state.get_identity()
    with pytest.raises(RuntimeError):
        state.get_auth_role()


@pytest.mark.conforms("pip-30.29")
def test_before_its_round_it_has_no_identity_either() -> None:
    with pytest.raises(RuntimeError):
        OneStageAuthState(Provider(), CLIENT).get_identity()


def test_a_denial_has_a_reason_and_a_text() -> None:
    assert str(AuthenticationDenied("reason")) == "reason"
    denied = AuthenticationDenied("reason", "more of it")
    assert (denied.reason, str(denied)) == ("reason", "more of it")


# ---- roles

UNFIT_ROLES = [
    "",
    " ",
    "\u3000",
    "ali\nce",
    "alice\n",
    "ali\x00ce",
    "\x1b[31malice",
    "ali\x7fce",
    "ali\x85ce",
    "ali\u2028ce",
    "\u202ealice",
    "ali\u200bce",
    "ali\ud800ce",
    "r" * (ROLE_CHARACTERS_MAX + 1),
]


@pytest.mark.parametrize(
    "text", ["alice", "Ünïcödé 角色", "a b", "r" * ROLE_CHARACTERS_MAX], ids=lambda text: text[:20]
)
def test_a_text_that_can_be_a_role(text: str) -> None:
    assert is_fit_for_a_role(text)


@pytest.mark.parametrize("text", UNFIT_ROLES, ids=lambda text: ascii(text[:20]))
def test_a_text_that_no_log_and_no_broker_should_see_as_a_role(text: str) -> None:
    assert not is_fit_for_a_role(text)
