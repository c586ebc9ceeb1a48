"""proxy.runtime.network.kernel_tls without a kernel that has TLS: the handshake by records, and the keys, with which
records are made and read by hand. With a kernel: tests/kernel_tls.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.lab.certificates import Authority
from tls_ends import SUITES_1_2, V2, V3, Records, Scene

from proxy.runtime.network import kernel_tls
from proxy.runtime.network.kernel_tls import (
    APPLICATION_DATA,
    HANDSHAKE,
    KernelTlsNotPossible,
    KernelTlsSession,
    KeyLog,
    Keys,
    attach_tls,
    give_keys,
    keys_from_traffic_secret,
)
from proxy.runtime.network.tls import TlsFailed, continue_handshake
from proxy.runtime.network.tls_session import RECORD_BYTES_MAX, TlsSession

ROOT = Path(kernel_tls.__file__).parents[3]
SUITES_1_3 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


def shake_hands(kernel: KernelTlsSession, peer: TlsSession, behind: bytes = b"") -> bytes:
    """Feed one end as it wants to be fed; return what is left in its socket. ``behind``: of the peer, after its end."""
    waiting = bytearray()
    kernel_is_done = kernel.continue_handshake()
    peer_is_done = peer.continue_handshake()
    while not (kernel_is_done and peer_is_done):
        waiting += peer.take_outgoing()
        if peer_is_done and behind:
            waiting += peer.encrypt(memoryview(behind))
            behind = b""
        while waiting and not kernel_is_done:
            size = kernel.wanted_bytes
            assert 0 < size <= RECORD_BYTES_MAX
            data, waiting = waiting[:size], waiting[size:]
            kernel_is_done = kernel.continue_handshake(bytes(data))
        outgoing = kernel.take_outgoing()
        peer_is_done = peer.continue_handshake(outgoing) or peer_is_done
    waiting += peer.take_outgoing()
    if behind:
        waiting += peer.encrypt(memoryview(behind))
    assert not kernel.unread
    return bytes(waiting)


def plaintext_of(session: TlsSession, ciphertext: bytes) -> bytes:
    plaintext = bytearray(len(ciphertext))
    return bytes(plaintext[: session.decrypt(memoryview(ciphertext), memoryview(plaintext))])


def check_keys(kernel: KernelTlsSession, peer: TlsSession, left: bytes, said: bytes) -> Keys:
    keys = kernel.take_keys()
    assert Records(keys.receiving).read(left) == (APPLICATION_DATA, said)
    ours = Records(keys.sending)
    assert plaintext_of(peer, ours.make(APPLICATION_DATA, b"one") + ours.make(APPLICATION_DATA, b"two")) == b"onetwo"
    return keys.sending


@pytest.mark.parametrize("end", ["server", "client"])
@pytest.mark.parametrize("suite", ["", *SUITES_1_2], ids=["1.3", *SUITES_1_2])
def test_the_kernel_goes_on_where_openssl_ended(tmp_path: Path, suite: str, end: str) -> None:
    """What comes behind the handshake stays in the socket, and the next record has the next number."""
    scene = Scene(tmp_path, suite=suite, version=V2 if suite else V3)
    ends = scene.server_end(), scene.client_end()
    kernel, peer = ends if end == "server" else ends[::-1]
    left = shake_hands(kernel, peer, b"behind the handshake")
    sending = check_keys(kernel, peer, left, b"behind the handshake")
    if "GCM" in suite:  # Security: no nonce may come twice
        assert int.from_bytes(sending.iv[sending.cipher.salt_bytes :]) == kernel._sent.last_nonce + 1


def test_a_server_that_sends_tickets_counts_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, version=V3)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = Authority(tmp_path, "others").server("server")
    context.load_cert_chain(pair.certificate, pair.key)
    scene.client.load_verify_locations(cafile=str(tmp_path / "others" / "authority.pem"))
    scene.log.follow(context)
    kernel, peer = KernelTlsSession(context, scene.log, server_side=True), scene.client_end()
    left = shake_hands(kernel, peer, b"data")
    assert plaintext_of(peer, peer.unread) == b"", "tickets"
    assert check_keys(kernel, peer, left, b"data").sequence_number == context.num_tickets == 2


def run_beside(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code that can import this module, in a process of its own. Its argument: a directory of its own."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "deploy", ROOT / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)


_EACH_SUITE = """
import sys
from pathlib import Path
from test_network_kernel_tls import check_keys, shake_hands
from tls_ends import V3, Scene
for end in (0, 1):
    scene = Scene(Path(sys.argv[1], str(end)), version=V3)
    ends = (scene.server_end(), scene.client_end())
    left = shake_hands(ends[end], ends[1 - end], b"data")
    check_keys(ends[end], ends[1 - end], left, b"data")
    print(ends[end]._tls.cipher()[0])
