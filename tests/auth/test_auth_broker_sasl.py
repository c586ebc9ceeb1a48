"""The proxy's Kerberos credentials: every state, whatever a broker says, threads and deadlines, without a KDC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from fake_gssapi import FakeKerberos, Flag, GSSError, library

from auth.broker_credentials import broker_authentication
from auth.state import CredentialsUnavailable
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.config.types import BrokerCredentials
from proxy.runtime.network.credentials import CREDENTIALS_TIMEOUT_S

PROXY = "proxy/host@REALM"
OFFER = b"server:\x01\x00\x00\x00"
CHOICE = b"client:\x01\x00\x00\x00" + PROXY.encode()


@pytest.fixture
def kerberos() -> Iterator[FakeKerberos]:
    fake = FakeKerberos()
    with library(fake.module()):
        yield fake


@pytest.fixture
def keytab(tmp_path: Path) -> Path:
    file = tmp_path / "proxy.keytab"
    file.write_text(PROXY)
    return file


def credentials(keytab: Path, **changes: Any) -> Any:
    settings = {"method": "sasl", "file": str(keytab), "principal": PROXY, **changes}
    made = broker_authentication(BrokerCredentials(**settings))
    assert made is not None
    assert made.method == "sasl"
    return made


@pytest.fixture
def state(kerberos: FakeKerberos, keytab: Path) -> Any:
    return credentials(keytab).get_auth_data("broker-1")


async def unavailable(state: Any, challenge: bytes | None) -> str:
    """What is said, after which nothing works but to begin again."""
    with pytest.raises(CredentialsUnavailable) as caught:
        await state.authenticate(challenge)
    assert not state.is_complete()
    with pytest.raises(CredentialsUnavailable, match="failed before"):
        await state.authenticate(OFFER)
    with pytest.raises(CredentialsUnavailable, match="failed before"):
        await state.authenticate(b"PulsarAuthRefresh")
    assert caught.value.__cause__ is None
    return str(caught.value)


async def test_ticket_then_choice(state: Any) -> None:
    assert await state.authenticate(None) == b"ticket for broker/broker-1@REALM of proxy/host@REALM"
    assert not state.is_complete()
    assert await state.authenticate(OFFER) == CHOICE
    assert state.is_complete()


async def test_a_broker_may_offer_layers_besides_none(state: Any) -> None:
    await state.authenticate(None)
    assert await state.authenticate(b"server:\x07\x00\x10\x00") == CHOICE


@pytest.mark.conforms("pip-30.27")
async def test_the_library_gets_the_names_the_flags_a_copy_of_the_keytab_and_one_cache(
    kerberos: FakeKerberos, keytab: Path
) -> None:
    made = credentials(keytab, broker_service="pulsar")
    for host in ("one", "two"):
        await made.get_auth_data(host).authenticate(None)
    context, credential = kerberos.contexts[-1], kerberos.credentials[-1]
    assert (context.name.text, context.name.kind) == ("pulsar/two@REALM", "kerberos_principal")
    assert (credential.name.text, credential.name.kind) == (PROXY, "kerberos_principal")
    assert (context.usage, context.mech, credential.usage) == ("initiate", "kerberos", "initiate")
    assert context.flags == Flag.integrity | Flag.replay_detection | Flag.out_of_sequence_detection
    copy = credential.store["client_keytab"].removeprefix("FILE:")
    assert copy.startswith("/proc/self/fd/"), "a worker cannot open the file"
    assert read_file(copy) == read_file(str(keytab))
    caches = {one.store["ccache"] for one in kerberos.credentials if one.usage == "initiate"}
    assert len(caches) == 1, "the KDC would be asked for each connection"
    assert caches.pop().startswith("MEMORY:")


async def test_after_a_reload_the_tickets_are_new_ones(kerberos: FakeKerberos, keytab: Path) -> None:
    for _ in range(2):
        await credentials(keytab).get_auth_data("broker-1").authenticate(None)
    assert len({one.store["ccache"] for one in kerberos.credentials if one.usage == "initiate"}) == 2


@pytest.mark.conforms("pip-30.22")
async def test_a_refresh_begins_anew(kerberos: FakeKerberos, state: Any) -> None:
    await state.authenticate(None)
    await state.authenticate(OFFER)
    for _ in range(2):
        assert (await state.authenticate(b"PulsarAuthRefresh")).startswith(b"ticket for ")
        assert not state.is_complete()
        assert await state.authenticate(OFFER) == CHOICE
        assert state.is_complete()
    assert len(kerberos.contexts) == 3


async def test_the_tickets_end_is_known_in_every_round(kerberos: FakeKerberos, state: Any) -> None:
    """A pooled connection must be replaced before it."""
    assert state.expires_at_unix_ms == 0
    for lifetime_s, challenge in ((3600, None), (7200, b"PulsarAuthRefresh")):
        kerberos.lifetime_s = lifetime_s
        earliest = time.time() * 1000
        await state.authenticate(challenge)
        ends = state.expires_at_unix_ms
        assert earliest - 1000 <= ends - lifetime_s * 1000 <= time.time() * 1000
        await state.authenticate(OFFER)
        assert state.expires_at_unix_ms == ends


async def test_a_ticket_without_an_end(kerberos: FakeKerberos, state: Any) -> None:
    kerberos.lifetime_s = 2**32 - 1
    await state.authenticate(None)
    assert state.expires_at_unix_ms == 0


async def test_after_a_failure_no_ticket_counts(kerberos: FakeKerberos, state: Any) -> None:
    await state.authenticate(None)
    await unavailable(state, b"no offer")
    assert state.expires_at_unix_ms == 0


async def test_a_refresh_in_the_middle_is_no_offer(state: Any) -> None:
    await state.authenticate(None)
    assert "has not proved its key" in await unavailable(state, b"PulsarAuthRefresh")


@pytest.mark.conforms("pip-30.1", "pip-30.14")
@pytest.mark.parametrize("offer", [b"", b"garbage", CHOICE, b"client:\x01\x00\x00\x00"])
async def test_an_offer_that_the_broker_has_not_signed(state: Any, offer: bytes) -> None:
    await state.authenticate(None)
    assert "broker/broker-1@REALM has not proved its key" in await unavailable(state, offer)


@pytest.mark.parametrize(
    "layers", [b"", b"\x01", b"\x01\x00\x00", b"\x01\x00\x00\x00\x00", b"\x02\x00\x00\x00", bytes(4)]
)
async def test_an_offer_without_the_layer_none(state: Any, layers: bytes) -> None:
    await state.authenticate(None)
    assert "does not offer" in await unavailable(state, b"server:" + layers)


async def test_an_offer_that_is_too_long(kerberos: FakeKerberos, state: Any) -> None:
    await state.authenticate(None)
    assert "65537 bytes" in await unavailable(state, OFFER.ljust(64 * 1024 + 1, b"x"))
    assert "unwrap" not in {call for call, _ in kerberos.calls}


async def test_a_challenge_after_the_end(state: Any) -> None:
    await state.authenticate(None)
    await state.authenticate(OFFER)
    assert "after the end" in await unavailable(state, OFFER)


@pytest.mark.parametrize("call", ["credentials", "step", "lifetime"])
async def test_no_ticket(kerberos: FakeKerberos, state: Any, call: str) -> None:
    kerberos.failing(call, GSSError("Server not found\nin Kerberos database"))
    text = await unavailable(state, None)
    assert text == "no ticket for broker/broker-1@REALM: GSSError: Server not foundin Kerberos database"


async def test_a_context_that_wants_more_tokens(kerberos: FakeKerberos, state: Any) -> None:
    kerberos.complete = False
    assert "one token is not enough" in await unavailable(state, None)


@pytest.mark.parametrize("host", ["", "a@EVIL", "a/b", "a\\", "a b", "ä", "a\n", "x" * 256])
async def test_hosts_that_cannot_be_in_a_principal(kerberos: FakeKerberos, keytab: Path, host: str) -> None:
    state = credentials(keytab).get_auth_data(host)
    assert "no principal can be made" in await unavailable(state, None)
    assert kerberos.contexts == []


async def test_the_library_is_only_called_in_threads(kerberos: FakeKerberos, state: Any) -> None:
    kerberos.calls.clear()
    await state.authenticate(None)
    await state.authenticate(OFFER)
    assert [call for call, _ in kerberos.calls] == ["credentials", "step", "lifetime", "unwrap", "wrap"]
    assert threading.get_ident() not in {thread for _, thread in kerberos.calls}


async def test_a_kdc_that_does_not_answer(
    kerberos: FakeKerberos, keytab: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The reason is told before the caller's deadline, and threads that are stuck are few."""
    made, begun, end = credentials(keytab), threading.Semaphore(0), threading.Event()

    def wait_for_the_kdc() -> None:
        begun.release()
        end.wait(30)

    kerberos.on["step"] = wait_for_the_kdc
    try:
        for _ in range(6):
            before = trio.current_time()
            text = await unavailable(made.get_auth_data("broker-1"), None)
            assert text == "Kerberos has not answered for broker/broker-1@REALM within 4 s: is the KDC up?"
            assert trio.current_time() - before < CREDENTIALS_TIMEOUT_S
        for _ in range(4):
            assert await trio.to_thread.run_sync(partial(begun.acquire, timeout=10))
        assert [call for call, _ in kerberos.calls].count("step") == 4
    finally:
        end.set()


