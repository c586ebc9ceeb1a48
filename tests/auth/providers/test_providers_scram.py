"""SCRAM against scramp's client and against messages written by hand: proofs, rules of RFC 5802, who learns what."""

import base64
import hashlib
import hmac
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scramp import ScramClient, ScramException

from auth.providers import scram
from auth.providers.scram import (
    DATA_BYTES_MAX,
    ITERATIONS_MAX,
    SALT_BYTES_MAX,
    USER_BYTES_MAX,
    ScramProvider,
    Users,
    credential_line,
    scram_providers,
)
from auth.registry import ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identity
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import CHECK_INTERVAL_S
from proxy.config.types import Authentication, ScramAuthentication

CLIENT = ClientContext("10.0.0.1:1234")
PASSWORD = "not-to-be-seen"
SHA_256, SHA_512 = MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")
ALICE = credential_line("alice", PASSWORD, SHA_256, 4096)
ALICE_512 = credential_line("alice", PASSWORD, SHA_512, 5000)

RFC_7677 = (
    "user:SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:"
    "wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
)
"""The example of RFC 7677, section 3 (password: pencil), as PostgreSQL stores it."""

Make = Callable[..., ScramProvider]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The provider of a mechanism, on a file of these lines."""

    def make(*lines: str, mechanism: str = SHA_256) -> ScramProvider:
        (tmp_path / "users").write_text("\n".join(lines or (ALICE, ALICE_512)))
        config = ScramAuthentication(file=str(tmp_path / "users"))
        return next(provider for provider in scram_providers(config) if provider.method == mechanism)

    return make


def client(user: str = "alice", password: str = PASSWORD, mechanism: str = SHA_256) -> Any:
    return ScramClient([mechanism], user, password)


async def reply(state: AuthState, message: str) -> str:
    answer = await state.authenticate(message.encode())
    assert answer is not None
    return answer.decode()


async def exchange(provider: ScramProvider, client: Any) -> AuthState:
    """Both rounds, the client checking the server's proof."""
    state = provider.new_auth_state(CLIENT)
    client.set_server_first(await reply(state, client.get_client_first()))
    assert not state.is_complete()
    client.set_server_final(await reply(state, client.get_client_final()))
    return state


async def denial(state: AuthState, message: str | bytes) -> AuthenticationDenied:
    with pytest.raises(AuthenticationDenied) as denied:
        await state.authenticate(message if isinstance(message, bytes) else message.encode())
    assert PASSWORD not in str(denied.value)
    assert not state.is_complete()
    with pytest.raises(RuntimeError):
        state.get_identity()
    return denied.value


async def denial_at_the_end(provider: ScramProvider, client: Any) -> AuthenticationDenied:
    state = provider.new_auth_state(CLIENT)
    client.set_server_first(await reply(state, client.get_client_first()))
    return await denial(state, client.get_client_final())


# ---- users that are accepted


@pytest.mark.conforms("pip-30.1")
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_an_exchange(make: Make, mechanism: str) -> None:
    state = await exchange(make(mechanism=mechanism), client(mechanism=mechanism))
    assert state.is_complete()
    assert (state.get_auth_role(), state.get_identity()) == ("alice", Identity("alice"))


