"""The auth worker's service, through its handlers: rounds, verdicts, the proxy's credentials, reloads."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog.testing
import trio
import trio.testing
from eager_calls import answer_at_once, carry_out
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry
from tokens import OTHER_SECRET, SECRET, by_hand, token

from auth import exchange_store, service
from auth.broker_credentials import FixedCredentials, end_of_token_unix_ms
from auth.service import AuthService
from auth.state import (
    ROLE_CHARACTERS_MAX,
    AuthenticationDenied,
    BrokerAuthState,
    ClientContext,
    CredentialsUnavailable,
    Identity,
    OneForAllBrokers,
)
from proto.broker_handshake import ROUNDS_MAX as BROKER_CHALLENGES_MAX
from proto.roles import Role
from proto.rpc_pb2 import (
    AuthenticateRequest,
    AuthenticateResponse,
    BrokerCredentialsRequest,
    BrokerCredentialsResponse,
    Method,
    Principal,
    Status,
)
from proto.sealed_principal import expiry_unix_ms, unseal
from proxy.common import reloading_file as watched
from proxy.common.deny_list import credential_digest
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import file_stamps, take_over_held_files
from proxy.config.types import (
    MIB,
    Authentication,
    BrokerCredentials,
    Brokers,
    Config,
    Limits,
    TlsAuthentication,
    TokenAuthentication,
)
from proxy.runtime.fairness.owners import ADDRESS_CHARACTERS_MAX
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcRefused

SEAL_KEY = bytes(range(32))
FORWARDER = Caller(Role.FORWARDER, 100)
OTHER_FORWARDER = Caller(Role.FORWARDER, 101)
ADDRESS = "10.0.0.1:1234"


class ScriptedAuthState:
    """A state that challenges as often as it is told, then knows alice. Every round's data is noted."""

    def __init__(self, challenges: list[bytes | None], identity: Identity = Identity("alice")) -> None:  # noqa: B008
        self._challenges = challenges
        self._identity = identity
        self.data: list[bytes] = []

    async def authenticate(self, data: bytes) -> bytes | None:
        await trio.lowlevel.checkpoint()
        self.data.append(data)
        if data == b"wrong":
            raise AuthenticationDenied("bad_password", "the mechanism says no")
        if data == b"defect":
            raise RuntimeError("cannot parse s3cret")
        return self._challenges.pop(0) if self._challenges else None

    def is_complete(self) -> bool:
        return not self._challenges and self.data[-1:] == [b"last"]

    def get_auth_role(self) -> str:
        return self._identity.role

    def get_identity(self) -> Identity:
        return self._identity


class RoundsProvider:
    """Method `rounds`: every client gets the state that the test has prepared."""

    method = "rounds"

    def __init__(self) -> None:
        self.next_state: Callable[[], Any] = lambda: ScriptedAuthState([b"challenge"])
        self.states: list[Any] = []
        self.clients: list[ClientContext] = []

    def new_auth_state(self, client: ClientContext) -> Any:
        self.clients.append(client)
        self.states.append(self.next_state())
        return self.states[-1]


class Worker:
    """A service and its callers."""

    def __init__(self, config: Config, nursery: trio.Nursery) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.service = AuthService(
            WorkerContext(
                role=Role.AUTH,
                index=0,
                config=config,
                seal_key=SEAL_KEY,
                descriptors=Descriptors(channel=-1, liveness=-1),
                registry=self.registry,
                nursery=nursery,
                reactor=None,  # type: ignore[arg-type]  # an auth worker asks nothing of it
            )
        )

    async def ask(
        self,
        method: str,
        data: bytes,
        *,
        first: bool = True,
        exchange: int = 1,
        caller: Caller = FORWARDER,
        address: str = ADDRESS,
        **fields: Any,
    ) -> AuthenticateResponse:
        request = AuthenticateRequest(
            authentication_id=exchange, first_round=first, method=method, data=data, client_address=address, **fields
        )
        handler = self.service.handlers()[Method.AUTHENTICATE]
        return AuthenticateResponse.FromString(await carry_out(handler, request.SerializeToString(), caller))

    async def denial(self, method: str, data: bytes, **how: Any) -> str:
        """The reason of a denial; a denial brings nothing else."""
        response = await self.ask(method, data, **how)
        assert response.WhichOneof("outcome") == "denied"
        return str(response.denied.reason)

    async def challenge(self, data: bytes, **how: Any) -> bytes:
        response = await self.ask("rounds", data, **how)
        assert response.WhichOneof("outcome") == "challenge"
        return bytes(response.challenge)

    async def principal(self, method: str, data: bytes, **how: Any) -> Principal:
        """Who the client is; the same must be under the seal."""
        response = await self.ask(method, data, **how)
        assert response.WhichOneof("outcome") == "authenticated"
        verdict = response.authenticated
        assert unseal(verdict.sealed_principal, SEAL_KEY) == verdict.principal
        return verdict.principal

    async def credentials(
        self, challenge: bytes | None = None, *, exchange: int = 1, host: str = "broker-1", caller: Caller = FORWARDER
    ) -> tuple[str, bytes]:
        response = await self.credentials_response(challenge, exchange=exchange, host=host, caller=caller)
        return response.method, response.data

    async def credentials_response(
        self, challenge: bytes | None = None, *, exchange: int = 1, host: str = "broker-1", caller: Caller = FORWARDER
    ) -> BrokerCredentialsResponse:
        request = BrokerCredentialsRequest(exchange_id=exchange, broker_host=host)
        if challenge is not None:
            request.challenge = challenge
        handler = self.service.handlers()[Method.BROKER_CREDENTIALS]
        return BrokerCredentialsResponse.FromString(await carry_out(handler, request.SerializeToString(), caller))

    async def no_credentials(self, challenge: bytes | None = None, **how: Any) -> str:
        with pytest.raises(RpcRefused) as refused:
            await self.credentials(challenge, **how)
        assert refused.value.status == Status.INVALID_REQUEST
        return refused.value.detail

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def failures(self, reason: str, method: str, provider: str) -> float:
        labels = {"provider_name": provider, "auth_method": method, "reason": reason}
        return self.count("pulsar_authentication_failures_total", **labels)


def of_alice(method: str) -> Principal:
    """Alice, by her own connection."""
    return Principal(type="User", name="alice", method=method, proxy="")


def with_token(secret_file: str, *, token_file: Path | None = None, **token: Any) -> Config:
    credentials = None if token_file is None else BrokerCredentials(method="token", file=str(token_file))
    return Config(
        authentication=Authentication(enabled=True, token=TokenAuthentication(secret_key=secret_file, **token)),
        brokers=Brokers(credentials=credentials),
        limits=Limits(handshake_timeout_ms=10_000),
    )


PROXY_TOKEN = token(sub="proxy")


@pytest.fixture
def proxy_token(tmp_path: Path) -> Path:
    """The file of the proxy's own token."""
    path = tmp_path / "proxy.token"
    path.write_bytes(PROXY_TOKEN + b"\n")
    return path


@pytest.fixture
async def worker(secret_file: str, proxy_token: Path, nursery: trio.Nursery) -> Worker:
    """Believes SECRET, and has a token of the proxy's."""
    return Worker(with_token(secret_file, token_file=proxy_token), nursery)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> RoundsProvider:
    """The only provider of every service that is made."""
    provider = RoundsProvider()
    monkeypatch.setattr("auth.service.configured_providers", lambda _config: iter([provider]))
    return provider


