"""proxy.runtime.network.session_tickets: who resumes a session, where, and what the tickets are like."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from __future__ import annotations

import os
import ssl
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from e2e.lab.certificates import Authority, Pair
from tls_ends import kernel_with
from tls_handshakes import TLS_1_2, TLS_1_3, shake_hands

from proxy.common import reloading_file
from proxy.config.types import ListenerCertificate, ListenerTls
from proxy.runtime.network import session_tickets, tls_session
from proxy.runtime.network.kernel_tls import Keys, keys_from_traffic_secret
from proxy.runtime.network.session_tickets import TicketFront, ticket_front
from proxy.runtime.network.tls import ListenerContexts, TlsFailed
from proxy.runtime.network.tls_session import TlsSession

_HANDSHAKE, _APPLICATION_DATA = 22, 23
_NEW_SESSION_TICKET = 4
_PRE_SHARED_KEY, _KEY_SHARE = 41, 51
_WITH_KEY_EXCHANGE, _WITHOUT_KEY_EXCHANGE = b"\x00\x2d\x00\x02\x01\x01", b"\x00\x2d\x00\x02\x01\x00"
"""The extension by which a client says how it resumes sessions (RFC 8446, 4.2.9)."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.server("server")


@pytest.fixture
def client(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


@pytest.fixture(autouse=True)
def shared_fronts() -> Iterator[None]:
    """As a fork server makes them."""
    session_tickets.make_shared_fronts()
    yield
    session_tickets.drop_shared_fronts()


def listener(pair: Pair, index: int = 0, front: TicketFront | None = None, **more: Any) -> ListenerContexts:
    """A forwarder's listener with tickets."""
    options = {"session_tickets": True, "minimum_version": "1.3"} | more
    config = ListenerTls(certificate=pair.certificate, key=pair.key, **options)
    return ListenerContexts(f"listener[{index}].tls", config, front or ticket_front(index))


def receive_ticket(ours: TlsSession, theirs: TlsSession) -> ssl.SSLSession:
    """The client's session, with the ticket that it has got behind the handshake."""
    data = theirs.unread + ours.take_outgoing()
    assert theirs.decrypt(memoryview(data), memoryview(bytearray(len(data)))) == 0
    session = theirs._tls.session
    assert session is not None
    return session


def come(
    contexts: ListenerContexts, client: ssl.SSLContext, session: ssl.SSLSession | None = None, host: str = "localhost"
) -> tuple[bool, ssl.SSLSession]:
    """Whether the client has resumed its session, and its new one."""
    ours, theirs = shake_hands(contexts.front_context, client, host, session)
    contexts.on_handshake_done(ours.context, ours.version)
    assert ours.was_resumed_by_client == bool(theirs._tls.session_reused)
    return ours.was_resumed_by_client, receive_ticket(ours, theirs)


def test_a_session_is_resumed_again_and_again(pair: Pair, client: ssl.SSLContext) -> None:
    contexts = listener(pair)
    was_resumed, session = come(contexts, client)
    assert not was_resumed
    assert session.has_ticket
    assert session.ticket_lifetime_hint == session.timeout == 7200
    for _ in range(3):
        was_resumed, session = come(contexts, client, session)
        assert was_resumed
    assert contexts.front_context.session_stats()["number"] == 0, "OpenSSL keeps no session"


def test_another_process_that_was_forked_resumes_it(pair: Pair, client: ssl.SSLContext) -> None:
    _, session = come(listener(pair), client)
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = int(not come(listener(pair), client, session)[0])
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_other_listeners_and_another_fork_servers_workers_do_not(pair: Pair, client: ssl.SSLContext) -> None:
    _, session = come(listener(pair), client)
    assert not come(listener(pair, 1), client, session)[0]
    session_tickets.make_shared_fronts()
    assert not come(listener(pair), client, session)[0]


def test_listeners_beyond_the_shared_fronts_have_their_own(pair: Pair, client: ssl.SSLContext) -> None:
    index = session_tickets.SHARED_FRONTS_MAX
    contexts = listener(pair, index)
    _, session = come(contexts, client)
    assert come(contexts, client, session)[0]
    assert not come(listener(pair, index), client, session)[0]


def test_dropped_fronts_are_gone(pair: Pair, client: ssl.SSLContext) -> None:
    """Security: workers that need no keys have none."""
    front = ticket_front(0)
    assert ticket_front(0) is front
    session_tickets.drop_shared_fronts()
    assert not session_tickets._shared_fronts
    assert ticket_front(0) is not front


# ---- where no session may be resumed


@pytest.mark.parametrize(
    "options", [{"session_tickets": False}, {"session_tickets": False, "minimum_version": "1.2"}], ids=str
)
def test_without_the_option_no_session_is_resumed(pair: Pair, client: ssl.SSLContext, options: dict[str, Any]) -> None:
    """Security."""
    _, session = come(listener(pair), client)
    for _ in range(2):
        was_resumed, session = come(listener(pair, **options), client, session)
        assert not was_resumed
        assert not session.has_ticket


@pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3], ids=["1.2", "1.3"])
def test_a_session_that_openssl_resumes_without_the_option_is_refused(
    pair: Pair, client: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    """Security: whatever its contexts allow."""
    client.maximum_version = version
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    session = receive_ticket(*shake_hands(context, client))
    context.num_tickets = 0
    with pytest.raises(TlsFailed, match="resumed a session"):
        shake_hands(context, client, session=session)


# ---- what is changed while clients hold tickets


async def test_a_new_certificate_leaves_tickets_valid_and_is_shown_to_others(
    authority: Authority, client: ssl.SSLContext, autojump_clock: trio.testing.MockClock
) -> None:
    pair = authority.server("renewed")
    contexts = listener(pair)
    _, session = come(contexts, client)
    authority.server("renewed")
    await trio.sleep(reloading_file.CHECK_INTERVAL_S)
    await contexts.check_files()
    assert come(contexts, client, session)[0]
    _, theirs = shake_hands(contexts.front_context, client)
    assert theirs.peer_certificate() == ssl.PEM_cert_to_DER_cert(Path(pair.certificate).read_text().split("\n\n")[0])


def test_a_session_of_one_name_is_resumed_by_another(authority: Authority, pair: Pair) -> None:
    """As RFC 8446 has it: a client offers a ticket only to a name that the session's certificate has. A name chooses a
    certificate, and nothing else."""
    other = authority.server("other", "other.example")
    contexts = listener(pair, certificates=(ListenerCertificate(certificate=other.certificate, key=other.key),))
    client = ssl.create_default_context(cafile=authority.file)
    _, session = come(contexts, client, host="other.example")
    assert come(contexts, client, session, "other.example")[0]
    assert come(contexts, client, session, "localhost")[0]


def test_groups_hold_for_resumed_sessions(pair: Pair, client: ssl.SSLContext) -> None:
    contexts = listener(pair, groups=("P-384",))
    client.set_ecdh_curve("secp384r1")
    _, session = come(contexts, client)
    assert come(contexts, client, session)[0]
    client.set_ecdh_curve("prime256v1")
    with pytest.raises(TlsFailed):
        come(contexts, client, session)


def test_groups_that_change_cost_the_tickets(pair: Pair, client: ssl.SSLContext) -> None:
    """They cannot be taken back from a context."""
    _, session = come(listener(pair, groups=("P-384",)), client)
    client.set_ecdh_curve("prime256v1")
    contexts = listener(pair)
    was_resumed, session = come(contexts, client, session)
    assert not was_resumed
    assert come(contexts, client, session)[0]


def test_a_refused_configuration_changes_nothing(authority: Authority, pair: Pair, client: ssl.SSLContext) -> None:
    contexts = listener(pair)
    _, session = come(contexts, client)
    listener(authority.server("refused"), groups=("P-384",))  # read, and never used
    client.set_ecdh_curve("prime256v1")
    assert come(contexts, client, session)[0]
    _, theirs = shake_hands(contexts.front_context, client)
    assert theirs.peer_certificate() == ssl.PEM_cert_to_DER_cert(Path(pair.certificate).read_text().split("\n\n")[0])


def test_a_configuration_that_was_replaced_does_not_come_back(authority: Authority, pair: Pair) -> None:
    """A connection that was accepted before looks at the files once more."""
    front = TicketFront()
    old, new = 1, 2
    context, must_set_up = front.context_for(new, ())
    assert must_set_up
    assert front.context_for(old, ("P-384",)) == (context, False)
    assert front.context_for(new, ()) == (context, True)


@pytest.mark.parametrize("index", [0, session_tickets.SHARED_FRONTS_MAX], ids=["shared", "own"])
@pytest.mark.parametrize("becomes", ["without tickets", "without TLS", "another certificate"])
def test_a_front_keeps_no_certificate_that_is_not_used_any_more(
    authority: Authority, pair: Pair, client: ssl.SSLContext, becomes: str, index: int
) -> None:
    """Security: nor its key."""
    front = ticket_front(index)
    contexts = listener(pair, index, front=front)
    come(contexts, client)
    loaded = weakref.ref(contexts._loaded), weakref.ref(contexts._loaded.default)
    assert all(one() is not None for one in loaded)
    if becomes == "without TLS":
        del contexts
    elif becomes == "without tickets":
        contexts = listener(pair, index, front=front, session_tickets=False)
    else:
        contexts = listener(authority.server("another"), index, front=front)
    assert [one() for one in loaded] == [None, None]


@pytest.mark.parametrize("has_tickets", [False, True])
def test_a_handshake_that_began_before_a_reload_ends_well(
    authority: Authority, pair: Pair, client: ssl.SSLContext, has_tickets: bool
) -> None:
    """Its hello comes later."""
    before = listener(pair)
    ours = TlsSession(before.front_context, server_side=True)
    after = listener(authority.server("another"), session_tickets=has_tickets)
    come_without = shake_hands(after.front_context, client)
    assert come_without[0].version == "TLSv1.3"
    theirs = TlsSession(client, server_side=False, host="localhost")
    theirs.continue_handshake()
    ours.continue_handshake(theirs.take_outgoing())
    assert theirs.continue_handshake(ours.take_outgoing())
    assert ours.continue_handshake(theirs.take_outgoing())


# ---- the bytes


def decrypted(record: bytes, keys: Keys) -> tuple[int, bytes]:
    """A record's type and content, by hand (RFC 8446, 5.2)."""
    nonce = (int.from_bytes(keys.iv) ^ keys.sequence_number).to_bytes(12)
    inner = AESGCM(keys.key).decrypt(nonce, record[5:], record[:5]).rstrip(b"\0")
    return inner[-1], inner[:-1]


def records(data: bytes) -> Iterator[bytes]:
    while data:
        size = 5 + int.from_bytes(data[3:5])
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_ticket_counts_for_the_kernels_sequence_number(
    pair: Pair, client: ssl.SSLContext, is_resumed: bool
) -> None:
    with kernel_with("TLS_AES_256_GCM_SHA384"):
        contexts = listener(pair)
        with pytest.MonkeyPatch.context() as patch:  # a client that has a key log leaves its context
            patch.setattr(tls_session, "current_key_log", lambda: None)
            session = come(contexts, client)[1] if is_resumed else None
        ours, theirs = shake_hands(contexts.front_context, client, session=session)
        assert ours.was_resumed_by_client == is_resumed
        secret, cipher = ours._secrets["SERVER"], ours._cipher_name
        [ticket] = records(ours.take_outgoing())
        record_type, message = decrypted(ticket, keys_from_traffic_secret(secret, cipher))
        assert (record_type, message[0]) == (_HANDSHAKE, _NEW_SESSION_TICKET)
        assert message[-2:] == b"\0\0", "no extension, so no early data, which could be replayed"
        data = ours.encrypt(memoryview(b"data"))
        assert decrypted(data, keys_from_traffic_secret(secret, cipher, 1)) == (_APPLICATION_DATA, b"data")
        assert ours.can_move_to_kernel
        assert ours.take_kernel_keys().sending.sequence_number == 2
        assert theirs.take_outgoing() == b""


def answered_extensions(contexts: ListenerContexts, hello: bytes) -> set[int]:
    """Those of the server's hello."""
    ours = TlsSession(contexts.front_context, server_side=True)
    ours.continue_handshake(hello)
    answer = next(records(ours.take_outgoing()))[5:]
    at = 4 + 2 + 32  # the message's header, the version, the random bytes
    at += 1 + answer[at] + 2 + 1 + 2  # the session's id, cipher, compression, size of the extensions
    found = set()
    while at < len(answer):
        found.add(int.from_bytes(answer[at : at + 2]))
        at += 4 + int.from_bytes(answer[at + 2 : at + 4])
    return found


def test_a_resumed_session_has_a_key_exchange_of_its_own(pair: Pair, client: ssl.SSLContext) -> None:
    """Security: else a stolen ticket key would decrypt what was recorded."""
    contexts = listener(pair)
    _, session = come(contexts, client)
    theirs = TlsSession(client, server_side=False, host="localhost")
    theirs._tls.session = session
    theirs.continue_handshake()
    hello = theirs.take_outgoing()
    assert {_PRE_SHARED_KEY, _KEY_SHARE} <= answered_extensions(contexts, hello)
    assert hello.count(_WITH_KEY_EXCHANGE) == 1
    hello = hello.replace(_WITH_KEY_EXCHANGE, _WITHOUT_KEY_EXCHANGE)
    found = answered_extensions(contexts, hello)
    assert _KEY_SHARE in found
    assert _PRE_SHARED_KEY not in found, "a full handshake, without a look at the ticket"
