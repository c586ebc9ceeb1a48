"""Users and passwords: htpasswd's forms, what is refused of a file, and replies that do not reveal who exists."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from passlib.hash import apr_md5_crypt, bcrypt, des_crypt, md5_crypt, sha256_crypt, sha512_crypt

from auth.check_queue import CHECKS_PER_SLOT_MAX
from auth.providers import basic
from auth.providers.basic import BCRYPT_PASSWORD_BYTES_MAX, DATA_BYTES_MAX, BasicProvider
from auth.registry import configured_providers
from auth.state import AuthenticationDenied, ClientContext, Identity, OneStageAuthState
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import CHECK_INTERVAL_S
from proxy.config.types import Authentication, BasicAuthentication

CLIENT = ClientContext("10.0.0.1:1234")
PASSWORD = "not-to-be-seen"
FAST = bcrypt.using(rounds=4)

HASHES = {
    "bcrypt 2a": FAST.using(ident="2a").hash(PASSWORD),
    "bcrypt 2b": FAST.using(ident="2b").hash(PASSWORD),
    "bcrypt 2y": FAST.using(ident="2y").hash(PASSWORD),
    "apr1": apr_md5_crypt.hash(PASSWORD),
    "MD5": md5_crypt.hash(PASSWORD),
    "SHA-256": sha256_crypt.using(rounds=1000).hash(PASSWORD),
    "SHA-256, 5000 rounds unsaid": sha256_crypt.using(rounds=5000).hash(PASSWORD),
    "SHA-512": sha512_crypt.using(rounds=1000).hash(PASSWORD),
    "DES": des_crypt.hash(PASSWORD),
}
ALICE = f"alice:{HASHES['bcrypt 2b']}\n"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., BasicProvider]:
    """A provider on a file with this content."""

    def make(content: str | bytes = ALICE, threads_max: int = 2) -> BasicProvider:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "users").write_bytes(data)
        return BasicProvider(BasicAuthentication(file=str(tmp_path / "users"), threads_max=threads_max))

    return make


Make = Callable[..., BasicProvider]


class Checks:
    """Stands in for the hashing: says what it was asked, and yes to PASSWORD."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, bytes]] = []

    def matches(self, entry: Any, password: bytes) -> bool:
        self.asked.append((entry.handler.name, entry.rounds, password))
        return password == PASSWORD.encode()