@pytest.fixture
async def many_rounds(provider: RoundsProvider, nursery: trio.Nursery) -> Worker:
    """A worker with method `rounds`."""
    return Worker(Config(limits=Limits(handshake_timeout_ms=10_000)), nursery)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What was logged; no secret may be in it, whatever the test does."""
    with structlog.testing.capture_logs() as entries:
        yield entries
    assert "not-to-be-seen" not in str(entries)


# ---- authentication in a single round


@pytest.mark.conforms("pip-1.9", "pip-30.11")
async def test_a_good_token(worker: Worker, logs: list[Any]) -> None:
    assert await worker.principal("token", token()) == of_alice("token")
    labels = {"provider_name": "TokenProvider", "auth_method": "token"}
    assert worker.count("pulsar_authentication_success_total", **labels) == 1
    assert worker.count("pulsar_proxy_authentication_round_seconds_count") == 1
    assert logs == []


async def test_the_end_of_a_token_is_the_end_of_the_principal(worker: Worker) -> None:
    end = int(time.time()) + 100
    response = await worker.ask("token", token(exp=end))
    assert response.authenticated.principal.expires_at_unix_ms == end * 1000
    sealed = response.authenticated.sealed_principal
    assert expiry_unix_ms(unseal(sealed, SEAL_KEY)) == end * 1000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (token(OTHER_SECRET), "bad_signature"),
        (token(exp=1), "expired"),
        (token(nbf=2**33), "not_yet_valid"),
        (by_hand({"alg": "none"}, {"sub": "alice"}, None), "bad_algorithm"),
        (token(sub=...), "no_role"),
        (token(sub="a\nb"), "bad_role"),
        (b"", "missing"),
        (b"\xff\xfe", "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_token(worker: Worker, logs: list[Any], data: bytes, reason: str) -> None:
    assert await worker.denial("token", data) == reason
    assert worker.failures(reason, "token", "TokenProvider") == 1
    assert worker.count("pulsar_authentication_success_total", provider_name="TokenProvider", auth_method="token") == 0
    assert worker.count("pulsar_expired_token_total") == (reason == "expired")
    assert worker.count("pulsar_proxy_authentication_round_seconds_count") == 1
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert (entry["event"], entry["client"], entry["method"]) == ("authentication denied", ADDRESS, "token")
    assert entry["reason"] == reason
    for part in data.split(b"."):
        if len(part) > 8:
            assert part.decode() not in str(entry)


async def test_unknown_methods_are_denied_and_share_one_label(worker: Worker, logs: list[Any]) -> None:
    for method in ("", "sasl", "Token", "x" * 5000, *(f"method-{number}" for number in range(20))):
        assert await worker.denial(method, token()) == "unknown_method"
    assert worker.failures("unknown_method", "other", "none") == 24
    assert await worker.denial("none", b"") == "unknown_method"
    assert worker.failures("unknown_method", "none", "none") == 1
    assert all(len(str(entry)) < 500 for entry in logs)


async def test_clock_skew_counts_to_the_end(secret_file: str, nursery: trio.Nursery) -> None:
    """A token that ended within the allowed skew is let in by the provider, and so by the service and the seal."""
    worker = Worker(with_token(secret_file, allowed_clock_skew_ms=60_000), nursery)
    assert (await worker.principal("token", token(exp=int(time.time()) - 30))).name == "alice"
    assert await worker.denial("token", token(exp=int(time.time()) - 90)) == "expired"


@pytest.mark.parametrize("end", [2**63 - 1, 2**64, 1e300, 1e308, 10**400], ids=["long", "2^64", "1e300", "1e308", "*"])
async def test_a_token_for_ever_gets_a_verdict(worker: Worker, end: float) -> None:
    response = await worker.ask("token", by_hand({"alg": "HS256"}, {"sub": "alice", "exp": end}, SECRET))
    assert response.WhichOneof("outcome") in {"authenticated", "denied"}


@pytest.mark.parametrize("field", ["data", "original_token"])
async def test_a_denied_token_is_refused(nursery: trio.Nursery, tmp_path: Path, field: str) -> None:
    """Security: the client's own token, and that which a proxy before this one forwards."""
    secret, denied = tmp_path / "secret", tmp_path / "denied"
    secret.write_bytes(SECRET)
    denied.write_text("token-id 7")
    authentication = Authentication(
        enabled=True, deny_file=str(denied), token=TokenAuthentication(secret_key=str(secret))
    )
    worker = Worker(Config(authentication=authentication), nursery)
    fields = {"original_token": token(jti="7")} if field == "original_token" else {}
    assert await worker.denial("token", token(jti="7" if not fields else "8"), **fields) == "denied_credential"
    response = await worker.ask("token", token(jti="8"))
    assert credential_digest("token-id", "8") in response.authenticated.credentials


async def test_a_token_has_no_second_round(worker: Worker) -> None:
    await worker.principal("token", token())
    assert await worker.denial("token", token(), first=False) == "unknown_round"


@pytest.mark.conforms("pip-30.53")
async def test_without_any_provider_every_client_is_denied(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)
    assert await worker.denial("token", token()) == "unknown_method"
    assert worker.service.status() == {"methods": [], "authentications_under_way": 0}


@pytest.mark.parametrize("method", [Method.AUTHENTICATE, Method.BROKER_CREDENTIALS])
async def test_bytes_that_are_no_request(worker: Worker, method: int) -> None:
    with pytest.raises(DecodeError):
        await carry_out(worker.service.handlers()[method], b"\xff", FORWARDER)


async def test_only_authenticate_and_broker_credentials_are_served(worker: Worker) -> None:
    assert set(worker.service.handlers()) == {Method.AUTHENTICATE, Method.BROKER_CREDENTIALS}


# ---- several rounds (PIP-30)


@pytest.mark.conforms("pip-30.10", "pip-30.17", "pip-30.20", "pip-30.37", "pip-30.38")
async def test_two_rounds(many_rounds: Worker, provider: RoundsProvider) -> None:
    assert await many_rounds.challenge(b"first") == b"challenge"
    assert many_rounds.service.status() == {"methods": ["rounds"], "authentications_under_way": 1}
    principal = await many_rounds.principal("rounds", b"last", first=False)
    assert principal == of_alice("rounds")
    assert provider.states[0].data == [b"first", b"last"]
    assert provider.clients == [ClientContext(ADDRESS)]
    assert many_rounds.service.status()["authentications_under_way"] == 0
    assert many_rounds.count("pulsar_proxy_authentication_round_seconds_count") == 2
    labels = {"provider_name": "RoundsProvider", "auth_method": "rounds"}
    assert many_rounds.count("pulsar_authentication_success_total", **labels) == 1


