"""Keys and tokens of the tests: good ones by PyJWT, bad ones written by hand."""

import base64
import functools
import hashlib
import hmac
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

SECRET = b"not-to-be-seen-anywhere-" + bytes(range(128, 168))
OTHER_SECRET = bytes(64 - index for index in range(64))

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@functools.cache
def rsa_key(number: int = 0) -> rsa.RSAPrivateKey:
    """A key pair; another one for every number."""
    del number
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@functools.cache
def ec_key(curve: str = "secp256r1") -> ec.EllipticCurvePrivateKey:
    curves = {kind.name: kind for kind in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())}
    return ec.generate_private_key(curves[curve])


@functools.cache
def ed25519_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_der(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def private_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def token(key: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> bytes:
    """A token for alice, unless the claims say otherwise; a claim of `...` is left out."""
    written = {name: value for name, value in {"sub": "alice", **claims}.items() if value is not ...}
    return jwt.encode(written, key, algorithm=algorithm).encode()


def segment(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def by_hand(header: Any, claims: Any, secret: bytes | None) -> bytes:
    """A token with whatever header and claims; signed as HS256, or not at all."""
    signed = segment(json.dumps(header).encode()) + b"." + segment(json.dumps(claims).encode())
    signature = b"" if secret is None else hmac.digest(secret, signed, hashlib.sha256)
    return signed + b"." + segment(signature)


def private_der(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