async def test_the_example_of_rfc_7677(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scramp.core.token_hex", lambda: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    state = make(RFC_7677).new_auth_state(CLIENT)
    assert await reply(state, "n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == (
        "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert await reply(state, final) == "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert state.get_auth_role() == "user"


def test_both_mechanisms_are_provided(make: Make, tmp_path: Path) -> None:
    make(ALICE)
    config = Authentication(scram=ScramAuthentication(file=str(tmp_path / "users")))
    assert ProviderRegistry(config, configured_providers).methods == MECHANISMS


async def test_a_client_that_could_bind_channels(make: Make) -> None:
    """`y`: it thinks that we cannot, and is right."""
    state = make().new_auth_state(CLIENT)
    peer = ByHand("y,,", "alice")
    peer.answered(await reply(state, peer.first))
    assert (await reply(state, peer.final(PASSWORD))).startswith("v=")
    assert state.is_complete()


@pytest.mark.parametrize("user", ["Zoë", "a,b", "a=b", "=2C", "a:b$c", "with space"])
async def test_names_of_users(make: Make, user: str) -> None:
    provider = make(credential_line(user, PASSWORD, SHA_256, 4096))
    assert (await exchange(provider, client(user))).get_auth_role() == user


async def test_a_name_is_what_saslprep_makes_of_it(make: Make) -> None:
    """RFC 4013: ª is a, the soft hyphen is nothing. In the file, too."""
    assert (await exchange(make(), client("ªli\u00adce"))).get_auth_role() == "alice"
    state = make().new_auth_state(CLIENT)
    peer = ByHand("n,,", "ªlice")
    peer.answered(await reply(state, peer.first))
    await reply(state, peer.final(PASSWORD))
    assert state.get_auth_role() == "alice"
    provider = make(ALICE.replace("alice", "ªlice"))
    assert (await exchange(provider, client())).get_auth_role() == "alice"


async def test_every_exchange_has_another_nonce(make: Make) -> None:
    provider = make()
    answers = {await reply(provider.new_auth_state(CLIENT), "n,,n=alice,r=abc") for _ in range(5)}
    assert len(answers) == 5


# ---- messages written by hand


class ByHand:
    """A client that says whatever it is told to."""

    def __init__(self, header: str = "n,,", user: str = "alice", nonce: str = "fyko+d2lbbFgONRv9qkxdawL") -> None:
        self.header, self.nonce = header, nonce
        self.bare = f"n={user},r={nonce}"
        self.first = header + self.bare
        self.server_first = ""

    def answered(self, server_first: str) -> None:
        self.server_first = server_first
        found = re.fullmatch(r"r=([^,]+),s=([^,]+),i=([0-9]+)", server_first)
        assert found
        self.server_nonce, self.salt, self.iterations = found[1], base64.b64decode(found[2]), int(found[3])

    def without_proof(self, header: str | None = None, nonce: str | None = None, more: str = "") -> str:
        binding = base64.b64encode((self.header if header is None else header).encode()).decode()
        return f"c={binding},r={self.server_nonce if nonce is None else nonce}{more}"

    def final(self, password: str, **what: Any) -> str:
        """The final message, its proof right for what it says."""
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), self.salt, self.iterations)
        return self.final_by(hmac.digest(salted, b"Client Key", "sha256"), **what)

    def final_by(self, client_key: bytes, **what: Any) -> str:
        text = self.without_proof(**what)
        stored = hashlib.sha256(client_key).digest()
        signature = hmac.digest(stored, f"{self.bare},{self.server_first},{text}".encode(), "sha256")
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        return f"{text},p={base64.b64encode(proof).decode()}"


async def begun(provider: ScramProvider, **what: Any) -> tuple[ByHand, AuthState]:
    peer, state = ByHand(**what), provider.new_auth_state(CLIENT)
    peer.answered(await reply(state, peer.first))
    return peer, state


async def test_the_client_by_hand_is_right(make: Make) -> None:
    """The control: without it, the denials below prove nothing."""
    peer, state = await begun(make())
    await reply(state, peer.final(PASSWORD))
    peer, state = await begun(make())
    await reply(state, peer.final(PASSWORD, more=",x=an-extension"))
    assert state.is_complete()