def put_in_place(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    def matches(entry: Any, password: bytes) -> bool:
        return checks.matches(entry, password)

    monkeypatch.setattr(basic._Entry, "matches", matches)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    checks = Checks()
    put_in_place(checks, monkeypatch)
    return checks


async def denial(provider: BasicProvider, data: bytes) -> AuthenticationDenied:
    with pytest.raises(AuthenticationDenied) as denied:
        await provider.identify(data, CLIENT)
    assert PASSWORD not in str(denied.value)
    return denied.value


def login(user: str, password: str = PASSWORD) -> bytes:
    return f"{user}:{password}".encode()


# ---- users that are accepted


@pytest.mark.parametrize("form", HASHES)
async def test_every_form_of_htpasswd(make: Make, form: str) -> None:
    provider = make(f"alice:{HASHES[form]}\n")
    assert await provider.identify(login("alice"), CLIENT) == Identity("alice")
    for wrong in ("", "x", PASSWORD.upper(), HASHES[form]):
        assert (await denial(provider, login("alice", wrong))).reason in {"bad_password", "malformed"}


async def test_a_hash_that_apache_has_written(make: Make) -> None:
    """From Apache's manual of password formats."""
    provider = make("alice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\n")
    assert await provider.identify(b"alice:myPassword", CLIENT) == Identity("alice")


@pytest.mark.conforms("pip-30.35")
async def test_a_state_takes_one_round(make: Make) -> None:
    (provider,) = configured_providers(Authentication(basic=BasicAuthentication(file=str(_written(make)))))
    assert provider.method == "basic"
    state = provider.new_auth_state(CLIENT)
    assert isinstance(state, OneStageAuthState)
    assert await state.authenticate(login("alice")) is None
    assert (state.is_complete(), state.get_auth_role()) == (True, "alice")
    with pytest.raises(AuthenticationDenied):
        await state.authenticate(login("alice"))


def _written(make: Make) -> str:
    return make()._users.files[0]


async def test_the_password_begins_at_the_first_colon(make: Make) -> None:
    provider = make(f"alice:{FAST.hash('a:b:')}\n")
    assert await provider.identify(b"alice:a:b:", CLIENT) == Identity("alice")


async def test_names_and_passwords_are_utf_8(make: Make) -> None:
    provider = make(f"Zoë:{FAST.hash('påß')}\n")
    assert await provider.identify("Zoë:påß".encode(), CLIENT) == Identity("Zoë")


async def test_comments_empty_lines_and_carriage_returns(make: Make) -> None:
    provider = make(f"# users\r\n\r\n  \n{ALICE.strip()}\r\n#bob:x\nbob:{HASHES['apr1']}")
    for user in ("alice", "bob"):
        assert await provider.identify(login(user), CLIENT) == Identity(user)


# ---- users that are denied


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "missing"),
        (b"alice", "malformed"),
        (b":" + PASSWORD.encode(), "malformed"),
        (b"alice:", "malformed"),
        (b"alice:a\0b", "malformed"),
        (b"al\xffice:x", "malformed"),
        (b"alice:\xff", "malformed"),
        (login("alice", "x" * DATA_BYTES_MAX), "malformed"),
        (login("alice", "wrong"), "bad_password"),
        (login("Alice"), "unknown_user"),
        (login("bob"), "unknown_user"),
        (login("#"), "unknown_user"),
    ],
)
async def test_a_denial(make: Make, data: bytes, reason: str) -> None:
    assert (await denial(make(), data)).reason == reason


async def test_an_unknown_users_name_is_not_told_to_the_log(make: Make) -> None:
    """It may be a password in the wrong place."""
    assert "hunter2" not in str(await denial(make(), login("hunter2")))


@pytest.mark.conforms("pip-30.47")
async def test_sizes_are_checked_before_any_hash_is_made(make: Make, checks: Checks) -> None:
    provider = make()
    await denial(provider, login("alice", "x" * (DATA_BYTES_MAX - 5)))
    assert checks.asked == []
    await denial(provider, login("alice", "x" * (DATA_BYTES_MAX - 6)))
    assert len(checks.asked) == 1


