"""proxy.runtime.network.kernel_tls, and what TlsSession gives it, without a kernel that has TLS: the keys, with which
records are made and read by hand; and which sessions stay in user space. With a kernel: tests/kernel_tls.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from tls_ends import (
    ALL_CIPHERS,
    KEY_UPDATE,
    KEY_UPDATE_REQUESTED,
    NEW_SESSION_TICKET,
    Records,
    Scene,
    decrypted,
    encrypted,
    kernel_with,
    key_log_bytes,
)

from proxy.common.errors import ConfigError
from proxy.runtime.network import kernel_tls
from proxy.runtime.network.kernel_tls import (
    APPLICATION_DATA,
    CIPHERS,
    HANDSHAKE,
    KernelTlsNotPossible,
    KeyLog,
    KeyPair,
    Keys,
    attach_tls,
    give_keys,
    has_keys,
    keys_from_traffic_secret,
    use_kernel_tls,
)
from proxy.runtime.network.tls_session import RECORD_BYTES, TlsSession

ROOT = Path(kernel_tls.__file__).parents[3]
ENDS = pytest.mark.parametrize("end", ["server", "client"])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with kernel_with(*ALL_CIPHERS):
        yield Scene(tmp_path)


def exchange(one: TlsSession, other: TlsSession, records: int) -> None:
    """So many records from one end to the other."""
    for number in range(records):
        data = b"%d" % number
        assert decrypted(other, encrypted(one, data)) == data


def check_keys(session: TlsSession, peer: TlsSession) -> KeyPair:
    """Records by hand go on where OpenSSL has ended, both ways."""
    assert session.can_move_to_kernel
    keys = session.take_kernel_keys()
    reading, writing = Records(keys.receiving), Records(keys.sending)
    for data in (b"one", b"two"):
        assert reading.read(encrypted(peer, data)) == (APPLICATION_DATA, data)
        assert decrypted(peer, writing.make(APPLICATION_DATA, data)) == data
    return keys


# ---- keys


@ENDS
@pytest.mark.parametrize(("sent", "received"), [(0, 0), (1, 3), (300, 2)])
def test_the_kernel_goes_on_where_openssl_ended(scene: Scene, end: str, sent: int, received: int) -> None:
    session, peer = scene.ends(end)
    exchange(session, peer, sent)
    exchange(peer, session, received)
    keys = check_keys(session, peer)
    assert (keys.sending.sequence_number, keys.receiving.sequence_number) == (sent, received)


def test_a_portion_of_several_records_counts_each(scene: Scene) -> None:
    session, peer = scene.ends()
    data = os.urandom(2 * RECORD_BYTES + 1)
    assert decrypted(peer, encrypted(session, data)) == data
    assert decrypted(session, encrypted(peer, data)) == data
    keys = check_keys(session, peer)
    assert (keys.sending.sequence_number, keys.receiving.sequence_number) == (3, 3)


def test_tickets_that_a_broker_sent_are_counted(scene: Scene) -> None:
    """Brokers of other makers send them behind the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(scene.files.certificate, scene.files.key)
    session, broker = scene.client_end(), TlsSession(context, server_side=True)
    session.continue_handshake()
    broker.continue_handshake(session.take_outgoing())
    session.continue_handshake(broker.take_outgoing())
    broker.continue_handshake(session.take_outgoing())
    assert decrypted(session, broker.take_outgoing()) == b""
    assert session.can_move_to_kernel
    keys = session.take_kernel_keys()
    assert keys.receiving.sequence_number == context.num_tickets == 2
    assert Records(keys.receiving).read(encrypted(broker, b"data")) == (APPLICATION_DATA, b"data")