async def test_a_wrong_password(make: Make) -> None:
    denied = await denial_at_the_end(make(), client(password="wrong"))
    assert (denied.reason, str(denied)) == ("bad_password", "user 'alice'")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", "missing"),
        ("garbage", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"\0" * 50, "malformed"),
        ("n,,", "malformed"),
        ("n,,r=abc,n=alice", "malformed"),
        ("n,,n=alice", "malformed"),
        ("n,,n=,r=abc", "malformed"),
        ("n,,n=alice,r=", "malformed"),
        ("n,,n=alice,r=a b", "malformed"),
        ("n,,n=alice,n=bob,r=abc", "malformed"),
        ("n,,n=al=ice,r=abc", "malformed"),
        ("n,,n=al\u0007ice,r=abc", "malformed"),
        ("n,,m=must-be-known,n=alice,r=abc", "malformed"),
        ("x,,n=alice,r=abc", "malformed"),
        (",,n=alice,r=abc", "malformed"),
        ("n,a=bob,n=alice,r=abc", "malformed"),
        ("n,a=alice,n=alice,r=abc", "malformed"),
        ("p=tls-unique,,n=alice,r=abc", "channel_binding"),
        ("p=tls-server-end-point,,n=alice,r=abc", "channel_binding"),
        ("p=tls-exporter,,n=alice,r=abc", "channel_binding"),
        ("p=,,n=alice,r=abc", "channel_binding"),
        ("n,,n=alice,r=" + "x" * DATA_BYTES_MAX, "malformed"),
    ],
)
async def test_a_first_message_that_is_denied(make: Make, message: str | bytes, reason: str) -> None:
    state = make().new_auth_state(CLIENT)
    assert (await denial(state, message)).reason == reason
    peer = ByHand()
    assert (await denial(state, peer.first)).reason == "malformed"  # nothing is begun again
    assert (await denial(state, peer.first)).reason == "unexpected_round"


async def test_the_largest_message(make: Make) -> None:
    start = "n,,n=alice,r="
    assert await reply(make().new_auth_state(CLIENT), start + "x" * (DATA_BYTES_MAX - len(start)))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"nonce": "fyko+d2lbbFgONRv9qkxdawL"}, "malformed"),
        ({"nonce": "another"}, "malformed"),
        ({"header": "y,,"}, "channel_binding"),
        ({"header": "n,a=bob,"}, "channel_binding"),
        ({"header": ""}, "malformed"),
        ({"more": ",m=must-be-known"}, "malformed"),
    ],
)
async def test_a_final_message_with_the_right_proof_of_the_wrong_words(
    make: Make, what: dict[str, str], reason: str
) -> None:
    peer, state = await begun(make())
    assert (await denial(state, peer.final(PASSWORD, **what))).reason == reason


async def test_a_proof_of_another_exchange(make: Make) -> None:
    """What was overheard is of no use."""
    provider = make()
    peer, state = await begun(provider)
    final = peer.final(PASSWORD)
    await reply(state, final)
    _, again = await begun(provider)
    assert (await denial(again, final)).reason == "malformed"


async def test_a_proof_by_the_stored_key_alone(make: Make) -> None:
    """Who has the file knows StoredKey, not ClientKey."""
    peer, state = await begun(make())
    stored = scram._parsed(ALICE)[2].stored_key
    assert (await denial(state, peer.final_by(stored))).reason == "bad_password"


@pytest.mark.parametrize("proof", ["", "AAAA", "====", "ä", "A" * 44])
async def test_proofs_that_are_none(make: Make, proof: str) -> None:
    for user in ("alice", "nobody"):
        peer, state = await begun(make(), user=user)
        denied = await denial(state, f"{peer.without_proof()},p={proof}")
        assert denied.reason in {"malformed", "bad_password", "unknown_user"}


@pytest.mark.parametrize(("message", "reason"), [("", "missing"), ("garbage", "malformed"), (b"\xff", "malformed")])
async def test_a_final_message_that_is_none(make: Make, message: str | bytes, reason: str) -> None:
    peer, state = await begun(make())
    assert (await denial(state, message)).reason == reason
    assert (await denial(state, peer.final(PASSWORD))).reason == "unexpected_round"


