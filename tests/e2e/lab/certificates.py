"""Certificates of authorities that only the tests trust: good ones, and ones that must be refused."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from trustme import KeyType

HOST = "localhost"
OTHER_HOST = "elsewhere.example"


@dataclass(frozen=True)
class Pair:
    """Two PEM files: a certificate with what leads to its root, and its private key (PKCS #8, as Java wants it)."""

    certificate: str
    key: str


class Authority:
    """One that signs certificates; ``file`` is its own, PEM."""

    def __init__(self, directory: Path, name: str) -> None:
        self._ca = trustme.CA(organization_name=name)
        self._directory = directory / name
        self._directory.mkdir(parents=True)
        self.file = str(self._directory / "authority.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def server(
        self, name: str, host: str = HOST, *further: str, expired: bool = False, key_type: KeyType = KeyType.ECDSA
    ) -> Pair:
        """A server's certificate, in files of this name; one for loopback names its addresses, too."""
        hosts = (host, "127.0.0.1", "::1") if host == HOST else (host, *further)
        return self._write(name, self._issue(*hosts, common_name=host, expired=expired, key_type=key_type))

    def client(self, name: str, *, expired: bool = False) -> Pair:
        """A client's certificate: the name is its common name, which is Pulsar's role."""
        return self._write(name, self._issue(f"{name}.example", common_name=name, expired=expired))

    def workload(self, name: str, spiffe_id: str) -> Pair:
        """A client's certificate as SPIFFE has it: an ID, and a subject without a common name."""
        model = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signer = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(spiffe_id)])
        now = dt.datetime.now(dt.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIRE")]))
            .issuer_name(model.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(names, critical=False)
            .sign(signer, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._write(name, trustme.LeafCert(pem, certificate.public_bytes(serialization.Encoding.PEM), []))

    def crl(self, *revoked: Pair, expired: bool = False, days: int = 30) -> bytes:
        """A CRL in PEM form that revokes these certificates."""
        now = dt.datetime.now(dt.UTC)
        ca = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        builder = x509.CertificateRevocationListBuilder(
            ca.subject, now - dt.timedelta(days=9), now + dt.timedelta(days=-1 if expired else days)
        )
        for pair in revoked:
            serial = x509.load_pem_x509_certificate(Path(pair.certificate).read_bytes()).serial_number
            one = x509.RevokedCertificateBuilder(serial, now - dt.timedelta(days=9)).build()
            builder = builder.add_revoked_certificate(one)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _issue(
        self, *names: str, common_name: str, expired: bool, key_type: KeyType = KeyType.ECDSA
    ) -> trustme.LeafCert:
        until = dt.datetime.now(dt.UTC) - dt.timedelta(days=1) if expired else None
        return self._ca.issue_cert(*names, common_name=common_name, not_after=until, key_type=key_type)

    def _write(self, name: str, leaf: trustme.LeafCert) -> Pair:
        pair = Pair(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
        pkcs8 = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        replace(Path(pair.key), pkcs8)
        replace(Path(pair.certificate), b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        return pair


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of an old one at once, as programs that renew certificates do."""
    new = path.with_name(f"{path.name}.new")
    new.touch(mode=0o600)
    new.write_bytes(content)
    os.replace(new, path)