@pytest.mark.conforms("pip-30.38")
async def test_an_empty_challenge_is_a_challenge(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: ScriptedAuthState([b""])
    assert await many_rounds.challenge(b"first") == b""
    await many_rounds.principal("rounds", b"last", first=False)


@pytest.mark.conforms("pip-30.45")
async def test_ten_rounds_and_not_one_more(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: ScriptedAuthState([b"c"] * 9)
    assert await many_rounds.challenge(b"first") == b"c"
    for _ in range(8):
        assert await many_rounds.challenge(b"more", first=False) == b"c"
    await many_rounds.principal("rounds", b"last", first=False)

    provider.next_state = lambda: ScriptedAuthState([b"c"] * 10)
    assert await many_rounds.challenge(b"first") == b"c"
    for _ in range(8):
        assert await many_rounds.challenge(b"more", first=False) == b"c"
    assert await many_rounds.denial("rounds", b"more", first=False) == "too_many_rounds"
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"
    assert many_rounds.failures("too_many_rounds", "rounds", "RoundsProvider") == 1


async def test_a_denial_ends_the_exchange(many_rounds: Worker, logs: list[Any]) -> None:
    await many_rounds.challenge(b"first")
    assert await many_rounds.denial("rounds", b"wrong", first=False) == "bad_password"
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"
    assert logs[0]["detail"] == "the mechanism says no"


@pytest.mark.conforms("pip-30.51")
async def test_a_defect_of_a_provider_denies_the_client(many_rounds: Worker, logs: list[Any]) -> None:
    """To the client a denial as any other; to the operator an error in the log."""
    await many_rounds.challenge(b"first")
    assert await many_rounds.denial("rounds", b"defect", first=False) == "defect"
    assert many_rounds.failures("defect", "rounds", "RoundsProvider") == 1
    assert [entry["log_level"] for entry in logs] == ["error", "warning"]
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


async def test_the_message_of_a_provider_defect_is_not_logged(many_rounds: Worker, logs: list[Any]) -> None:
    """Security: parsers quote what they could not parse, which may be a client's secret."""
    assert await many_rounds.denial("rounds", b"defect") == "defect"
    assert "s3cret" not in str(logs)


@pytest.mark.conforms("pip-30.55")
async def test_the_mechanisms_own_words_do_not_leave_the_worker(many_rounds: Worker) -> None:
    """Security: the log has them; the forwarder, and so the client, has a reason from a short list."""
    response = await many_rounds.ask("rounds", b"wrong")
    assert response == AuthenticateResponse(denied={"reason": "bad_password"})
    assert b"the mechanism says no" not in response.SerializeToString()


@pytest.mark.conforms("pip-30.24")
async def test_a_provider_that_neither_finishes_nor_asks(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: ScriptedAuthState([None, b"never"])
    assert await many_rounds.denial("rounds", b"first") == "no_challenge"
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


@pytest.mark.conforms("pip-30.49")
@pytest.mark.parametrize("method", ["token", "", "Rounds"])
async def test_another_method_in_a_later_round(many_rounds: Worker, method: str) -> None:
    await many_rounds.challenge(b"first")
    assert await many_rounds.denial(method, b"last", first=False) == "method_changed"
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


async def test_a_round_that_was_not_begun_is_denied(many_rounds: Worker, provider: RoundsProvider) -> None:
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"
    assert provider.states == []


@pytest.mark.parametrize("how", [{"exchange": 2}, {"caller": OTHER_FORWARDER}])
async def test_a_round_is_not_answered_for_another_exchange_or_forwarder(
    many_rounds: Worker, how: dict[str, Any]
) -> None:
    await many_rounds.challenge(b"first")
    assert await many_rounds.denial("rounds", b"last", first=False, **how) == "unknown_round"
    assert (await many_rounds.principal("rounds", b"last", first=False)).name == "alice"


@pytest.mark.conforms("pip-30.50")
async def test_a_round_answered_twice_at_the_same_time(many_rounds: Worker, provider: RoundsProvider) -> None:
    await many_rounds.challenge(b"first")
    outcomes: list[str | None] = []

    async def answer() -> None:
        response = await many_rounds.ask("rounds", b"last", first=False)
        outcomes.append(response.WhichOneof("outcome"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        nursery.start_soon(answer)
    assert sorted(map(str, outcomes)) == ["authenticated", "denied"]
    assert provider.states[0].data == [b"first", b"last"]


@pytest.mark.conforms("pip-30.46")
async def test_a_client_that_takes_too_long(many_rounds: Worker, autojump_clock: trio.testing.MockClock) -> None:
    await many_rounds.challenge(b"first")
    await trio.sleep(9.9)
    assert many_rounds.service.status()["authentications_under_way"] == 1
    await trio.sleep(0.1)
    assert many_rounds.service.status()["authentications_under_way"] == 0
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


async def test_too_many_at_once(many_rounds: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 2)
    for exchange in (1, 2):
        await many_rounds.challenge(b"first", exchange=exchange)
    assert await many_rounds.denial("rounds", b"first", exchange=3) == "overloaded"
    assert (await many_rounds.principal("rounds", b"last", first=False, exchange=1)).name == "alice"


async def test_the_client_context_kept_by_an_exchange_is_bounded(many_rounds: Worker, provider: RoundsProvider) -> None:
    """Security: there may be 20,000 exchanges, and a client without a credential can begin one."""
    assert await many_rounds.denial("rounds", b"first", original_principal="r" * (ROLE_CHARACTERS_MAX + 1)) == (
        "invalid_roles"
    )
    assert many_rounds.service.status()["authentications_under_way"] == 0
    await many_rounds.challenge(b"first", address="a" * 1_000_000, original_principal="r" * ROLE_CHARACTERS_MAX)
    assert provider.clients == [ClientContext("a" * ADDRESS_CHARACTERS_MAX)]


async def test_an_abandoned_exchange_is_forgotten(many_rounds: Worker) -> None:
    """Otherwise strangers who leave between two rounds could fill the room that others need."""
    await many_rounds.challenge(b"first", exchange=1)
    await many_rounds.challenge(b"first", exchange=2)
    handler = many_rounds.service.handlers()[Method.AUTHENTICATE]
    over = AuthenticateRequest(authentication_id=1, over=True).SerializeToString()
    assert await carry_out(handler, over, OTHER_FORWARDER) == b"", "another forwarder's is another's"
    assert many_rounds.service.status()["authentications_under_way"] == 2
    assert await carry_out(handler, over, FORWARDER) == b""
    assert many_rounds.service.status()["authentications_under_way"] == 1
    assert await many_rounds.denial("rounds", b"last", first=False, exchange=1) == "unknown_round"


@pytest.mark.parametrize("ago_ms", [0, 1, 10**9])
async def test_an_identity_that_has_ended_is_denied(
    many_rounds: Worker, provider: RoundsProvider, monkeypatch: pytest.MonkeyPatch, ago_ms: int
) -> None:
    now_s = 1_800_000_000.0
    monkeypatch.setattr("auth.service.time.time", lambda: now_s)
    provider.next_state = lambda: ScriptedAuthState([], Identity("alice", int(now_s * 1000) - ago_ms))
    assert await many_rounds.denial("rounds", b"last") == "expired"
    assert many_rounds.failures("expired", "rounds", "RoundsProvider") == 1
    provider.next_state = lambda: ScriptedAuthState([], Identity("alice", int(now_s * 1000) + 1))
    assert (await many_rounds.ask("rounds", b"last")).authenticated.principal.name == "alice"


@pytest.mark.conforms("pip-30.47")
@pytest.mark.parametrize(
    "role",
    [
        "",
        " ",
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
    ],
    ids=lambda role: ascii(role[:20]),
)
async def test_a_role_that_no_log_and_no_broker_should_see(
    many_rounds: Worker, provider: RoundsProvider, logs: list[Any], role: str
) -> None:
    """Whatever the mechanism is: tokens' claims, users in files, names in certificates."""
    provider.next_state = lambda: ScriptedAuthState([], Identity(role))
    assert await many_rounds.denial("rounds", b"last") == "bad_role"
    assert not role.strip() or role not in str(logs)


# ---- the server's last word


class LastWord(ScriptedAuthState):
    """Complete with the round after its challenges, in which it has still something to say (SCRAM's server-final)."""

    def __init__(self, challenges: list[bytes | None], word: bytes = b"signature") -> None:
        super().__init__([*challenges, word])

    def is_complete(self) -> bool:
        return not self._challenges


@pytest.mark.conforms("pip-30.8", "pip-30.24")
async def test_a_client_is_accepted_after_the_servers_final_message(
    many_rounds: Worker, provider: RoundsProvider
) -> None:
    provider.next_state = lambda: LastWord([b"challenge"])
    assert await many_rounds.challenge(b"first") == b"challenge"
    assert await many_rounds.challenge(b"proof", first=False) == b"signature"
    labels = {"provider_name": "RoundsProvider", "auth_method": "rounds"}
    assert many_rounds.count("pulsar_authentication_success_total", **labels) == 0
    assert await many_rounds.principal("rounds", b"", first=False) == of_alice("rounds")
    assert provider.states[0].data == [b"first", b"proof"], "the mechanism is not asked again"
    assert many_rounds.count("pulsar_authentication_success_total", **labels) == 1
    assert many_rounds.service.status()["authentications_under_way"] == 0
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"


async def test_the_last_word_after_the_first_round(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: LastWord([])
    assert await many_rounds.challenge(b"proof") == b"signature"
    assert (await many_rounds.principal("rounds", b"", first=False)).name == "alice"


@pytest.mark.conforms("pip-30.8")
@pytest.mark.parametrize("data", [b"x", b"proof", b"\0", b"signature"])
async def test_the_last_word_is_answered_with_nothing(
    many_rounds: Worker, provider: RoundsProvider, data: bytes
) -> None:
    provider.next_state = lambda: LastWord([])
    await many_rounds.challenge(b"proof")
    assert await many_rounds.denial("rounds", data, first=False) == "unexpected_round"
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"
    assert provider.states[0].data == [b"proof"]


async def test_the_last_word_is_not_answered_by_another(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: LastWord([])
    await many_rounds.challenge(b"proof")
    for how in ({"exchange": 2}, {"caller": OTHER_FORWARDER}):
        assert await many_rounds.denial("rounds", b"", first=False, **how) == "unknown_round"
    assert await many_rounds.denial("token", b"", first=False) == "method_changed"
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"


async def test_the_last_word_counts_as_a_round(many_rounds: Worker, provider: RoundsProvider) -> None:
    async def all_but_the_last(challenges: int) -> None:
        provider.next_state = lambda: LastWord([b"c"] * challenges)
        await many_rounds.challenge(b"first")
        for _ in range(challenges - 1):
            await many_rounds.challenge(b"more", first=False)

    await all_but_the_last(8)
    assert await many_rounds.challenge(b"proof", first=False) == b"signature"
    assert (await many_rounds.principal("rounds", b"", first=False)).name == "alice"
    await all_but_the_last(9)
    assert await many_rounds.denial("rounds", b"proof", first=False) == "too_many_rounds"
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"


async def test_the_last_word_waits_no_longer_than_any_other_round(
    many_rounds: Worker, provider: RoundsProvider, autojump_clock: trio.testing.MockClock
) -> None:
    provider.next_state = lambda: LastWord([])
    await many_rounds.challenge(b"proof")
    await trio.sleep(10)
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"


async def test_a_reload_ends_exchanges_that_wait_for_their_final_message(
    many_rounds: Worker, provider: RoundsProvider
) -> None:
    """Who it is was found by the old keys."""
    provider.next_state = lambda: LastWord([])
    await many_rounds.challenge(b"proof")
    await many_rounds.service.configure(Config())
    assert await many_rounds.denial("rounds", b"", first=False) == "unknown_round"


async def test_a_credential_that_ends_before_the_last_word_is_answered(
    many_rounds: Worker, provider: RoundsProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = LastWord([])
    state._identity = Identity("alice", 1_800_000_001_000)
    provider.next_state = lambda: state
    monkeypatch.setattr("auth.service.time.time", lambda: 1_800_000_000.0)
    await many_rounds.challenge(b"proof")
    monkeypatch.setattr("auth.service.time.time", lambda: 1_800_000_001.0)
    assert await many_rounds.denial("rounds", b"", first=False) == "expired"


# ---- bounds of a client's data


@pytest.mark.conforms("pip-30.17")
async def test_the_certificate_is_passed_to_the_provider(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: ScriptedAuthState([])
    await many_rounds.principal("rounds", b"last", client_certificate=b"DER")
    assert provider.clients == [ClientContext(ADDRESS, b"DER")]


@pytest.mark.conforms("pip-30.21", "pip-30.51")
async def test_data_may_be_anything(many_rounds: Worker, provider: RoundsProvider) -> None:
    """Empty data, and rubbish, are passed to the mechanism, in any round."""
    for first in (b"", b"\xff" * 1024, b"wrong"):
        provider.next_state = lambda: ScriptedAuthState([b"challenge"])
        response = await many_rounds.ask("rounds", first)
        assert response.WhichOneof("outcome") == ("denied" if first == b"wrong" else "challenge")
        assert await many_rounds.denial("rounds", b"wrong", first=False) in {"bad_password", "unknown_round"}


@pytest.mark.conforms("pip-30.52")
async def test_a_worker_that_was_restarted_knows_no_rounds(
    many_rounds: Worker, provider: RoundsProvider, nursery: trio.Nursery
) -> None:
    """Never a replay: the successor does not begin again in the middle, whatever is sent again."""
    await many_rounds.challenge(b"first")
    successor = Worker(Config(), nursery)
    assert await successor.denial("rounds", b"last", first=False) == "unknown_round"
    assert len(provider.states) == 1


@pytest.mark.conforms("pip-30.54")
async def test_an_anonymous_client(nursery: trio.Nursery, secret_file: str) -> None:
    token_table = TokenAuthentication(secret_key=secret_file)
    for anonymous_role in ("", "guest"):
        authentication = Authentication(enabled=True, anonymous_role=anonymous_role, token=token_table)
        worker = Worker(Config(authentication=authentication), nursery)
        for method in ("", "none"):
            if anonymous_role:
                assert (await worker.principal(method, b"")).name == "guest"
            else:
                assert await worker.denial(method, b"") == "unknown_method"
        assert await worker.denial("token", b"") == "missing"
        assert await worker.denial("sasl", b"") == "unknown_method"


# ---- proxies before this one


def with_proxies(secret_file: str, *proxy_roles: str, **settings: Any) -> Config:
    return Config(
        authentication=Authentication(
            enabled=True,
            token=TokenAuthentication(secret_key=secret_file),
            proxy_roles=proxy_roles,
            **settings,
        )
    )


@pytest.fixture
async def behind(secret_file: str, nursery: trio.Nursery) -> Worker:
    """A worker that knows a proxy of role `proxy-a`."""
    return Worker(with_proxies(secret_file, "proxy-a"), nursery)


PROXY = {"original_principal": "alice", "through_proxy": True}


@pytest.mark.conforms("pip-1.32")
async def test_a_proxy_brings_its_client(behind: Worker) -> None:
    end = int(time.time()) + 100
    principal = await behind.principal("token", token(sub="proxy-a", exp=end), **PROXY)
    assert principal == Principal(
        type="User", name="alice", method="token", proxy="proxy-a", expires_at_unix_ms=end * 1000
    )


@pytest.mark.parametrize(
    ("role", "claim", "reason"),
    [
        ("alice", {"through_proxy": True}, "not_a_proxy"),
        ("alice", PROXY, "not_a_proxy"),
        ("alice", {"original_principal": "bob"}, "invalid_roles"),
        ("alice", {"original_principal": "alice"}, "invalid_roles"),
        ("proxy-a", {}, "invalid_roles"),
        ("proxy-a", {"through_proxy": True}, "invalid_roles"),
        ("proxy-a", {"original_principal": " ", "through_proxy": True}, "invalid_roles"),
        ("proxy-a", {"original_principal": "proxy-a", "through_proxy": True}, "invalid_roles"),
        ("proxy-a", {"original_principal": "ali\nce", "through_proxy": True}, "invalid_roles"),
    ],
)
async def test_roles_that_do_not_go_together(behind: Worker, role: str, claim: dict[str, Any], reason: str) -> None:
    assert await behind.denial("token", token(sub=role), **claim) == reason
    assert behind.failures(reason, "token", "TokenProvider") == 1
    assert behind.count("pulsar_authentication_success_total", provider_name="TokenProvider", auth_method="token") == 0


@pytest.mark.parametrize("claim", [PROXY, {"through_proxy": True}, {"original_principal": "alice"}])
async def test_a_claim_counts_for_nothing_before_the_credential_is_good(behind: Worker, claim: dict[str, Any]) -> None:
    """No client learns by a claim, without a good credential, who is a proxy here."""
    assert await behind.denial("token", token(OTHER_SECRET, sub="proxy-a"), **claim) == "bad_signature"


async def test_without_proxy_roles_no_client_is_a_proxy(worker: Worker) -> None:
    assert await worker.denial("token", token(sub="proxy-a"), **PROXY) == "not_a_proxy"
    assert (await worker.principal("token", token(sub="proxy-a"))).name == "proxy-a"


async def test_a_reload_makes_and_unmakes_proxies(behind: Worker, secret_file: str) -> None:
    await behind.service.configure(with_proxies(secret_file, "proxy-b"))
    assert await behind.denial("token", token(sub="proxy-a"), **PROXY) == "not_a_proxy"
    assert (await behind.principal("token", token(sub="proxy-b"), **PROXY)).name == "alice"


async def test_a_role_that_is_a_proxys_by_a_certificate_alone(secret_file: str, nursery: trio.Nursery) -> None:
    """Security: who can have a token made for the role is not the proxy."""
    worker = Worker(with_proxies(secret_file, "tls:proxy-a", "proxy-b", tls=TlsAuthentication()), nursery)
    assert await worker.denial("token", token(sub="proxy-a"), **PROXY) == "not_a_proxy"
    assert await worker.denial("token", token(sub="proxy-a"), original_principal="alice") == "invalid_roles"
    assert (await worker.principal("token", token(sub="proxy-a"))).proxy == ""
    assert (await worker.principal("token", token(sub="proxy-b"), **PROXY)).proxy == "proxy-b"
    await worker.service.configure(with_proxies(secret_file, "token:proxy-a"))
    assert (await worker.principal("token", token(sub="proxy-a"), **PROXY)).proxy == "proxy-a"


async def test_a_proxy_by_a_method_that_has_no_provider(behind: Worker, secret_file: str) -> None:
    with pytest.raises(ConfigError, match=r"authentication\.proxy_roles: .tls:proxy-a. begins with"):
        await behind.service.configure(with_proxies(secret_file, "tls:proxy-a"))
    assert (await behind.principal("token", token(sub="proxy-a"), **PROXY)).name == "alice", "all is as it was"


async def test_a_claim_is_the_first_rounds(provider: RoundsProvider, nursery: trio.Nursery) -> None:
    """Security: a later round cannot change it, nor bring one."""
    worker = Worker(Config(authentication=Authentication(proxy_roles=("alice",))), nursery)
    await worker.challenge(b"first", original_principal="bob", through_proxy=True)
    principal = await worker.principal("rounds", b"last", first=False, original_principal="admin")
    assert (principal.name, principal.proxy) == ("bob", "alice")
    await worker.challenge(b"first")
    assert await worker.denial("rounds", b"last", first=False, **PROXY) == "invalid_roles"
    provider.next_state = lambda: LastWord([])
    await worker.challenge(b"proof", original_principal="bob", through_proxy=True)
    principal = await worker.principal("rounds", b"", first=False, original_principal="admin")
    assert (principal.name, principal.proxy) == ("bob", "alice")


async def test_an_anonymous_client_is_no_proxy(nursery: trio.Nursery, secret_file: str) -> None:
    worker = Worker(with_proxies(secret_file, "proxy-a", anonymous_role="guest"), nursery)
    assert await worker.denial("none", b"", **PROXY) == "not_a_proxy"
    assert await worker.denial("none", b"", original_principal="alice") == "invalid_roles"


# ---- the bytes of requests under way


class WaitingAuthState(ScriptedAuthState):
    """A state that knows alice once the test lets it."""

    def __init__(self, may_end: trio.Event) -> None:
        super().__init__([])
        self._may_end = may_end

    async def authenticate(self, data: bytes) -> bytes | None:
        await self._may_end.wait()
        return await super().authenticate(data)

    def is_complete(self) -> bool:
        return bool(self.data)


LARGE = bytes(128 * 1024)
SMALL = b"small"


class Crowd:
    """Clients whose credentials wait for a check until ``may_end`` is set; ``outcomes`` are told by address."""

    def __init__(self, worker: Worker, provider: RoundsProvider) -> None:
        self._worker = worker
        self.may_end = trio.Event()
        self.outcomes: dict[str, list[str]] = {}
        provider.next_state = lambda: WaitingAuthState(self.may_end)

    async def ask(self, address: str, data: bytes, caller: Caller = FORWARDER) -> None:
        response = await self._worker.ask("rounds", data, address=address, caller=caller)
        self.outcomes.setdefault(address, []).append(response.denied.reason or response.WhichOneof("outcome") or "")

    async def start(self, nursery: trio.Nursery, number: int, address: str, data: bytes, **how: Any) -> None:
        for _ in range(number):
            nursery.start_soon(partial(self.ask, address, data, **how))
        await trio.testing.wait_all_tasks_blocked()

    def count(self, address: str, outcome: str) -> int:
        return self.outcomes.get(address, []).count(outcome)


async def test_requests_under_way_are_bounded_in_bytes_over_all_forwarders(
    many_rounds: Worker, provider: RoundsProvider, logs: list[Any]
) -> None:
    """Security: a request waits in memory for a check or for an issuer's keys, and an RPC frame may have megabytes."""
    crowd, total = Crowd(many_rounds, provider), 2 * service.REQUEST_BYTES_MAX // len(LARGE)
    async with trio.open_nursery() as nursery:
        for number in range(total):
            caller = Caller(Role.FORWARDER, 100 + number % 4)
            await crowd.start(nursery, 1, f"10.0.{number}.1:1000", LARGE, caller=caller)
        refused = sum(outcomes.count("overloaded") for outcomes in crowd.outcomes.values())
        assert refused >= total // 2
        assert {entry["event"] for entry in logs} == {"authentication denied"}
        assert "see cluster.auth_workers" in logs[0]["detail"]
        crowd.may_end.set()
    accepted = sum(outcomes.count("authenticated") for outcomes in crowd.outcomes.values())
    assert accepted + refused == total
    crowd.outcomes.clear()
    await crowd.ask("10.0.0.1:1000", LARGE)
    assert crowd.outcomes == {"10.0.0.1:1000": ["authenticated"]}, "what has ended counts no longer"


async def test_an_address_with_large_credentials_keeps_no_other_address_out(
    many_rounds: Worker, provider: RoundsProvider
) -> None:
    """Security: an unauthenticated client decides how large the credentials are that it sends."""
    crowd = Crowd(many_rounds, provider)
    async with trio.open_nursery() as nursery:
        await crowd.start(nursery, 200, "[2001:db8::1]:1000", LARGE)
        await crowd.start(nursery, 100, "[2001:db8::2]:1000", LARGE)
        assert 0 < crowd.count("[2001:db8::1]:1000", "overloaded") < 200
        assert crowd.count("[2001:db8::2]:1000", "overloaded") == 100, "a network of IPv6 is one address"
        await crowd.start(nursery, 1, "10.0.0.2:1000", LARGE)
        await crowd.start(nursery, 500, "10.0.0.3:1000", SMALL)
        assert crowd.count("10.0.0.2:1000", "overloaded") == crowd.count("10.0.0.3:1000", "overloaded") == 0
        crowd.may_end.set()
    assert (crowd.count("10.0.0.2:1000", "authenticated"), crowd.count("10.0.0.3:1000", "authenticated")) == (1, 500)


async def test_a_request_of_the_largest_frame_that_is_configured_has_room(
    provider: RoundsProvider, nursery: trio.Nursery
) -> None:
    worker = Worker(Config(), nursery)
    data = bytes(16 * MIB)
    assert await worker.denial("rounds", data) == "overloaded"
    await worker.service.configure(Config(limits=Limits(max_command_bytes=len(data))))
    await worker.challenge(data)


# ---- answers without a task


class EagerAuthState(ScriptedAuthState):
    """A state that never waits."""

    @eager
    async def authenticate(self, data: bytes) -> bytes | None:
        self.data.append(data)
        if data == b"defect":
            raise RuntimeError("cannot parse s3cret")
        return self._challenges.pop(0) if self._challenges else None


def at_once(
    worker: Worker, method: str, data: bytes, *, exchange: int = 1, first: bool = True, address: str = ADDRESS
) -> AuthenticateResponse | None:
    """The answer that comes without a task; None where it needs one."""
    request = AuthenticateRequest(
        authentication_id=exchange, first_round=first, method=method, data=data, client_address=address
    )
    handler = worker.service.handlers()[Method.AUTHENTICATE]
    response = answer_at_once(handler, request.SerializeToString(), FORWARDER)
    return None if response is None else AuthenticateResponse.FromString(response)


async def test_a_token_gets_a_task_only_where_the_key_file_is_to_be_looked_at(
    worker: Worker, secret_file: str, autojump_clock: trio.testing.MockClock
) -> None:
    assert at_once(worker, "token", token()) is None
    await worker.principal("token", token())
    response = at_once(worker, "token", token())
    assert response is not None
    verdict = response.authenticated
    assert unseal(verdict.sealed_principal, SEAL_KEY) == verdict.principal == of_alice("token")
    labels = {"provider_name": "TokenProvider", "auth_method": "token"}
    assert worker.count("pulsar_authentication_success_total", **labels) == 2
    assert worker.count("pulsar_proxy_authentication_round_seconds_count") == 2
    await trio.Path(secret_file).write_bytes(OTHER_SECRET)
    await trio.sleep(1)
    assert at_once(worker, "token", token()) is None
    assert await worker.denial("token", token()) == "bad_signature"


async def test_a_denial_without_a_task_is_counted_and_logged(worker: Worker, logs: list[Any]) -> None:
    await worker.principal("token", token())
    response = at_once(worker, "token", token(exp=1))
    assert response is not None
    assert response.denied.reason == "expired"
    assert worker.failures("expired", "token", "TokenProvider") == 1
    assert worker.count("pulsar_proxy_authentication_round_seconds_count") == 2
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("authentication denied", "expired")]


async def test_the_deny_list_counts_without_a_task_and_is_looked_at_in_one(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: no way around the list, and none around its file's changes."""
    secret, denied = trio.Path(tmp_path / "secret"), trio.Path(tmp_path / "denied")
    await secret.write_bytes(SECRET)
    await denied.write_text("token-id 7")
    authentication = Authentication(
        enabled=True, deny_file=str(denied), token=TokenAuthentication(secret_key=str(secret))
    )
    worker = Worker(Config(authentication=authentication), nursery)
    assert (await worker.ask("token", token(jti="8"))).WhichOneof("outcome") == "authenticated"
    for token_id, outcome in (("7", "denied"), ("8", "authenticated")):
        response = at_once(worker, "token", token(jti=token_id))
        assert response is not None
        assert response.WhichOneof("outcome") == outcome
    await denied.write_text("token-id 8\ntoken-id 9")
    await trio.sleep(1)
    assert at_once(worker, "token", token(jti="8")) is None
    assert await worker.denial("token", token(jti="8")) == "denied_credential"


async def test_rounds_without_a_task(many_rounds: Worker, provider: RoundsProvider) -> None:
    provider.next_state = lambda: EagerAuthState([b"challenge"])
    for exchange in (1, 2):
        response = at_once(many_rounds, "rounds", b"first", exchange=exchange)
        assert response is not None
        assert response.challenge == b"challenge"
    over = AuthenticateRequest(authentication_id=2, over=True).SerializeToString()
    assert answer_at_once(many_rounds.service.handlers()[Method.AUTHENTICATE], over, FORWARDER) == b""
    assert many_rounds.service.status()["authentications_under_way"] == 1
    last = at_once(many_rounds, "rounds", b"last", first=False)
    dropped = at_once(many_rounds, "rounds", b"last", first=False, exchange=2)
    again = at_once(many_rounds, "rounds", b"last", first=False)
    assert last is not None
    assert dropped is not None
    assert again is not None
    assert last.authenticated.principal == of_alice("rounds")
    assert dropped.denied.reason == again.denied.reason == "unknown_round"
    answer_at_once(many_rounds.service.handlers()[Method.AUTHENTICATE], over, FORWARDER)  # once more is no harm


async def test_a_state_that_may_wait_gets_a_task_before_it_is_asked(
    many_rounds: Worker, provider: RoundsProvider
) -> None:
    """A provider from elsewhere knows nothing of answers without a task."""
    assert at_once(many_rounds, "rounds", b"first") is None
    assert [state.data for state in provider.states] == [[]]


async def test_a_defect_without_a_task_denies_the_client(
    many_rounds: Worker, provider: RoundsProvider, logs: list[Any]
) -> None:
    provider.next_state = lambda: EagerAuthState([])
    response = at_once(many_rounds, "rounds", b"defect")
    assert response is not None
    assert response.denied.reason == "defect"
    assert "s3cret" not in str(logs)


async def test_the_bound_in_bytes_holds_without_a_task(many_rounds: Worker, provider: RoundsProvider) -> None:
    crowd = Crowd(many_rounds, provider)
    address = "10.0.0.1:1000"

    def reason() -> str:
        provider.next_state = lambda: EagerAuthState([b"challenge"])
        response = at_once(many_rounds, "rounds", LARGE, address=address)
        assert response is not None
        return str(response.denied.reason)

    async with trio.open_nursery() as nursery:
        await crowd.start(nursery, 2 * service.REQUEST_BYTES_MAX // len(LARGE), address, LARGE)
        assert reason() == "overloaded"
        crowd.may_end.set()
    assert {reason() for _ in range(2 * service.REQUEST_BYTES_MAX // len(LARGE))} == {""}, "each gives its bytes back"


async def test_the_token_for_a_broker_needs_no_task(worker: Worker) -> None:
    request = BrokerCredentialsRequest(exchange_id=1, broker_host="broker-1").SerializeToString()
    data = answer_at_once(worker.service.handlers()[Method.BROKER_CREDENTIALS], request, FORWARDER)
    assert data is not None
    assert BrokerCredentialsResponse.FromString(data).data == PROXY_TOKEN


# ---- the proxy's own credentials


async def test_the_token_for_a_broker(worker: Worker) -> None:
    assert await worker.credentials() == ("token", PROXY_TOKEN)
    assert await worker.credentials(b"PulsarAuthRefresh") == ("token", PROXY_TOKEN)
    assert await worker.credentials(b"") == ("token", PROXY_TOKEN)


async def test_lookup_workers_get_it_too(worker: Worker) -> None:
    assert await worker.credentials(caller=Caller(Role.LOOKUP, 200)) == ("token", PROXY_TOKEN)


@pytest.mark.parametrize(
    ("claims", "ends"),
    [
        ({"exp": 4_000_000_000}, 4_000_000_000_000),
        ({"exp": 4_000_000_000.9}, 4_000_000_000_000),
        ({}, 0),
        ({"exp": 1}, 1000),  # whether it still is worth anything is for the broker to say
    ],
)
async def test_a_token_for_a_broker_comes_with_its_end(
    worker: Worker, proxy_token: Path, claims: dict[str, Any], ends: int
) -> None:
    await trio.Path(proxy_token).write_bytes(token(**claims))
    await worker.service.configure(worker.config)
    assert (await worker.credentials_response()).expires_at_unix_ms == ends


async def test_a_token_without_an_end_for_a_broker(worker: Worker) -> None:
    assert (await worker.credentials_response()).expires_at_unix_ms == 0


async def test_no_credentials_configured(many_rounds: Worker) -> None:
    assert await many_rounds.no_credentials() == "no brokers.credentials are configured"


async def test_a_challenge_outside_of_an_exchange(worker: Worker) -> None:
    await worker.credentials()
    for how in ({"exchange": 2}, {"caller": OTHER_FORWARDER}):
        assert "not under way" in await worker.no_credentials(b"challenge", **how)  # type: ignore[arg-type]


async def test_an_exchange_that_takes_too_long(worker: Worker, autojump_clock: trio.testing.MockClock) -> None:
    await worker.credentials()
    await trio.sleep(10)
    assert "not under way" in await worker.no_credentials(b"challenge")


async def test_credentials_outlive_their_file(worker: Worker, proxy_token: Path) -> None:
    """What was read stays good while a file is away, as it is for a moment in many a rotation."""
    await trio.Path(proxy_token).unlink()
    assert await worker.credentials() == ("token", PROXY_TOKEN)


class Exchange:
    """Answers every challenge with its number."""

    method = "rounds"

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._number = 0
        self.expires_at_unix_ms = 0
        self.unavailable = ""
        self.gate = trio.Event()
        self.gate.set()

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:
        exchange = Exchange(broker_host)
        exchange.gate, exchange.unavailable = self.gate, self.unavailable
        return exchange

    async def authenticate(self, challenge: bytes | None) -> bytes:
        await self.gate.wait()
        if self.unavailable:
            raise CredentialsUnavailable(self.unavailable)
        if challenge == b"forged":
            raise CredentialsUnavailable("the broker did not prove itself")
        self._number += 1
        self.expires_at_unix_ms = 4_000_000_000_000 + self._number
        return f"{self._host} {self._number} ".encode() + (challenge or b"first")

    def is_complete(self) -> bool:
        return self._number > 1


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    """How every service that is made authenticates itself at brokers."""
    exchange = Exchange()
    monkeypatch.setattr("auth.service.broker_authentication", lambda _config: exchange)
    return exchange


class SlowExchange(Exchange):
    """Answers a challenge once the gate is open; one state for all brokers."""

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:
        return self

    async def authenticate(self, challenge: bytes | None) -> bytes:
        if challenge:
            await self.gate.wait()
        return b"answer"


async def test_requests_for_the_proxys_own_credentials_are_bounded_in_bytes_by_broker(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: a captured broker's challenge may be as large as a frame, and keeps no other broker's waiting."""
    slow, challenge = SlowExchange(), bytes(5 * MIB)
    slow.gate = trio.Event()
    monkeypatch.setattr("auth.service.broker_authentication", lambda _config: slow)
    worker = Worker(Config(), nursery)
    for number, host in enumerate(("broker-1", "broker-1", "broker-2")):
        await worker.credentials(exchange=number, host=host)
    async with trio.open_nursery() as rounds:
        rounds.start_soon(partial(worker.credentials, challenge, exchange=0, host="broker-1"))
        await trio.testing.wait_all_tasks_blocked()
        assert "requests under way" in await worker.no_credentials(challenge, exchange=1, host="broker-1")
        rounds.start_soon(partial(worker.credentials, challenge, exchange=2, host="broker-2"))
        await trio.testing.wait_all_tasks_blocked()
        slow.gate.set()
    assert (await worker.credentials(challenge, exchange=1, host="broker-1"))[1] == b"answer"


async def test_other_credentials_come_with_the_end_that_their_mechanism_knows(
    exchange: Exchange, nursery: trio.Nursery
) -> None:
    """As a ticket's: who keeps a connection must replace it before."""
    worker = Worker(Config(), nursery)
    for number, challenge in enumerate((None, b"offer"), 1):
        assert (await worker.credentials_response(challenge)).expires_at_unix_ms == 4_000_000_000_000 + number


async def test_credentials_of_another_mechanism_have_no_known_expiry(exchange: Exchange, nursery: trio.Nursery) -> None:
    """Data of another mechanism is not parsed as a token."""
    exchange.get_auth_data = lambda _host: Unread()  # type: ignore[method-assign, assignment]
    assert (await Worker(Config(), nursery).credentials_response()).expires_at_unix_ms == 0


class Unread:
    expires_at_unix_ms = 0

    async def authenticate(self, _challenge: bytes | None) -> bytes:
        await trio.lowlevel.checkpoint()
        return token(exp=4_000_000_000)

    def is_complete(self) -> bool:
        return True


async def test_credentials_that_cannot_be_had(exchange: Exchange, nursery: trio.Nursery, logs: list[Any]) -> None:
    worker = Worker(Config(), nursery)
    exchange.unavailable = "the issuer does not answer"
    assert await worker.no_credentials() == "the issuer does not answer"
    (entry,) = logs
    assert (entry["log_level"], entry["broker"], entry["reason"]) == (
        "error",
        "broker-1",
        "the issuer does not answer",
    )


@pytest.mark.conforms("pip-30.18", "pip-30.26")
@pytest.mark.usefixtures("exchange")
async def test_the_rounds_of_one_broker_share_a_state_of_their_own(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)
    assert await worker.credentials(exchange=1, host="broker-1") == ("rounds", b"broker-1 1 first")
    assert await worker.credentials(exchange=2, host="broker-2") == ("rounds", b"broker-2 1 first")
    assert await worker.credentials(b"a", exchange=1) == ("rounds", b"broker-1 2 a")
    assert await worker.credentials(b"", exchange=2) == ("rounds", b"broker-2 2 first")
    assert await worker.credentials(b"b", exchange=1) == ("rounds", b"broker-1 3 b")


@pytest.mark.usefixtures("exchange")
async def test_as_many_challenges_as_a_handshake_allows(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)
    await worker.credentials()
    for number in range(BROKER_CHALLENGES_MAX):
        assert await worker.credentials(b"c") == ("rounds", f"broker-1 {number + 2} c".encode())


@pytest.mark.usefixtures("exchange")
async def test_challenges_are_capped(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)

    async def challenge_on() -> None:
        for _ in range(BROKER_CHALLENGES_MAX + 1):
            await worker.credentials(b"c")

    await worker.credentials()
    with pytest.raises(RpcRefused, match="not finished after"):
        await challenge_on()


@pytest.mark.usefixtures("exchange")
async def test_the_answer_says_whether_the_broker_has_still_to_prove_itself(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)
    assert (await worker.credentials_response()).incomplete
    assert not (await worker.credentials_response(b"proof")).incomplete


@pytest.mark.usefixtures("exchange")
async def test_a_broker_that_did_not_prove_itself(nursery: trio.Nursery) -> None:
    worker = Worker(Config(), nursery)
    await worker.credentials()
    assert await worker.no_credentials(b"forged") == "the broker did not prove itself"
    assert "not under way" in await worker.no_credentials(b"c")


@pytest.mark.usefixtures("exchange")
async def test_the_oldest_exchange_makes_room(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_store, "EXCHANGES_MAX", 2)
    worker = Worker(Config(), nursery)
    for number in (1, 2, 3):
        await worker.credentials(exchange=number)
    assert "not under way" in await worker.no_credentials(b"c", exchange=1)
    assert await worker.credentials(b"c", exchange=3) == ("rounds", b"broker-1 2 c")


# ---- life, and reloads


async def test_start_and_drain_have_nothing_to_wait_for(worker: Worker) -> None:
    await worker.service.start()
    await worker.service.drain(0.0, hand_over=False)
    assert worker.service.status() == {"methods": ["token"], "authentications_under_way": 0}


async def test_a_key_that_cannot_be_read_is_an_error_at_the_start(nursery: trio.Nursery, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"authentication\.token\.secret_key"):
        Worker(with_token(str(tmp_path / "missing")), nursery)


async def test_a_reload_brings_new_keys(worker: Worker, key_file: Callable[[bytes], str]) -> None:
    await worker.service.configure(with_token(key_file(OTHER_SECRET)))
    assert await worker.denial("token", token()) == "bad_signature"
    assert (await worker.principal("token", token(OTHER_SECRET))).name == "alice"
    assert await worker.no_credentials() == "no brokers.credentials are configured"


async def test_a_reload_reads_the_same_file_anew(
    worker: Worker, secret_file: str, proxy_token: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """At once: without a reload, a changed file is noticed within a second."""
    assert (await worker.principal("token", token())).name == "alice"
    await trio.Path(secret_file).write_bytes(OTHER_SECRET)
    assert (await worker.principal("token", token())).name == "alice"
    await worker.service.configure(with_token(secret_file, token_file=proxy_token))
    assert await worker.denial("token", token()) == "bad_signature"


async def test_a_changed_key_counts_within_a_second(
    worker: Worker, secret_file: str, autojump_clock: trio.testing.MockClock
) -> None:
    assert (await worker.principal("token", token())).name == "alice"
    await trio.Path(secret_file).write_bytes(OTHER_SECRET)
    await trio.sleep(1)
    assert await worker.denial("token", token()) == "bad_signature"
    assert (await worker.principal("token", token(OTHER_SECRET))).name == "alice"


async def test_a_reload_that_fails_leaves_everything_as_it_was(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await worker.service.configure(with_token(str(tmp_path / "missing")))
    assert (await worker.principal("token", token())).name == "alice"
    assert await worker.credentials() == ("token", PROXY_TOKEN)


async def test_a_reload_that_fails_keeps_the_rounds_under_way(
    many_rounds: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_config: Authentication) -> Iterator[Any]:
        raise ConfigError("authentication.rounds: no")

    await many_rounds.challenge(b"first")
    monkeypatch.setattr("auth.service.configured_providers", broken)
    with pytest.raises(ConfigError):
        await many_rounds.service.configure(Config())
    assert (await many_rounds.principal("rounds", b"last", first=False)).name == "alice"


async def test_a_reload_ends_the_rounds_under_way(many_rounds: Worker) -> None:
    await many_rounds.challenge(b"first")
    await many_rounds.service.configure(Config())
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


class SlowAuthState(ScriptedAuthState):
    """Verifies its data only once the gate is open."""

    gate: trio.Event

    async def authenticate(self, data: bytes) -> bytes | None:
        await self.gate.wait()
        return await super().authenticate(data)


async def test_a_reload_ends_a_round_under_way_too(many_rounds: Worker, provider: RoundsProvider) -> None:
    """Its state was made from the old keys: it must not go on among the new ones."""
    SlowAuthState.gate = trio.Event()
    provider.next_state = lambda: SlowAuthState([b"challenge"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(many_rounds.ask, "rounds", b"first")
        await trio.testing.wait_all_tasks_blocked()
        await many_rounds.service.configure(Config())
        SlowAuthState.gate.set()
    assert await many_rounds.denial("rounds", b"last", first=False) == "unknown_round"


async def test_a_reload_while_credentials_are_fetched(
    exchange: Exchange, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked before the reload gets the old answer, not a defect."""
    worker = Worker(Config(), nursery)
    exchange.gate = trio.Event()
    answers: list[tuple[str, bytes]] = []

    async def fetch() -> None:
        answers.append(await worker.credentials())

    async with trio.open_nursery() as fetching:
        fetching.start_soon(fetch)
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr("auth.service.broker_authentication", lambda _config: None)
        await worker.service.configure(Config())
        exchange.gate.set()
    assert answers == [("rounds", b"broker-1 1 first")]


END = "pulsar_proxy_broker_credentials_expire_timestamp_seconds"


def proxys_token(end_s: float | None) -> str:
    claims = {"sub": "proxy"} | ({} if end_s is None else {"exp": int(end_s)})
    return jwt.encode(claims, "a key of another's, which no test here needs", "HS256")


def replace_token(file: Path, end_s: float | None) -> None:
    replacement = file.with_suffix(".new")
    replacement.write_text(proxys_token(end_s))
    replacement.rename(file)


async def until_it_ends_at(worker: Worker, end_s: float | None) -> None:
    """Files are read in a thread, for which no clock of Trio's waits."""
    with trio.fail_after(60):
        while worker.registry.get_sample_value(END) != end_s:  # noqa: ASYNC110 -- see above
            await trio.sleep(0.005)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TOKEN_CHECK_INTERVAL_S", 0.005)
    monkeypatch.setattr(watched, "CHECK_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("looks_often")
async def test_the_end_of_the_proxys_own_token_is_a_metric(
    secret_file: str, proxy_token: Path, nursery: trio.Nursery
) -> None:
    """It follows the file and the configuration, and is absent where there is no end."""
    replace_token(proxy_token, 2_000_000_000)
    worker = Worker(with_token(secret_file, token_file=proxy_token), nursery)
    await worker.service.start()
    await until_it_ends_at(worker, 2_000_000_000)
    for end_s in (2_100_000_000, None, 1_000_000_000):
        replace_token(proxy_token, end_s)
        await take_over_held_files(file_stamps([str(proxy_token)]))
        await until_it_ends_at(worker, end_s)
    await worker.service.configure(Config())
    await until_it_ends_at(worker, None)


async def test_a_token_that_the_proxy_renews_by_itself_reports_no_expiry() -> None:
    class Issued(OneForAllBrokers):
        method = "token"

        async def authenticate(self, challenge: bytes | None) -> bytes:
            raise AssertionError("no token is fetched for a metric")

    assert await end_of_token_unix_ms(Issued()) == 0
    assert await end_of_token_unix_ms(None) == 0
    assert await end_of_token_unix_ms(FixedCredentials("token", proxys_token(2_000_000_000).encode())) == 2e12
    assert await end_of_token_unix_ms(FixedCredentials("tls", proxys_token(2_000_000_000).encode())) == 0