@pytest.mark.conforms("pip-30.47")
async def test_a_final_message_that_is_too_long(make: Make) -> None:
    peer, state = await begun(make())
    assert (await denial(state, peer.final(PASSWORD, more=",x=" + "y" * DATA_BYTES_MAX))).reason == "malformed"


async def test_a_first_message_in_the_second_round(make: Make) -> None:
    peer, state = await begun(make())
    assert (await denial(state, peer.first)).reason == "malformed"


async def test_a_round_after_the_last(make: Make) -> None:
    peer, state = await begun(make())
    final = peer.final(PASSWORD)
    await reply(state, final)
    with pytest.raises(AuthenticationDenied) as denied:
        await state.authenticate(final.encode())
    assert denied.value.reason == "unexpected_round"


async def test_a_user_of_one_mechanism_is_none_of_the_other(make: Make) -> None:
    denied = await denial_at_the_end(make(ALICE, mechanism=SHA_512), client(mechanism=SHA_512))
    assert denied.reason == "unknown_user"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    messages=st.lists(
        st.binary(max_size=100)
        | st.text(alphabet="nyp=,raic\u00ad\ufdfaª1 ", max_size=40).map(str.encode)
        | st.builds(
            lambda text: f"n,,n={text},r=x".encode(), st.text(max_size=30, alphabet=st.characters(codec="utf-8"))
        ),
        min_size=1,
        max_size=3,
    )
)
def test_random_messages_are_denied(make: Make, messages: list[bytes]) -> None:
    provider = make()

    async def verify() -> None:
        state = provider.new_auth_state(CLIENT)
        try:
            for message in messages:
                await state.authenticate(message)
        except AuthenticationDenied:
            pass
        assert not state.is_complete()

    trio.run(verify)


# ---- replies do not reveal which users exist


async def shape(provider: ScramProvider, user: str) -> tuple[bytes, int]:
    """Salt and iterations that a client is told."""
    peer, _ = await begun(provider, user=user)
    return peer.salt, peer.iterations


async def work_of_a_denial(provider: ScramProvider, client: Any) -> list[list[str]]:
    """The hash functions that the server computes for each message, whichever module calls them."""
    state, work = provider.new_auth_state(CLIENT), []

    @contextmanager
    def noted() -> Iterator[None]:
        calls: list[str] = []

        def note(_frame: Any, event: str, called: Any) -> None:
            home = getattr(called, "__module__", None) or type(getattr(called, "__self__", None)).__module__
            if event == "c_call" and home == "_hashlib":
                calls.append(called.__qualname__)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            work.append(calls)

    first = client.get_client_first()
    with noted():
        answer = await reply(state, first)
    client.set_server_first(answer)
    final = client.get_client_final()
    with noted(), pytest.raises(AuthenticationDenied):
        await state.authenticate(final.encode())
    return work


@pytest.mark.conforms("pip-30.57")
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_an_unknown_user_costs_what_a_wrong_password_costs(make: Make, mechanism: str) -> None:
    """Counted, not timed: as many messages, and for each the same hash functions in the same order."""
    provider = make(mechanism=mechanism)
    await work_of_a_denial(provider, client(password="other", mechanism=mechanism))  # which reads the file
    unknown = await work_of_a_denial(provider, client("nobody", mechanism=mechanism))
    wrong = await work_of_a_denial(provider, client(password="wrong", mechanism=mechanism))
    assert unknown == wrong
    assert [bool(calls) for calls in unknown] == [True, True], "both messages cost something"


@pytest.mark.conforms("pip-30.57")
async def test_an_unknown_user_is_denied_where_a_wrong_password_is(make: Make) -> None:
    provider = make()
    assert (await denial_at_the_end(provider, client("nobody"))).reason == "unknown_user"
    assert (await denial_at_the_end(provider, client(password="wrong"))).reason == "bad_password"


async def test_an_unknown_users_name_is_not_told_to_the_log(make: Make) -> None:
    assert "hunter2" not in str(await denial_at_the_end(make(), client("hunter2")))