"""


@pytest.mark.parametrize("suite", SUITES_1_3)
def test_each_suite_of_tls_1_3(tmp_path: Path, suite: str) -> None:
    """In a process of its own: only OpenSSL's configuration can choose it."""
    config = tmp_path / "openssl.cnf"
    config.write_text(f"openssl_conf=a\n[a]\nssl_conf=b\n[b]\nsystem_default=c\n[c]\nCiphersuites={suite}\n")
    done = run_beside(_EACH_SUITE, tmp_path, OPENSSL_CONF=str(config))
    assert (done.stderr, done.stdout.split()) == ("", [suite, suite])


@pytest.mark.parametrize("suite", ["ECDHE-ECDSA-AES128-CCM", "ECDHE-ECDSA-AES128-SHA256"])
def test_a_cipher_that_the_kernel_does_not_have(tmp_path: Path, suite: str) -> None:
    """The session goes on in user space."""
    scene = Scene(tmp_path, suite=suite, version=V2)
    kernel, peer = scene.server_end(), scene.client_end()
    left = shake_hands(kernel, peer, b"data")
    with pytest.raises(KernelTlsNotPossible, match=suite):
        kernel.take_keys()
    assert plaintext_of(kernel, left) == b"data"
    assert plaintext_of(peer, kernel.encrypt(memoryview(b"back"))) == b"back"


