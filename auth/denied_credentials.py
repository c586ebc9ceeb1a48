"""What a client's credentials are known by in the deny list (proxy.common.deny_list)."""

import base64
import hashlib

from cryptography import x509

from auth.jwt_rules import TOKEN_BYTES_MAX, parse_unverified
from auth.state import AuthenticationDenied
from proxy.common.deny_list import (
    CERTIFICATE_SERIAL,
    CERTIFICATE_SHA256,
    TOKEN_ID,
    TOKEN_SHA256,
    credential_digest,
    serial_value,
)

_EC_ORDERS = {
    "ES256": 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
    "ES384": 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973,
    "ES512": (1 << 521) - 0x5AE79787C40D069948033FEB708F65A2FC44A36477663B851449048E16EC79BF7,
}
"""Orders of the curves (FIPS 186-5): with s, a signature's n - s is valid, too."""


def certificate_digests(certificate: bytes) -> list[bytes]:
    """Return what a certificate (DER) is known by; none: nothing. Raises AuthenticationDenied if it cannot be read."""
    if not certificate:
        return []
    digests = [credential_digest(CERTIFICATE_SHA256, hashlib.sha256(certificate).hexdigest())]
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        serial, issuer = parsed.serial_number, parsed.issuer.rfc4514_string()
    except ValueError as error:
        raise AuthenticationDenied("malformed", f"a certificate that cannot be read: {error}") from None
    of_any, of_issuer = serial_value(serial), serial_value(serial, issuer)
    return [*digests, *(credential_digest(CERTIFICATE_SERIAL, value) for value in (of_any, of_issuer))]


def token_digests(token: bytes) -> list[bytes]:
    """Return what a token is known by; none for what is no token.

    A verified token's signature can be spelled in other ways (bits and characters that Base64 ignores, the other
    s of an ECDSA signature): the digests are those of the usual spelling, so that no other evades an entry.
    """
    if not token or len(token) > TOKEN_BYTES_MAX:
        return []
    try:
        header, claims = parse_unverified(token)
    except AuthenticationDenied:
        return []
    texts = {token, *_usual_spellings(token, str(header.get("alg")))}
    digests = [credential_digest(TOKEN_SHA256, hashlib.sha256(text).hexdigest()) for text in sorted(texts)]
    token_id = claims.get("jti")
    if isinstance(token_id, str):
        digests.append(credential_digest(TOKEN_ID, token_id.strip()))
    return digests


def _usual_spellings(token: bytes, algorithm: str) -> list[bytes]:
    signed, _, encoded = token.rpartition(b".")
    try:
        signature = base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))
    except ValueError:
        return []
    signatures = [signature]
    if algorithm in _EC_ORDERS:
        half = len(signature) // 2
        other = _EC_ORDERS[algorithm] - int.from_bytes(signature[half:], "big")
        if other > 0:
            signatures.append(signature[:half] + other.to_bytes(half, "big"))
    return [signed + b"." + base64.urlsafe_b64encode(one).rstrip(b"=") for one in signatures]
