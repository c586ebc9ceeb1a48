"""The deny list of credentials (``authentication.deny_file``): leaked certificates and tokens, by what names them.

Entries are known by short digests alone, so that a forwarder that keeps a connection's holds nothing of a token.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.x509.oid import NameOID

from proxy.common.errors import ConfigError
from proxy.common.files import read_file

KEY = "authentication.deny_file"

FILE_BYTES_MAX = 4 * 1024 * 1024
ENTRIES_MAX = 20_000
DIGEST_BYTES = 16

CERTIFICATE_SHA256 = "certificate-sha256"
CERTIFICATE_SERIAL = "certificate-serial"
TOKEN_ID = "token-id"  # noqa: S105 -- a keyword of the file
TOKEN_SHA256 = "token-sha256"  # noqa: S105

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SERIAL = re.compile(r"[0-9a-f]{1,64}\Z")
_BEHIND_COMMA = re.compile(r"(?<!\\),\s+")
_OPENSSL_NAMES = {"emailAddress": NameOID.EMAIL_ADDRESS, "serialNumber": NameOID.SERIAL_NUMBER}
"""Attributes that OpenSSL writes by names beyond those of RFC 4514."""

ISSUER_CHARACTERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class DenyList:
    """Digests of what is denied, with the kind of each entry."""

    kinds: Mapping[bytes, str] = field(default_factory=dict)

    def matching_kind(self, digests: Iterable[bytes]) -> str:
        """Return the kind of the first entry that names one of these credentials; empty: none does."""
        return next((self.kinds[digest] for digest in digests if digest in self.kinds), "")


def credential_digest(kind: str, value: str) -> bytes:
    """Return what a credential is known by; ``value``: in the form that ``parse_deny_list`` makes of an entry's."""
    return hashlib.sha256(f"{kind} {value}".encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]


def serial_value(serial: int, issuer: str = "") -> str:
    """Return the value of an entry for a certificate's serial number, of one issuer or of any."""
    return f"{serial:x} {issuer}".strip()


def read_deny_list(file: str) -> DenyList:
    """Read a deny list; no file: an empty one. Raises OSError, ConfigError with the file and the line's number."""
    return parse_deny_list(read_file(file, FILE_BYTES_MAX + 1), file) if file else DenyList()


def parse_deny_list(data: bytes, file: str) -> DenyList:
    """Parse a deny list. Raises ConfigError with the file and the line's number."""
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{KEY}: {file} has more than {FILE_BYTES_MAX} bytes")
    kinds: dict[bytes, str] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            entry = line.decode().strip()
            if not entry or entry.startswith("#"):
                continue
            kind, _, value = entry.partition(" ")
            kinds[credential_digest(kind, _canonical_value(kind, value.strip()))] = kind
        except ValueError as error:  # not the line itself, which may hold a token by mistake
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise ConfigError(f"{KEY}: {file}, line {number}: {reason}") from None
        if len(kinds) > ENTRIES_MAX:
            raise ConfigError(f"{KEY}: {file}, line {number}: more than {ENTRIES_MAX} entries")
    return DenyList(kinds)


def _canonical_value(kind: str, value: str) -> str:
    """Return an entry's value in its one form. Raises ValueError."""
    match kind:
        case "certificate-sha256" | "token-sha256":
            digest = value.replace(":", "").lower()
            if not _SHA256.match(digest):
                raise ValueError(f"{kind} needs 64 hexadecimal digits")
            return digest
        case "certificate-serial":
            serial, _, issuer = value.partition(" ")
            serial = serial.replace(":", "").lower()
            if not _SERIAL.match(serial):
                raise ValueError(f"{kind} needs a number of 1 to 64 hexadecimal digits")
            return serial_value(int(serial, 16), _canonical_issuer(issuer.strip()))
        case "token-id":
            if not value or not value.isprintable():
                raise ValueError(f"{kind} needs a token's claim jti")
            return value
    raise ValueError(
        "an entry begins with certificate-sha256, certificate-serial, token-id or token-sha256, and a space"
    )


def _canonical_issuer(text: str) -> str:
    """Return a name as a certificate's is written, whatever its escapes and its spaces behind commas.

    Raises ValueError. OpenSSL's default form, with spaces around "=", is refused: it has the attributes in the opposite
    order, and would name nobody.
    """
    if len(text) > ISSUER_CHARACTERS_MAX:
        raise ValueError(f"{CERTIFICATE_SERIAL}: the issuer has more than {ISSUER_CHARACTERS_MAX} characters")
    try:
        return x509.Name.from_rfc4514_string(_BEHIND_COMMA.sub(",", text), _OPENSSL_NAMES).rfc4514_string()
    except ValueError:  # which may quote the text
        message = f"{CERTIFICATE_SERIAL}: the issuer is no name in the form of RFC 4514, as in CN=ca,O=example"
        raise ValueError(message) from None