async def test_an_unknown_users_salt_stays_the_same(make: Make) -> None:
    """In every exchange, in every worker, after every restart, for each spelling; another for each user."""
    salts = {(await shape(make(), "nobody"))[0] for _ in range(3)}
    assert len(salts) == 1
    assert (await shape(make(), "no\u00adbody"))[0] in salts
    assert (await shape(make(), "nobody2"))[0] not in salts
    other_file = make(credential_line("alice", PASSWORD, SHA_256, 4096))
    assert (await shape(other_file, "nobody"))[0] not in salts


UNKNOWN = [f"nobody-{number}" for number in range(400)]


def line_of(user: str, iterations: int = 4096, *, mechanism: str = SHA_256, password: str = "p") -> str:
    """A line that costs no hashing; its keys are none of a password."""
    salt, *keys = (
        base64.b64encode(hashlib.new(mechanism[6:].replace("-", ""), f"{user} {password} {what}".encode()).digest())
        for what in ("salt", "stored", "server")
    )
    return f"{user}:{mechanism}${iterations}:{salt.decode()}${keys[0].decode()}:{keys[1].decode()}"


def told(provider: ScramProvider, mechanism: str = SHA_256) -> dict[str, tuple[int, bytes]]:
    """Iterations and salt that a client is told for unknown names."""
    users = provider._users.value[mechanism]
    return {name: (found.iterations, found.salt) for name in UNKNOWN for found in (users.find(name)[0],)}


async def test_a_changed_password_changes_the_salts_of_the_unknown_about_as_often_as_of_users(make: Make) -> None:
    """Security: a salt that stays when the first line's password changes, or one that changes, tells nothing."""
    lines = [line_of(f"user{number}") for number in range(8)]
    before = told(make(*lines))
    for position in (0, 5):
        lines_after = [*lines]
        lines_after[position] = line_of(f"user{position}", password="new")
        after = told(make(*lines_after))
        assert 1 / 16 < sum(before[name] != after[name] for name in UNKNOWN) / len(UNKNOWN) < 3 / 8


async def test_an_added_user_changes_the_salts_of_few_unknown_names(make: Make) -> None:
    lines = [line_of(f"user{number}") for number in range(8)]
    before, after = told(make(*lines)), told(make(*lines, line_of("new")))
    assert 1 / 18 < sum(before[name] != after[name] for name in UNKNOWN) / len(UNKNOWN) < 1 / 5


async def test_unknown_users_have_the_iterations_of_users_in_the_files_proportions(make: Make) -> None:
    """Security: or an admin, whose iterations nothing else has, would be recognized."""
    ordinary = [line_of(f"user{number}") for number in range(3)]
    seen = Counter(iterations for iterations, _ in told(make(*ordinary, line_of("admin", 15_000))).values())
    assert set(seen) == {4096, 15_000}
    assert 0.15 < seen[15_000] / len(UNKNOWN) < 0.35


async def test_an_unknown_user_follows_the_same_user_with_both_mechanisms(make: Make) -> None:
    """Users mostly have the same iterations in both."""
    lines = [
        line_of(user, iterations, mechanism=mechanism)
        for user, iterations in (("alice", 5000), ("bob", 6000), ("carol", 7000))
        for mechanism in MECHANISMS
    ]
    one, two = (told(make(*lines, mechanism=mechanism), mechanism) for mechanism in MECHANISMS)
    assert [iterations for iterations, _ in one.values()] == [iterations for iterations, _ in two.values()]
    assert not {salt for _, salt in one.values()} & {salt for _, salt in two.values()}


async def test_salts_of_the_two_mechanisms_have_nothing_in_common(make: Make) -> None:
    salts = [(await shape(make(mechanism=mechanism), "nobody"))[0] for mechanism in MECHANISMS]
    assert salts[0] != salts[1]


