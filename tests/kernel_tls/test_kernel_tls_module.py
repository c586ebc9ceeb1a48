"""proxy.runtime.network.kernel_tls in a kernel: streams, the ends of a stream, and what a peer may make of it.

Each test asserts what the kernel does, so that one that does something else shows it. (Linux 6.1: User-Mode Linux.)
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_tls.connections import Connection, Pipe, bytes_received, outcome, readable_bytes, tcp_pair
from tls_ends import KEY_UPDATE, NEW_SESSION_TICKET, Records, Scene, encrypted

from proxy.runtime.network.kernel_tls import (
    ALERT,
    APPLICATION_DATA,
    CIPHERS,
    CLOSE_NOTIFY,
    HANDSHAKE,
    Following,
    KernelTlsBroken,
    KernelTlsNotPossible,
    KeyPair,
    attach_tls,
    examine,
    give_keys,
    has_keys,
    kernel_ciphers,
    keys_from_traffic_secret,
    receive_record,
    send_close_notify,
)
from proxy.runtime.network.tls_session import RECORD_BYTES

FATAL = b"\x02\x28"
STREAM_BYTES = 300_000


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    with Connection(Scene(tmp_path)) as connection:
        yield connection


def received(connection: Connection) -> int | str:
    return outcome(lambda: len(connection.kernel.recv(100)))


# ---- streams


@pytest.mark.parametrize("end", ["server", "client"])
def test_a_stream(tmp_path: Path, end: str) -> None:
    """Both ways at once, in records of many sizes, by splice; then close_notify both ways."""
    scene = Scene(tmp_path)
    dice = random.Random(1)
    said = dice.randbytes(STREAM_BYTES)
    with Connection(scene, is_server=end == "server") as connection:
        peer, kernel, pipe = connection.peer, connection.kernel, connection.pipe
        at = carried = echoed = 0
        back = bytearray()
        while echoed < len(said):
            size = dice.choice([1, 100, 5000, 16_384, 40_000])
            peer.send(said[at : at + size]) if at < len(said) else None
            at = min(at + size, len(said))
            while carried < at:
                select.select([kernel], [], [])
                part = connection.splice()
                if part == "EAGAIN":  # only a part of a record
                    continue
                assert isinstance(part, int)
                carried += part
                while part:
                    sent = pipe.splice_to(kernel, part)
                    assert isinstance(sent, int)
                    part -= sent
            while echoed < carried:
                data = peer.receive()
                back += data
                echoed += len(data)
        assert back == said
        peer.end()
        assert connection.splice() == "EINVAL"
        assert examine(kernel, was_refused=True) is Following.CLOSE_NOTIFY
        assert send_close_notify(kernel)
        kernel.shutdown(socket.SHUT_WR)
        assert peer.receive() == b""
        assert peer.has_close_notify


@pytest.mark.parametrize("name", CIPHERS)
def test_each_cipher(name: str) -> None:
    """By hand: OpenSSL here has no way to choose one."""
    ours, theirs = (keys_from_traffic_secret(bytes([number]) * 48, name) for number in (1, 2))
    peer, kernel = tcp_pair()
    with peer, kernel:
        assert attach_tls(kernel)
        give_keys(kernel, KeyPair(ours, theirs))
        by_hand = Records(theirs)
        peer.sendall(by_hand.make(APPLICATION_DATA, b"one") + by_hand.make(APPLICATION_DATA, b"two"))
        assert kernel.recv(6, socket.MSG_WAITALL) == b"onetwo"
        kernel.sendall(b"back")
        assert Records(ours).read(peer.recv(100)) == (APPLICATION_DATA, b"back")


def test_the_ciphers_that_are_found() -> None:
    assert kernel_ciphers() == frozenset(CIPHERS)


def test_a_process_is_killed_in_between(connection: Connection) -> None:
    """What it has not taken is there for its successor, and the keys are the kernel's."""
    connection.peer.send(b"first")
    connection.peer.send(b"second")
    pid = os.fork()
    if not pid:
        connection.kernel.send(connection.kernel.recv(5))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert connection.peer.receive() == b"first"
    assert connection.kernel.recv(100) == b"second"
    connection.kernel.send(b"third")
    assert connection.peer.receive() == b"third"