async def test_a_broker_without_a_ticket_takes_nothing_from_another(kerberos: FakeKerberos, keytab: Path) -> None:
    made, begun, end = credentials(keytab), threading.Semaphore(0), threading.Event()

    def wait_for_the_kdc() -> None:
        if kerberos.contexts[-1].name.text.startswith("broker/slow"):
            begun.release()
            end.wait(30)

    kerberos.on["step"] = wait_for_the_kdc
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(made.get_auth_data("slow").authenticate, None)
            await trio.to_thread.run_sync(partial(begun.acquire, timeout=10))
        try:
            other = made.get_auth_data("fast")
            await other.authenticate(None)
            assert await other.authenticate(OFFER) == CHOICE
        finally:
            end.set()


@pytest.mark.parametrize("principal", ["proxy/host", "proxy/host@"])
def test_the_realm_must_be_named(kerberos: FakeKerberos, keytab: Path, principal: str) -> None:
    with pytest.raises(ConfigError, match=r"^brokers\.credentials\.principal: .* has no realm"):
        credentials(keytab, principal=principal)


def test_the_keytab_must_hold_the_principal(kerberos: FakeKerberos, keytab: Path) -> None:
    with pytest.raises(ConfigError, match=r"^brokers\.credentials\.file: .* holds no key of other@REALM: "):
        credentials(keytab, principal="other@REALM")
    assert "step" not in {call for call, _ in kerberos.calls}, "the KDC may be down when the proxy starts"


def test_without_the_library(keytab: Path) -> None:
    with library(None), pytest.raises(ConfigError, match=r"brokers\.credentials.*extra `kerberos`"):
        credentials(keytab)