async def test_an_unknown_users_salt_tells_no_key(make: Make) -> None:
    """It is no digest of the name by ServerKey itself, which every successful client can compute."""
    server_key = scram._parsed(ALICE)[2].server_key
    salt, _ = await shape(make(), "nobody")
    for digest in ("sha256", "sha512"):
        assert hmac.digest(server_key, b"nobody", digest)[: len(salt)] != salt


async def test_an_unknown_users_salt_has_the_length_of_a_users(make: Make) -> None:
    def line(user: str, iterations: int, salt_bytes: int) -> str:
        salt = base64.b64encode(b"x" * salt_bytes).decode()
        return re.sub(r"\$\d+:[^$]+", f"${iterations}:{salt}", ALICE.replace("alice", user))

    shapes = {(9000, 32), (5000, 16), (9000, 20)}
    lines = [line(f"user{number}", *shape) for number, shape in enumerate(shapes)]
    assert {(iterations, len(salt)) for iterations, salt in told(make(*lines)).values()} == shapes
    for length in (12, SALT_BYTES_MAX):
        assert len((await shape(make(line("a", 4096, length)), "nobody"))[0]) == length


async def test_a_mechanism_without_users_looks_like_the_other(make: Make) -> None:
    provider = make(credential_line("alice", PASSWORD, SHA_256, 7000), mechanism=SHA_512)
    assert (await shape(provider, "alice"))[1] == 7000