def test_without_privileges(tmp_path: Path) -> None:
    """Where the kernel has the module loaded: to load it is the administrator's."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            scene = Scene(tmp_path)
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with Connection(scene) as connection:
                connection.kernel.send(b"data")
                code = 0 if connection.peer.receive() == b"data" else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


# ---- the rules of the prototype, by number


def test_1_close_notify_is_sent_until_it_is_accepted(connection: Connection) -> None:
    """Then nothing of what was accepted before is lost."""
    sent = fill(connection)
    assert not send_close_notify(connection.kernel)
    got = 0
    while not select.select([], [connection.kernel], [], 0)[1]:
        got += len(connection.peer.receive())
    while not send_close_notify(connection.kernel):
        got += len(connection.peer.receive())
    connection.kernel.shutdown(socket.SHUT_WR)
    assert got + len(connection.peer.receive_all()) == sent
    assert connection.peer.has_close_notify


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_1_without_close_notify_a_record_is_lost(tmp_path: Path, end: str) -> None:
    """One that was accepted, and for which the send buffer had no room yet."""
    scene = Scene(tmp_path)
    with Connection(scene, send_buffer=17_000) as connection:
        sent = fill(connection, 65_536)
        if end == "close":
            connection.kernel.close()
        else:
            connection.kernel.shutdown(socket.SHUT_WR)
        assert sent - len(connection.peer.receive_all()) == RECORD_BYTES
    with Connection(scene, send_buffer=17_000) as connection:
        sent, found = fill(connection, 65_536), 0
        while not send_close_notify(connection.kernel):
            found += len(connection.peer.receive())
        connection.kernel.shutdown(socket.SHUT_WR)
        assert found + len(connection.peer.receive_all()) == sent


def fill(connection: Connection, size: int = 20_000) -> int:
    """Splice until the kernel has no room; return how many bytes it has accepted.

    An acknowledgement that comes late makes room once more (the peer's kernel waits with it for up to 0.2 s): no room
    is what lasts for a second.
    """
    total = left = 0
    accepted_at = time.monotonic()
    while time.monotonic() - accepted_at < 1:
        if not left:
            left = os.write(connection.pipe.writing, bytes(size))
        sent = connection.pipe.splice_to(connection.kernel, left)
        if sent == "EAGAIN":
            time.sleep(0.02)
            continue
        assert isinstance(sent, int)
        left -= sent
        total += sent
        accepted_at = time.monotonic()
    return total


def test_2_nothing_is_not_always_the_end(connection: Connection) -> None:
    """Security: an empty record ends no stream."""
    peer, by_hand = connection.peer.socket, connection.by_hand
    peer.sendall(by_hand.make(APPLICATION_DATA, b"") + by_hand.make(APPLICATION_DATA, b"after", padding=30))
    assert connection.splice() == 0
    assert examine(connection.kernel, was_refused=False) is Following.DATA
    assert connection.splice() == 5
    peer.sendall(by_hand.make(APPLICATION_DATA, b""))
    assert connection.splice() == 0
    assert examine(connection.kernel, was_refused=False) is Following.NOTHING_YET
    peer.shutdown(socket.SHUT_WR)
    assert connection.splice() == 0
    assert examine(connection.kernel, was_refused=False) is Following.FIN


def test_3_close_notify_is_left_for_a_successor(connection: Connection) -> None:
    connection.peer.send(b"last")
    connection.peer.end()
    assert connection.splice() == 4
    for _ in range(2):
        assert connection.splice() == "EINVAL"
        assert received(connection) == "EIO"
        assert examine(connection.kernel, was_refused=True) is Following.CLOSE_NOTIFY
    assert receive_record(connection.kernel) == (ALERT, CLOSE_NOTIFY)
    assert connection.splice() == 0
    assert examine(connection.kernel, was_refused=False) is Following.FIN


def test_3_tickets_are_dropped(connection: Connection) -> None:
    ticket = connection.by_hand.make(HANDSHAKE, NEW_SESSION_TICKET)
    connection.peer.socket.sendall(ticket)
    assert connection.splice() == "EINVAL"
    assert examine(connection.kernel, was_refused=True) is Following.NOTHING_YET
    tickets = b"".join(connection.by_hand.make(HANDSHAKE, NEW_SESSION_TICKET) for _ in range(2))
    connection.peer.socket.sendall(tickets + connection.by_hand.make(APPLICATION_DATA, b"data"))
    assert received(connection) == "EIO"
    assert examine(connection.kernel, was_refused=True) is Following.DATA
    assert received(connection) == 4


def test_3_another_alert_ends_the_stream(connection: Connection) -> None:
    """Security: it is no proper end."""
    connection.peer.socket.sendall(connection.by_hand.make(ALERT, FATAL))
    assert connection.splice() == "EINVAL"
    with pytest.raises(KernelTlsBroken, match="type 21 that begins with 0228"):
        examine(connection.kernel, was_refused=True)


def test_4_no_tls_any_more(connection: Connection) -> None:
    """Security: EINVAL once, and then as if nothing had come: who only waits would wait for ever."""
    connection.peer.socket.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert connection.splice() == "EINVAL"
    assert connection.splice() == "EAGAIN"
    assert examine(connection.kernel, was_refused=False) is Following.NOTHING_YET
    with pytest.raises(KernelTlsBroken, match="does not speak TLS"):
        examine(connection.kernel, was_refused=True)


def test_4_a_record_that_is_too_long(connection: Connection) -> None:
    """Security: EMSGSIZE once. So any error that is not EINVAL or EAGAIN ends the stream."""
    connection.peer.socket.sendall(b"\x17\x03\x03\xff\xff" + bytes(100))
    assert connection.splice() == "EMSGSIZE"
    assert connection.splice() == "EAGAIN"


def test_4_a_record_that_was_changed(connection: Connection) -> None:
    """Security: EBADMSG, from then on, and nothing can be sent either."""
    record = bytearray(connection.by_hand.make(APPLICATION_DATA, b"data"))
    record[-1] ^= 1
    connection.peer.socket.sendall(record + connection.by_hand.make(APPLICATION_DATA, b"more"))
    for _ in range(2):
        assert connection.splice() == received(connection) == "EBADMSG"
        with pytest.raises(KernelTlsBroken, match="EBADMSG"):
            examine(connection.kernel, was_refused=True)
    assert outcome(lambda: connection.kernel.send(b"x")) == "EBADMSG"


def test_5_one_record_a_splice(connection: Connection) -> None:
    for data in (b"one", b"two", b"three"):
        connection.peer.send(data)
    assert [connection.splice() for _ in range(5)] == [3, 3, 5, "EAGAIN", "EAGAIN"]
    assert connection.pipe.read() == b"onetwothree"


def test_5_a_part_of_a_record(connection: Connection) -> None:
    connection.peer.send(b"onetwo")
    assert connection.splice(3) == 3
    assert connection.kernel.recv(100, socket.MSG_PEEK) == b"two"
    assert connection.splice() == 3


def test_6_counters_are_of_ciphertext(connection: Connection) -> None:
    before = bytes_received(connection.kernel)
    records = [encrypted(connection.peer.session, bytes(size)) for size in (1000, 100)]
    connection.peer.socket.sendall(b"".join(records))
    assert bytes_received(connection.kernel) - before == sum(map(len, records)) > 1100
    assert readable_bytes(connection.kernel) == sum(map(len, records))
    assert connection.splice() == 1000
    assert readable_bytes(connection.kernel) == len(records[1])


def test_7_only_before_the_peers_fin() -> None:
    one, other = tcp_pair()
    with one, other:
        one.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""
        assert not attach_tls(other)


def test_7_a_prepared_connection_stays_as_it_was() -> None:
    """Until it has keys, which may come behind the peer's FIN."""
    one, other = tcp_pair()
    pipe = Pipe()
    with one, other:
        assert attach_tls(other)
        one.sendall(b"abc")
        assert other.recv(2) == b"ab"
        assert pipe.splice_from(other) == 1
        other.sendall(b"back")
        assert one.recv(4) == b"back"
        one.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""
        keys = keys_from_traffic_secret(bytes(32), "TLS_AES_128_GCM_SHA256")
        assert not has_keys(other)
        give_keys(other, KeyPair(keys, keys))
        assert has_keys(other)
        assert attach_tls(other), "it may be repeated"
    pipe.close()


def test_9_a_key_update_ends_the_stream(connection: Connection) -> None:
    """This kernel keeps the old keys: what follows is EBADMSG. From 6.14 on it takes new ones (EKEYEXPIRED before)."""
    after = Records(connection.keys.receiving)
    connection.peer.socket.sendall(connection.by_hand.make(APPLICATION_DATA, b"before"))
    connection.peer.socket.sendall(connection.by_hand.make(HANDSHAKE, KEY_UPDATE))
    assert connection.splice() == 6
    assert connection.splice() == "EINVAL"
    with pytest.raises(KernelTlsBroken, match="type 22 that begins with 1800"):
        examine(connection.kernel, was_refused=True)
    assert receive_record(connection.kernel) == (HANDSHAKE, KEY_UPDATE)
    connection.peer.socket.sendall(after.make(APPLICATION_DATA, b"with other keys"))
    assert connection.splice() == "EBADMSG"
    with pytest.raises(KernelTlsNotPossible, match="busy"):
        give_keys(connection.kernel, connection.keys)
