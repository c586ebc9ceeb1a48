"""What credentials are known by, and the auth worker's check of them."""

import base64
import hashlib

import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from auth.denied_credentials import _EC_ORDERS, certificate_digests, token_digests
from auth.state import AuthenticationDenied
from proxy.common.deny_list import parse_deny_list

CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


def kind(entry: str, digests: list[bytes]) -> str:
    return parse_deny_list(entry.encode(), "file").matching_kind(digests)


def test_a_certificate_is_known_by_fingerprint_and_serial() -> None:
    der = x509.load_pem_x509_certificate(trustme.CA().issue_cert("a.example").cert_chain_pems[0].bytes())

    data = der.public_bytes(Encoding.DER)
    digests = certificate_digests(data)
    issuer, serial = der.issuer.rfc4514_string(), f"{der.serial_number:x}"
    assert kind(f"certificate-sha256 {hashlib.sha256(data).hexdigest()}", digests)
    assert kind(f"certificate-serial {serial}", digests)
    assert kind(f"certificate-serial {serial} {issuer}", digests)
    assert not kind(f"certificate-serial {serial} CN=other", digests)
    assert certificate_digests(b"") == []
    with pytest.raises(AuthenticationDenied):
        certificate_digests(b"no certificate")


def test_a_token_is_known_by_text_and_id() -> None:
    token = jwt.encode({"sub": "a", "jti": "7"}, "s" * 32).encode()
    assert kind("token-id 7", token_digests(token))
    assert kind(f"token-sha256 {hashlib.sha256(token).hexdigest()}", token_digests(token))
    assert not kind("token-id 8", token_digests(token))
    assert token_digests(b"no token") == token_digests(b"") == []


@pytest.mark.parametrize("algorithm", list(CURVES))
def test_no_other_spelling_of_a_signature_evades_an_entry(algorithm: str) -> None:
    key = ec.generate_private_key(CURVES[algorithm])
    token = jwt.encode({"sub": "a"}, key, algorithm).encode()
    entry = f"token-sha256 {hashlib.sha256(token).hexdigest()}"
    signed, _, encoded = token.rpartition(b".")
    signature = base64.urlsafe_b64decode(encoded + b"==")
    half = len(signature) // 2
    s = _EC_ORDERS[algorithm] - int.from_bytes(signature[half:], "big")
    other = base64.urlsafe_b64encode(signature[:half] + s.to_bytes(half, "big")).rstrip(b"=")
    for spelling in (encoded[:4] + b"!" + encoded[4:], encoded + b"=", other):
        altered = signed + b"." + spelling
        try:
            jwt.decode(altered, key.public_key(), algorithms=[algorithm])
        except jwt.PyJWTError:
            assert spelling != other  # the library refuses the others
            continue
        assert kind(entry, token_digests(altered)), spelling