async def test_a_guessed_mock_key_is_denied_as_an_unknown_user(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client_key = bytes(32)
    monkeypatch.setattr(scram, "token_bytes", lambda _size: hashlib.sha256(client_key).digest())
    peer, state = await begun(make(), user="nobody")
    assert (await denial(state, peer.final_by(client_key))).reason == "unknown_user"


def test_the_mock_key_is_a_secret_of_full_length(make: Make) -> None:
    for mechanism, length in ((SHA_256, 32), (SHA_512, 64)):
        one, two = (make()._users.value[mechanism].find("nobody")[0].stored_key for _ in range(2))
        assert len(one) == length
        assert one != two


def test_the_same_steps_for_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that costs: the mock salt's HMAC is made for those who exist, too."""
    users, made = make()._users.value[SHA_256], []
    monkeypatch.setattr(scram.hmac, "digest", lambda *_: made.append(1) or b"x" * 64)
    for user in ("alice", "nobody"):
        users.find(user)
        assert made.pop() == 1
        assert made == []


# ---- the file


def changed(old: str, new: str) -> str:
    assert old in ALICE
    return ALICE.replace(old, new)


KEYS = ALICE.partition(":")[2]
SHORT = base64.b64encode(b"x" * 31).decode()
BAD_LINES = {
    "no line of the form": "alice",
    "plain text": f"alice:{PASSWORD}",
    "another mechanism": changed("SHA-256", "SHA-1"),
    "channel binding": changed("SHA-256", "SHA-256-PLUS"),
    "the other's keys": changed("SHA-256", "SHA-512"),
    "no user": ":" + KEYS,
    "user of spaces": "  :" + KEYS,
    "user of nothing": "\u00ad:" + KEYS,
    "user with a control character": "a\tb:" + KEYS,
    "user too long": "x" * (USER_BYTES_MAX + 1) + ":" + KEYS,
    "user in two directions": "\u0627a:" + KEYS,
    "few iterations": changed("$4096:", "$4095:"),
    "no iterations": changed("$4096:", "$:"),
    "many iterations": changed("$4096:", f"${ITERATIONS_MAX + 1}:"),
    "zero first": changed("$4096:", "$04096:"),
    "salt too short": re.sub(r"4096:[^$]+", f"4096:{base64.b64encode(b'x' * 11).decode()}", ALICE),
    "salt too long": re.sub(r"4096:[^$]+", f"4096:{base64.b64encode(b'x' * 65).decode()}", ALICE),
    "salt not base64": re.sub(r"4096:[^$]+", "4096:AAAAA", ALICE),
    "StoredKey too short": re.sub(r"(\$[^$]+\$)[^:]+", rf"\g<1>{SHORT}", ALICE),
    "ServerKey too short": re.sub(r"[^:]+$", SHORT, ALICE),
    "something behind": ALICE + ":",
    "twice": ALICE,
    "twice, to SASLprep": changed("alice", "ªlice"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_named_but_not_told(make: Make, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make("# users", ALICE if what.startswith("twice") else RFC_7677, BAD_LINES[what], ALICE_512)
    text = str(refused.value)
    assert text.startswith("authentication.scram.file: ")
    assert ", line 3: " in text
    assert ("a line before" in text) == what.startswith("twice")
    for part in re.split(r"[:$]", BAD_LINES[what]):
        assert len(part) < 9 or part.startswith("SCRAM-") or part not in text
    assert refused.value.__cause__ is None


def test_a_line_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "users").write_bytes(ALICE.encode() + b"\nb\xff")
    with pytest.raises(ConfigError, match="line 2: not UTF-8"):
        list(scram_providers(ScramAuthentication(file=str(tmp_path / "users"))))


@pytest.mark.parametrize("lines", [("",), ("# nobody", "", "  ")])
def test_a_file_without_users(make: Make, lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="names no user"):
        make(*lines)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(scram_providers(ScramAuthentication(file=str(tmp_path / "none"))))


async def test_comments_and_ends_of_lines(make: Make) -> None:
    provider = make("# users", "", ALICE + "\r", "#x:" + KEYS, "")
    assert (await exchange(provider, client())).is_complete()
    assert (await denial_at_the_end(provider, client("#x"))).reason == "unknown_user"


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    make: Make, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    provider = make()
    await exchange(provider, client())
    await trio.sleep(CHECK_INTERVAL_S)
    (tmp_path / "users").write_text(credential_line("bob", "new", SHA_256, 4096))
    assert (await denial_at_the_end(provider, client())).reason == "unknown_user"
    await exchange(provider, client("bob", "new"))
    await trio.sleep(CHECK_INTERVAL_S)
    (tmp_path / "users").write_text("alice:plain\n")
    with structlog.testing.capture_logs() as logs:
        await exchange(provider, client("bob", "new"))
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert "plain" not in str(logs)


def test_keys_are_in_no_text_of_a_credential(make: Make) -> None:
    _, _, credential = scram._parsed(ALICE)
    assert repr(credential) == "Credential(iterations=4096)"
    assert isinstance(make()._users.value[SHA_256], Users)


# ---- writing lines


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_a_line_that_is_written_can_be_read(make: Make, mechanism: str) -> None:
    provider = make(credential_line("bob", "påß:$", mechanism), mechanism=mechanism)
    assert (await exchange(provider, client("bob", "påß:$", mechanism))).get_auth_role() == "bob"
    assert (await denial_at_the_end(provider, client("bob", "pass:$", mechanism))).reason == "bad_password"


def test_no_two_lines_have_the_same_salt() -> None:
    assert len({credential_line("bob", "x", SHA_256, 4096) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("user", "password", "iterations"),
    [
        ("alice", "", 4096),
        ("alice", "\u0007", 4096),
        ("alice", "x", 4095),
        ("alice", "x", ITERATIONS_MAX + 1),
        ("", "x", 4096),
        (" ", "x", 4096),
        ("#alice", "x", 4096),
        ("ªlice", "x", 4096),
        ("a\nb", "x", 4096),
        ("x" * (USER_BYTES_MAX + 1), "x", 4096),
    ],
)
def test_a_line_that_could_not_be_read_is_not_written(user: str, password: str, iterations: int) -> None:
    with pytest.raises(ValueError) as refused:
        credential_line(user, password, SHA_256, iterations)
    assert not isinstance(refused.value, ScramException | UnicodeError)