def test_more_was_read_than_the_handshake(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    kernel, peer = scene.server_end(), scene.client_end()
    peer.continue_handshake()
    kernel.continue_handshake(peer.take_outgoing())
    peer.continue_handshake(kernel.take_outgoing())
    kernel.continue_handshake(peer.take_outgoing() + peer.encrypt(memoryview(b"data")))
    with pytest.raises(KernelTlsNotPossible, match="more was read"):
        kernel.take_keys()
    assert plaintext_of(kernel, kernel.unread) == b"data"


def test_a_context_that_logs_no_secrets(tmp_path: Path) -> None:
    for version in (V2, V3):
        scene = Scene(tmp_path / version.name, version=version)
        kernel = KernelTlsSession(scene.listener.front_context, KeyLog(), server_side=True)
        shake_hands(kernel, scene.client_end())
        with pytest.raises(KernelTlsNotPossible, match="does not log"):
            kernel.take_keys()


# ---- secrets


def size_of(log: KeyLog) -> int:
    return os.fstat(log._memory).st_size


@pytest.mark.parametrize("version", [V2, V3])
def test_no_secret_stays(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Security: neither in the memory that OpenSSL writes to, nor in the session, whether the keys are used or not."""
    scene = Scene(tmp_path, version=version)
    kernel, peer = scene.server_end(), scene.client_end()
    shake_hands(kernel, peer)
    assert size_of(scene.log) == 0
    kernel.take_keys()
    assert kernel._secrets == {}
    with pytest.raises(KernelTlsNotPossible, match="does not log"):
        kernel.take_keys()


def test_no_secret_stays_of_a_handshake_that_failed(tmp_path: Path) -> None:
    """Security."""
    scene = Scene(tmp_path, version=V3)
    kernel, peer = scene.server_end(), scene.client_end()
    peer.continue_handshake()
    kernel.continue_handshake(peer.take_outgoing())
    assert kernel._secrets
    assert size_of(scene.log) == 0
    with pytest.raises(TlsFailed):
        continue_handshake(kernel, b"\x17\x03\x03\x00\x20" + bytes(32))
    assert kernel.take_outgoing(), "the alert"
    assert kernel._secrets == {}
    assert size_of(scene.log) == 0


def test_what_others_logged_is_not_taken(tmp_path: Path) -> None:
    """A session in user space, whose context is followed, too."""
    scene = Scene(tmp_path, version=V3)
    ours, theirs = TlsSession(scene.loaded, server_side=True), scene.client_end()
    ours.continue_handshake()
    theirs.continue_handshake()
    ours.continue_handshake(theirs.take_outgoing())
    assert size_of(scene.log) > 0
    os.write(scene.log._memory, b"CLIENT_RANDOM 00 00\n" * 5000)
    kernel, peer = scene.server_end(), scene.client_end()
    check_keys(kernel, peer, shake_hands(kernel, peer, b"data"), b"data")


@pytest.mark.parametrize("end", ["server", "client"])
def test_no_secret_of_a_key_update_is_logged(tmp_path: Path, end: str) -> None:
    """Security: a peer could have secrets, and bytes without end, written by a session that stays in user space."""
    scene = Scene(tmp_path, version=V3)
    ends = scene.server_end(), scene.client_end()
    kernel, peer = ends if end == "server" else ends[::-1]
    shake_hands(kernel, peer)
    by_hand = Records(kernel.take_keys().receiving)
    assert plaintext_of(kernel, by_hand.make(HANDSHAKE, b"\x18\x00\x00\x01\x01")) == b""
    assert kernel.error is None
    assert size_of(scene.log) == 0
    assert plaintext_of(peer, kernel.encrypt(memoryview(b"data"))) == b"data", "the answer, and data with the new keys"


def test_a_descriptor_that_no_program_inherits() -> None:
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
from test_network_kernel_tls import check_keys, shake_hands
from tls_ends import V2, V3, Scene

directory = Path(sys.argv[1])
scenes = [Scene(directory / version.name, version=version) for version in (V2, V3)]
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
    open(scenes[0].files.certificate)
except PermissionError:
    print("confined")
for scene in scenes:
    for round in ("at start", "reloaded", "reloaded"):
        kernel, peer = scene.server_end(), scene.client_end()
        check_keys(kernel, peer, shake_hands(kernel, peer, b"data"), b"data")
        scene.listener.on_handshake_done(kernel._context, kernel.version)  # TLS 1.2: a new front context
        kernel, peer = scene.server_end(), scene.client_end()
        check_keys(kernel, peer, shake_hands(kernel, peer, b"data"), b"data")
        print(kernel.version, round)
        scene.reload()
"""


def test_a_process_that_opens_no_files(tmp_path: Path) -> None:
    """As a forwarder is confined: it has the secrets at its start, and after a certificate was loaded again."""
    done = run_beside(_CONFINED, tmp_path)
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (done.returncode, done.stderr) == (0, "")
    rounds = ["at start", "reloaded", "reloaded"]
    assert done.stdout.splitlines() == [
        "confined",
        *(f"{version} {one}" for version in ("TLSv1.2", "TLSv1.3") for one in rounds),
    ]


# ---- hostile bytes


@pytest.mark.parametrize("data", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(80)])
def test_no_tls(tmp_path: Path, data: bytes) -> None:
    """Security: refused by its first five bytes; no record beyond the bound is ever waited for."""
    session = Scene(tmp_path).server_end()
    assert session.wanted_bytes == 5
    with pytest.raises(TlsFailed):
        continue_handshake(session, data[: session.wanted_bytes])


def test_an_empty_record_and_the_longest(tmp_path: Path) -> None:
    session = Scene(tmp_path).server_end()
    session.continue_handshake(b"\x16\x03\x01")
    assert session.wanted_bytes == 2
    session.continue_handshake((RECORD_BYTES_MAX - 5).to_bytes(2))
    assert session.wanted_bytes == RECORD_BYTES_MAX - 5
    session.continue_handshake(bytes(1000))
    assert session.wanted_bytes == RECORD_BYTES_MAX - 1005


def test_a_server_hello_in_short_records(tmp_path: Path) -> None:
    """TLS 1.2's keys need its random, wherever records end."""
    direction = kernel_tls._Direction()
    hello = b"\x02\x00\x00\x50\x03\x03" + bytes(range(32)) + b"more"
    for start in range(0, len(hello), 3):
        part = hello[start : start + 3]
        assert direction.note(b"\x16\x03\x03" + len(part).to_bytes(2) + part) == 1
    assert direction.hello[kernel_tls._RANDOM] == bytes(range(32))


# ---- known keys


def test_keys_of_rfc_8448() -> None:
    """RFC 8448, 3: the server's application traffic secret, and its keys."""
    secret = bytes.fromhex("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
    keys = keys_from_traffic_secret(secret, kernel_tls._CIPHERS["AES128GCM"], "sha256")
    assert keys.key.hex() == "9f02283b6c9c07efc26bb9f2ac92e356"
    assert keys.iv.hex() == "cf782b88dd83549aadf1e984"


def test_the_layout_that_the_kernel_reads() -> None:
    """struct tls12_crypto_info_*: version, cipher, IV, key, salt, number of the next record."""
    for name, size in (("AES128GCM", 40), ("AES256GCM", 56), ("CHACHA20POLY1305", 56)):
        cipher = kernel_tls._CIPHERS[name]
        info = Keys(0x0304, cipher, b"k" * cipher.key_bytes, b"s" * cipher.salt_bytes + b"i" * 12, 7)
        info = info._replace(iv=info.iv[:12]).to_crypto_info()
        assert len(info) == size
        assert info[4:].lstrip(b"i").lstrip(b"k") == b"s" * cipher.salt_bytes + (7).to_bytes(8)


# ---- a kernel without TLS, or that refuses


def test_a_socket_that_is_not_tcp() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not attach_tls(one)


class Refusing:
    """A socket whose kernel refuses the keys of one direction."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def setsockopt(self, _level: int, name: int, _value: bytes) -> None:
        if name == self.refused:
            raise OSError(22, "refused")


def test_a_kernel_that_takes_no_keys(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    kernel = scene.server_end()
    shake_hands(kernel, scene.client_end())
    keys = kernel.take_keys()
    sending: Any = Refusing(1)
    with pytest.raises(KernelTlsNotPossible, match="does not take the keys"):
        give_keys(sending, keys)
    receiving: Any = Refusing(2)
    with pytest.raises(OSError, match="refused"):
        give_keys(receiving, keys)