@given(data=st.binary(max_size=64) | st.builds(lambda end: b"alice:" + end, st.binary(max_size=200)))
def test_random_bytes_are_denied(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("basic") / "users"
    file.write_text(ALICE)
    provider = BasicProvider(BasicAuthentication(file=str(file)))

    async def verify() -> None:
        with pytest.raises(AuthenticationDenied):
            await provider.identify(data, CLIENT)

    trio.run(verify)


# ---- bcrypt's 72 bytes


async def test_a_long_password_is_what_bcrypt_takes_of_it(make: Make) -> None:
    """As with htpasswd; the library itself raises."""
    long = "x" * BCRYPT_PASSWORD_BYTES_MAX
    provider = make(f"alice:{FAST.hash(long)}\n")
    for more in ("", "y", "y" * 800):
        assert await provider.identify(login("alice", long + more), CLIENT) == Identity("alice")
    assert (await denial(provider, login("alice", "y" + long))).reason == "bad_password"
    assert (await denial(provider, login("alice", long[:-1]))).reason == "bad_password"
    assert (await denial(provider, login("bob", long * 9))).reason == "unknown_user"


async def test_72_bytes_may_end_within_a_character(make: Make) -> None:
    long = "x" + "ä" * 40
    provider = make(f"alice:{FAST.hash(long.encode()[:72])}\n")
    assert await provider.identify(login("alice", long), CLIENT) == Identity("alice")


# ---- replies do not reveal which users exist


COSTLY = {"admin": bcrypt.using(rounds=6).hash("x"), "old": HASHES["MD5"], "sha": HASHES["SHA-256"]}
UNKNOWN = [f"nobody-{number}" for number in range(300)]


def mixed_costs(**changed: str) -> str:
    """A file of five users with bcrypt's cost 4, and one of each other cost."""
    hashes = {**{f"user{number}": FAST.hash(str(number)) for number in range(5)}, **COSTLY, **changed}
    return "".join(f"{user}:{hashed}\n" for user, hashed in hashes.items())


async def costs_of(provider: BasicProvider, checks: Checks, names: list[str]) -> dict[str, tuple[str, int]]:
    """Scheme and rounds of what a wrong password of each name is checked against."""
    checks.asked.clear()
    for name in names:
        with pytest.raises(AuthenticationDenied):
            await provider.identify(login(name, "wrong"), CLIENT)
    return {name: (scheme, rounds) for name, (scheme, rounds, _) in zip(names, checks.asked, strict=True)}


@pytest.mark.conforms("pip-30.57")
async def test_an_unknown_user_costs_what_a_wrong_password_costs(make: Make, checks: Checks) -> None:
    """Each unknown name costs what some user costs, in the file's proportions: five, one, one and one of eight."""
    provider = make(mixed_costs())
    known = await costs_of(provider, checks, [f"user{number}" for number in range(5)] + list(COSTLY))
    unknown = Counter((await costs_of(provider, checks, UNKNOWN)).values())
    assert (
        set(unknown) == set(known.values()) == {("bcrypt", 4), ("bcrypt", 6), ("md5_crypt", 0), ("sha256_crypt", 1000)}
    )
    for cost, number in Counter(known.values()).items():
        assert abs(unknown[cost] / len(UNKNOWN) - number / len(known)) < 0.12


async def test_an_unknown_name_costs_the_same_in_all_workers_and_after_reloads(
    make: Make, checks: Checks, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    content = mixed_costs()
    provider = make(content)
    costs = await costs_of(provider, checks, UNKNOWN)
    assert await costs_of(make(content), checks, UNKNOWN) == costs
    (tmp_path / "users").write_text(f"# a comment\n{content}")
    await trio.sleep(CHECK_INTERVAL_S)
    assert await costs_of(provider, checks, UNKNOWN) == costs


async def test_the_costs_of_unknown_names_cannot_be_told_without_the_file(make: Make, checks: Checks) -> None:
    """Files of the same users and costs, but other hashes, give them to other names."""
    files = (mixed_costs(), mixed_costs(admin=bcrypt.using(rounds=6).hash("y")))
    one, two = [await costs_of(make(content), checks, UNKNOWN) for content in files]
    admins = [{name for name, cost in costs.items() if cost == ("bcrypt", 6)} for costs in (one, two)]
    assert all(admins)
    assert len(admins[0] & admins[1]) < min(len(names) for names in admins) / 2


async def test_a_password_of_another_user_lets_no_unknown_user_in(make: Make) -> None:
    """What an unknown user is checked against is alice's hash; that it matches must not count."""
    assert (await denial(make(), login("nobody"))).reason == "unknown_user"


# ---- threads


class Gate(Checks):
    """Checks that wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()
        self.go = threading.Event()

    def matches(self, entry: Any, password: bytes) -> bool:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.go.wait(60)
        with self._lock:
            self.running -= 1
        return super().matches(entry, password)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    put_in_place(gate, monkeypatch)
    yield gate
    gate.go.set()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.lowlevel.checkpoint()


async def test_so_many_at_a_time_and_so_many_waiting(make: Make, gate: Gate) -> None:
    provider, outcomes = make(threads_max=2), []

    async def one() -> None:
        try:
            outcomes.append((await provider.identify(login("alice"), CLIENT)).role)
        except AuthenticationDenied as denied:
            outcomes.append(denied.reason)

    async with trio.open_nursery() as nursery:
        for _ in range(2 * CHECKS_PER_SLOT_MAX):
            nursery.start_soon(one)
        await until(lambda: provider._checks.waiting_count == 2 * (CHECKS_PER_SLOT_MAX - 1) and gate.running == 2)
        assert outcomes == []
        await one()
        assert outcomes == ["overloaded"]
        assert (await denial(provider, login("nobody"))).reason == "overloaded"
        gate.go.set()
    assert outcomes[1:] == ["alice"] * (2 * CHECKS_PER_SLOT_MAX)
    assert gate.most == 2
    assert (await provider.identify(login("alice"), CLIENT)).role == "alice"


async def test_a_cancelled_password_check_leaves_the_queue(make: Make, gate: Gate) -> None:
    provider = make(threads_max=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.identify, login("alice"), CLIENT)
        await until(lambda: gate.running == 1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await provider.identify(login("bob"), CLIENT)
        assert provider._checks.waiting_count == 0
        gate.go.set()


# ---- turns


class Line:
    """A provider of one thread that is busy, and passwords that wait; says in which order they were checked."""

    def __init__(self, provider: BasicProvider, gate: Gate, nursery: trio.Nursery) -> None:
        self.provider = provider
        self._gate = gate
        self._nursery = nursery

    async def wait(self, data: bytes, address: str) -> None:
        before = self.provider._checks.waiting_count
        self._nursery.start_soon(self._judge, data, ClientContext(address))
        await until(lambda: self.provider._checks.waiting_count > before or (self._gate.running == 1 and before == 0))
        await trio.testing.wait_all_tasks_blocked()

    async def _judge(self, data: bytes, client: ClientContext) -> None:
        with contextlib.suppress(AuthenticationDenied):
            await self.provider.identify(data, client)


async def test_addresses_have_their_passwords_checked_in_turn(make: Make, gate: Gate) -> None:
    async with trio.open_nursery() as nursery:
        line = Line(make(threads_max=1), gate, nursery)
        for word in ("w0", "w1", "w2", "w3"):
            await line.wait(login("alice", word), "10.0.0.66:1")
        await line.wait(login("alice", "good"), "10.0.0.1:1")
        gate.go.set()
    # The stranger's first one was running, and had failed when the next one's turn came.
    assert [password for *_, password in gate.asked] == [b"w0", b"good", b"w1", b"w2", b"w3"]


async def test_a_user_that_was_accepted_goes_before_strangers_at_its_own_address(make: Make, gate: Gate) -> None:
    gate.go.set()
    provider = make(threads_max=1)
    assert await provider.identify(login("alice"), CLIENT)
    gate.asked.clear()
    gate.go.clear()
    async with trio.open_nursery() as nursery:
        line = Line(provider, gate, nursery)
        for word in ("w0", "w1", "w2"):
            await line.wait(login("alice", word), CLIENT.address)
        await line.wait(login("alice"), CLIENT.address)
        gate.go.set()
    assert [password for *_, password in gate.asked] == [b"w0", PASSWORD.encode(), b"w1", b"w2"]


async def test_only_the_right_password_is_remembered_as_a_login_at_its_address(make: Make) -> None:
    provider = make()
    await denial(provider, login("alice", "wrong"))
    await denial(provider, login("nobody"))
    assert len(provider._checks._logins) == 0
    assert await provider.identify(login("alice"), CLIENT)
    assert provider._checks._logins.recent_value("10.0.0.1")


async def test_a_password_that_was_right_once_is_denied(
    make: Make, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    """Security: what is remembered of a login is good for a place in the line."""
    provider = make()
    assert await provider.identify(login("alice"), CLIENT)
    await trio.sleep(CHECK_INTERVAL_S)
    (tmp_path / "users").write_text(f"alice:{FAST.hash('new')}\n")
    assert provider._checks.matches_recent_proof("alice", PASSWORD.encode())
    assert (await denial(provider, login("alice"))).reason == "bad_password"
    assert not provider._checks.matches_recent_proof("alice", PASSWORD.encode())


async def test_a_wrong_password_takes_nothing_from_its_user(make: Make) -> None:
    """Security: or strangers could."""
    provider = make()
    assert await provider.identify(login("alice"), CLIENT)
    assert (await denial(provider, login("alice", "wrong"))).reason == "bad_password"
    assert provider._checks.matches_recent_proof("alice", PASSWORD.encode())


# ---- the file


REFUSED = {
    "plain text": PASSWORD,
    "SHA-1": "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=",
    "SSHA": "{SSHA}gVK8WC9YyFT1gMsQHTGCgT3sSv5zYWx0",
    "nothing": "",
    "bcrypt 2": "$2$04$5BJqKfqMQvV7nS.yUguNcuRfMMOXK0xPWavM7pOzjEi5ze5T1k8/S",
    "bcrypt 2x": HASHES["bcrypt 2b"].replace("$2b$", "$2x$"),
    "bcrypt, too short": HASHES["bcrypt 2b"][:-1],
    "bcrypt, too long": HASHES["bcrypt 2b"] + ".",
    "bcrypt, cost 3": HASHES["bcrypt 2b"].replace("$04$", "$03$"),
    "bcrypt, cost 32": HASHES["bcrypt 2b"].replace("$04$", "$32$"),
    "bcrypt, bits too many in the salt": "$2b$04$aaaaaaaaaaaaaaaaaaaaab" + "." * 31,
    "bcrypt, bits too many in the end": "$2b$04$" + "." * 52 + "/",
    "apr1 without the hash": "$apr1$salt$",
    "MD5 without the hash": "$1$salt",
    "SHA-256 without the hash": "$5$salt",
    "SHA-512, few rounds": HASHES["SHA-512"].replace("rounds=1000", "rounds=999"),
    "argon2": "$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHQ$RdescudvJCsgt3ub+b0dWRWJTmaaJObG",
    "DES, too long": HASHES["DES"] + "a",
    "two": f"{HASHES['apr1']}:{HASHES['apr1']}",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_hash_of_an_unknown_form_is_refused_with_its_line_number(make: Make, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(f"# a comment\n{ALICE}bob:{REFUSED[what]}\n")
    text = str(refused.value)
    assert text.startswith("authentication.basic.file: ")
    assert ", line 3: " in text
    assert len(REFUSED[what]) < 5 or REFUSED[what] not in text
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names no user"),
        (b"# nobody\n\n", "names no user"),
        (b"alice\n", "line 1: not user:hash"),
        (f":{HASHES['apr1']}\n".encode(), "line 1: not user:hash"),
        (f"a\tb:{HASHES['apr1']}\n".encode(), "line 1: not user:hash"),
        (f"{'x' * 1025}:{HASHES['apr1']}\n".encode(), "line 1: not user:hash"),
        (b"\n" + ALICE.encode() + ALICE.encode(), "line 3: a user who has a line before"),
        (ALICE.encode() + b"b\xff:x\n", "line 2: not UTF-8"),
    ],
    ids=["empty", "comment", "no hash", "no name", "tab", "long name", "twice", "bytes"],  # hashes have a random salt
)
def test_a_file_that_is_refused(make: Make, content: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(content)
    assert said in str(refused.value)
    assert "$" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        BasicProvider(BasicAuthentication(file=str(tmp_path / "none")))


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    make: Make, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    provider = make()
    assert await provider.identify(login("alice"), CLIENT)
    await trio.sleep(CHECK_INTERVAL_S)
    (tmp_path / "users").write_text(f"bob:{FAST.hash('new')}\n")
    assert (await denial(provider, login("alice"))).reason == "unknown_user"
    assert await provider.identify(b"bob:new", CLIENT) == Identity("bob")
    await trio.sleep(CHECK_INTERVAL_S)
    (tmp_path / "users").write_text("alice:plain\n")
    with structlog.testing.capture_logs() as logs:
        assert await provider.identify(b"bob:new", CLIENT) == Identity("bob")
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert "plain" not in str(logs)


def test_hashes_are_in_no_text_of_an_entry(make: Make) -> None:
    assert "$2b$" not in repr(make()._users.value)
