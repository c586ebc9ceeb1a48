"""What must hold of the proxy's image, of each architecture; `make images` checks it after every build.

CI builds no image (it takes minutes): there the tests have the rules themselves, with folders that break them.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

USER = "10001:10001"
BYTES_MAX = 120_000_000
PROGRAMS = {"usr/bin/python3", "usr/bin/python3.13"}
PROGRAM_FOLDERS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
"""Beside these there is /opt/pulsar-trio-proxy/bin, which holds scripts of Python packages."""

IMPORTS = """
import importlib, pkgutil, ssl
assert ssl.OPENSSL_VERSION_INFO >= (3, 5), ssl.OPENSSL_VERSION
assert ssl.create_default_context().get_ca_certs(), "no certificate authorities"
kerberos = {"auth.gss", "auth.broker_sasl", "auth.providers.sasl"}
for name in ("auth", "lookup", "proto", "proxy"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if module.name not in kerberos and not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
"""
"""Run in an image of this machine's architecture. `gssapi` is not in the image."""

POST_QUANTUM = """
import datetime, os, ssl, tempfile
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from proxy.config.types import ListenerTls
from proxy.runtime.network.tls import ListenerContexts

key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.datetime.now(datetime.timezone.utc)
until, serial = now + datetime.timedelta(days=1), x509.random_serial_number()
builder = x509.CertificateBuilder(name, name, key.public_key(), serial, now, until)
builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
encoding = serialization.Encoding.PEM
with tempfile.TemporaryDirectory() as folder:
    files = os.path.join(folder, "certificate.pem"), os.path.join(folder, "key.pem")
    pem = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, content in zip(files, (builder.sign(key, hashes.SHA256()).public_bytes(encoding), pem)):
        with open(file, "wb") as target:
            target.write(content)
    contexts = ListenerContexts("listener.tls", ListenerTls(certificate=files[0], key=files[1]))
hello, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
server = contexts.front_context.wrap_bio(hello, answer, server_side=True)
for side in (client, server):
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        pass
# key_share of ServerHello (RFC 8446, 4.2.8): 0x11ec is X25519MLKEM768, with 1,120 bytes.
assert bytes.fromhex("0033046411ec0460") in answer.read(), f"not X25519MLKEM768: {ssl.OPENSSL_VERSION}"
"""
"""Run as IMPORTS: a listener agrees on keys by X25519MLKEM768 with a client of the image's own OpenSSL."""


def problems(root: Path) -> Iterator[str]:
    """Name what is wrong with an unpacked image."""
    size_bytes = 0
    for path in sorted(root.rglob("*")):
        name, found = f"/{path.relative_to(root)}", path.lstat()
        if stat.S_ISREG(found.st_mode):
            size_bytes += found.st_size
        if stat.S_ISLNK(found.st_mode):
            if not _is_there(root, path):
                yield f"{name}: links to nothing"
            continue
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
            yield f"{name}: setuid or setgid"
        wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        if found.st_mode & wanted != wanted:
            yield f"{name}: user {USER} cannot read it"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            yield f"{name}: all users can write it"
    if size_bytes > BYTES_MAX:
        yield f"{size_bytes} bytes unpacked, more than {BYTES_MAX}"
    programs = {f"{folder}/{path.name}" for folder in PROGRAM_FOLDERS for path in _entries(root / folder)}
    yield from (f"/{program}: does not belong in the image" for program in sorted(programs - PROGRAMS))


def _entries(folder: Path) -> list[Path]:
    # A linked folder (/bin) is looked at where it is.
    return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _is_there(root: Path, link: Path) -> bool:
    """Return whether a link leads to something, an absolute one seen from the root."""
    target = str(link.readlink())
    return (root / target[1:] if target.startswith("/") else link.parent / target).exists()