def run_beside(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code that can import this module, in a process of its own. Its argument: a directory of its own."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "deploy", ROOT / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)


_EACH_CIPHER = """
import sys
from pathlib import Path
from test_network_kernel_tls import check_keys, exchange
from tls_ends import ALL_CIPHERS, Scene, kernel_with
with kernel_with(*ALL_CIPHERS):
    scene = Scene(Path(sys.argv[1]))
    for end in ("server", "client"):
        session, peer = scene.ends(end)
        exchange(session, peer, 5)
        exchange(peer, session, 7)
        check_keys(session, peer)
        print(session._cipher_name)
"""


@pytest.mark.parametrize("cipher", ALL_CIPHERS)
def test_each_cipher(tmp_path: Path, cipher: str) -> None:
    """In a process of its own: only OpenSSL's configuration can choose it."""
    config = tmp_path / "openssl.cnf"
    config.write_text(f"openssl_conf=a\n[a]\nssl_conf=b\n[b]\nsystem_default=c\n[c]\nCiphersuites={cipher}\n")
    done = run_beside(_EACH_CIPHER, tmp_path, OPENSSL_CONF=str(config))
    assert (done.stderr, done.stdout.split()[-2:]) == ("", [cipher, cipher])


def test_keys_of_rfc_8448() -> None:
    """RFC 8448, 3: the server's application traffic secret, and its keys."""
    secret = bytes.fromhex("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
    keys = keys_from_traffic_secret(secret, "TLS_AES_128_GCM_SHA256")
    assert keys.key.hex() == "9f02283b6c9c07efc26bb9f2ac92e356"
    assert keys.iv.hex() == "cf782b88dd83549aadf1e984"


def test_the_layout_that_the_kernel_reads() -> None:
    """struct tls12_crypto_info_*: version, cipher, IV, key, salt, number of the next record."""
    for cipher, size in zip(CIPHERS.values(), (40, 56, 56), strict=True):
        iv = (b"s" * cipher.salt_bytes + b"i" * 12)[:12]
        info = Keys(cipher, b"k" * cipher.key_bytes, iv, 7).to_crypto_info()
        assert (len(info), info[:2]) == (size, b"\x04\x03")
        assert info[4:].lstrip(b"i").lstrip(b"k") == b"s" * cipher.salt_bytes + (7).to_bytes(8)


# ---- what stays in user space


@ENDS
def test_tls_1_2(scene: Scene, end: str) -> None:
    """Its keys and nonces depend on more of the handshake."""
    scene.client.maximum_version = ssl.TLSVersion.TLSv1_2
    session, peer = scene.ends(end)
    assert session.version == "TLSv1.2"
    assert not session.can_move_to_kernel
    exchange(session, peer, 3)
    assert key_log_bytes() == 0


@ENDS
def test_a_cipher_that_the_kernel_does_not_have(tmp_path: Path, end: str) -> None:
    with kernel_with("TLS_AES_128_GCM_SHA256"):
        session, _ = Scene(tmp_path).ends(end)
        assert session._cipher_name != "TLS_AES_128_GCM_SHA256"
        assert not session.can_move_to_kernel


def test_bytes_that_were_not_decrypted(scene: Scene) -> None:
    """The beginning of a record, which the kernel would take for the beginning of another."""
    session, peer = scene.ends()
    record = encrypted(peer, b"data")
    assert decrypted(session, record[:9]) == b""
    assert not session.can_move_to_kernel
    assert decrypted(session, record[9:]) == b"data"
    check_keys(session, peer)


def test_a_session_that_has_ended(scene: Scene) -> None:
    session, peer = scene.ends()
    assert decrypted(session, peer.close()) == b""
    assert not session.can_move_to_kernel


def test_a_handshake_that_is_not_done(scene: Scene) -> None:
    session, peer = scene.server_end(), scene.client_end()
    peer.continue_handshake()
    session.continue_handshake(peer.take_outgoing())
    assert not session.can_move_to_kernel


@ENDS
@pytest.mark.parametrize("message", [KEY_UPDATE, KEY_UPDATE_REQUESTED], ids=["told", "asked"])
def test_a_key_update(scene: Scene, end: str, message: bytes) -> None:
    """Security: the first keys would be used again. And no secret of it is logged, of which a peer could cause many."""
    session, peer = scene.ends(end)
    by_hand = Records(peer_keys(peer))
    assert decrypted(session, by_hand.make(HANDSHAKE, message)) == b""
    assert not session.can_move_to_kernel
    assert key_log_bytes() == 0
    answer = encrypted(session, b"data")
    assert (decrypted(peer, answer), session.error) == (b"data", None)
    assert key_log_bytes() == 0
    assert not session.can_move_to_kernel


@pytest.mark.parametrize("padding", [0, 100])
def test_an_empty_record_of_a_client(scene: Scene, padding: int) -> None:
    """It cannot be told from a KeyUpdate: padding hides how long it is."""
    session, peer = scene.ends()
    assert decrypted(session, Records(peer_keys(peer)).make(APPLICATION_DATA, b"", padding)) == b""
    assert not session.can_move_to_kernel


def test_a_ticket_of_a_broker_is_none(scene: Scene) -> None:
    session, peer = scene.ends("client")
    ticket = NEW_SESSION_TICKET[:1] + (120).to_bytes(3) + bytes(4) + bytes(4) + b"\x00" + (109).to_bytes(2) + bytes(109)
    ticket += b"\x00\x00"
    ticket = ticket[:1] + (len(ticket) - 4).to_bytes(3) + ticket[4:]
    assert decrypted(session, Records(peer_keys(peer)).make(HANDSHAKE, ticket)) == b""
    assert (session.error, session.can_move_to_kernel) == (None, True)


def peer_keys(peer: TlsSession) -> Keys:
    """The keys with which a peer's records can be made beside it."""
    secrets, keys = dict(peer._secrets), peer.take_kernel_keys()
    peer._secrets = secrets
    return keys.sending


@pytest.mark.parametrize("extension", [b"\x00\x01\x00\x01\x01", b"\x00\x1c\x00\x02\x02\x00"], ids=["1", "28"])
@pytest.mark.parametrize("record_bytes", [50, 16_384])
def test_a_client_that_wants_smaller_records(scene: Scene, extension: bytes, record_bytes: int) -> None:
    """The kernel makes them of full size. Its hello may come in many records."""
    session = scene.server_end()
    hello = hello_with(scene, extension)
    for start in range(0, len(hello), record_bytes):
        part = hello[start : start + record_bytes]
        session.continue_handshake(b"\x16\x03\x01" + len(part).to_bytes(2) + part)
    assert session._must_stay
    session = scene.server_end()
    hello = hello_with(scene, b"")
    session.continue_handshake(b"\x16\x03\x01" + len(hello).to_bytes(2) + hello)
    assert session.take_outgoing()
    assert not session._must_stay


def hello_with(scene: Scene, extension: bytes) -> bytes:
    """A client's hello with an extension behind its others."""
    client = scene.client_end()
    client.continue_handshake()
    hello = client.take_outgoing()[5:]
    at = 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at]
    extensions = hello[at + 2 :] + extension
    body = hello[4:at] + len(extensions).to_bytes(2) + extensions
    return hello[:1] + len(body).to_bytes(3) + body


# ---- secrets


@ENDS
def test_no_secret_stays(scene: Scene, end: str) -> None:
    """Security: neither in the memory that OpenSSL writes to, nor in a session that has given its keys away."""
    session, _ = scene.ends(end)
    assert key_log_bytes() == 0
    session.take_kernel_keys()
    assert session._secrets == {}
    assert not session.can_move_to_kernel


def test_no_secret_is_logged_of_a_handshake_that_failed(scene: Scene) -> None:
    """Security."""
    session, peer = scene.server_end(), scene.client_end()
    peer.continue_handshake()
    session.continue_handshake(peer.take_outgoing())
    assert key_log_bytes() == 0
    with pytest.raises(ssl.SSLError):
        session.continue_handshake(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert key_log_bytes() == 0


@ENDS
def test_what_others_logged_is_not_taken(scene: Scene, end: str) -> None:
    """Security: wherever in a handshake it was written, the keys are of this session."""
    log = kernel_tls.current_key_log()
    assert log is not None
    session, peer = (scene.server_end(), scene.client_end())[:: 1 if end == "server" else -1]
    with Path(f"/proc/self/fd/{log._memory}").open("ab", buffering=0) as file:
        is_done, peer_is_done = False, peer.continue_handshake()
        while not (is_done and peer_is_done):
            file.writelines(f"{side}_TRAFFIC_SECRET_0 00 {'00' * 48}\n".encode() * 100 for side in ("SERVER", "CLIENT"))
            is_done = session.continue_handshake(peer.take_outgoing()) or is_done
            assert key_log_bytes() == 0
            peer_is_done = peer.continue_handshake(session.take_outgoing()) or peer_is_done
    check_keys(session, peer)


def test_no_program_inherits_the_key_log() -> None:
    """Security."""
    log = KeyLog()
    assert not os.get_inheritable(log._memory)
    log.close()


_CONFINED = """
import encodings.idna, os, sys
from pathlib import Path
from proto.roles import Role
from proxy.common import files
from proxy.runtime.process import hardening, seccomp
from test_network_kernel_tls import check_keys
from tls_ends import ALL_CIPHERS, Scene, kernel_with

with kernel_with(*ALL_CIPHERS):
    directory = Path(sys.argv[1])
    scene = Scene(directory)
    opened = {str(path): os.open(path, os.O_RDONLY) for path in directory.rglob("*") if path.is_file()}

    def open_as_the_supervisor_does(path):
        os.lseek(opened[path], 0, os.SEEK_SET)
        return os.dup(opened[path])

    os.getuid() or os.setuid(65534)
    hardening.harden_process()
    if not hardening.confine_process(hardening.FileAccess()):
        sys.exit(77)
    seccomp.refuse_system_calls(Role.FORWARDER)
    files.set_opener(open_as_the_supervisor_does)
    try:
        open(scene.files.certificate)
    except PermissionError:
        print("confined")
    for round in ("at start", "reloaded", "reloaded"):
        check_keys(*scene.ends())
        print(round)
        scene.reload()
"""


def test_a_process_that_opens_no_files(tmp_path: Path) -> None:
    """As a forwarder is confined: it has the secrets at its start, and after a certificate was loaded again."""
    done = run_beside(_CONFINED, tmp_path)
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-4:] == ["confined", "at start", "reloaded", "reloaded"]


# ---- the setting


@pytest.mark.parametrize("setting", ["off", "auto", "required"])
def test_with_a_kernel_that_has_tls(tmp_path: Path, setting: str) -> None:
    with kernel_with(*ALL_CIPHERS):
        use_kernel_tls("off")
        use_kernel_tls(setting)
        session, _ = Scene(tmp_path).ends()
        assert session.can_move_to_kernel is (setting != "off")


def test_without_one(tmp_path: Path) -> None:
    """`required` refuses to start; `auto` says so, and keeps no secrets."""
    with kernel_with():
        use_kernel_tls("off")
        with structlog.testing.capture_logs() as said:
            use_kernel_tls("auto")
        assert "stay in user space" in said[0]["event"]
        with pytest.raises(ConfigError, match=r"relay\.kernel_tls: .*modprobe tls"):
            use_kernel_tls("required")
        session, _ = Scene(tmp_path).ends()
        assert not session.can_move_to_kernel
        assert session._secrets == {}


def test_it_is_switched_off_and_on_again(tmp_path: Path) -> None:
    """Security: contexts go on writing secrets, so sessions go on emptying the log."""
    with kernel_with(*ALL_CIPHERS):
        scene = Scene(tmp_path)
        use_kernel_tls("off")
        session, peer = scene.ends()
        assert not session.can_move_to_kernel
        assert key_log_bytes() == 0
        use_kernel_tls("auto")
        check_keys(session, peer)


# ---- a kernel without TLS, or that refuses


def test_a_socket_that_is_not_tcp() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not attach_tls(one)
        assert not has_keys(one)


class Refusing:
    """A socket whose kernel refuses the keys of one direction."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def setsockopt(self, _level: int, name: int, _value: bytes) -> None:
        if name == self.refused:
            raise OSError(22, "refused")


def test_a_kernel_that_takes_no_keys() -> None:
    keys = keys_from_traffic_secret(bytes(32), "TLS_AES_128_GCM_SHA256")
    sending: Any = Refusing(1)
    with pytest.raises(KernelTlsNotPossible, match="does not take the keys"):
        give_keys(sending, KeyPair(keys, keys))
    receiving: Any = Refusing(2)
    with pytest.raises(OSError, match="refused"):
        give_keys(receiving, KeyPair(keys, keys))
