"""auth.providers.scram: two messages of a client, which is identified by the right proof alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Coroutine
from typing import Any

from auth.providers.scram import DIGEST_BYTES, Credential, ScramAuthState, Users
from auth.state import AuthenticationDenied, Identity

NONCE, PROOF = b"{nonce}", b"{proof}"
"""In the final message: the server's nonce, and the proof of alice's password for the messages before it."""

ITERATIONS = 4096
SALT = b"salt" * 4
REASONS = frozenset({"missing", "malformed", "channel_binding", "bad_password", "unknown_user", "unexpected_round"})
MESSAGE_BYTES_MAX = 2048

SEEDS = (
    b"n,,n=alice,r=client\nc=biws,r={nonce},p={proof}",
    b"n,,n=bob,r=client\nc=biws,r={nonce},p={proof}",
    b"y,,n=alice,r=client\nc=eSws,r={nonce},p={proof}",
    b"p=tls-unique,,n=alice,r=client\nc=cD10bHMtdW5pcXVlLCw=,r={nonce},p={proof}",
    b"n,a=bob,n=alice,r=client\nc=bixhPWJvYiw=,r={nonce},p={proof}",
    b"n,,m=ext,n=alice,r=client,x=1\nc=biws,r={nonce},x=1,p={proof}",
    b"n,,n=al=2Cice=3D,r=client\nc=biws,r={nonce},p=AAAA",
    "n,,n=\u2168\u00adalice,r=client\nc=biws,r={nonce},p={proof}".encode(),
    b"n,,n=alice,r=" + b"x" * 1000 + b"\nc=biws,r={nonce},p={proof}",
)


def _credential(mechanism: str) -> tuple[Credential, bytes]:
    digest = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    salted = hashlib.pbkdf2_hmac(digest, b"password", SALT, ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", digest)
    stored_key = hashlib.new(digest, client_key).digest()
    return Credential(ITERATIONS, SALT, stored_key, hmac.digest(salted, b"Server Key", digest)), client_key


_CREDENTIALS = {mechanism: _credential(mechanism) for mechanism in DIGEST_BYTES}
_USERS = {mechanism: Users(mechanism, {(mechanism, "alice"): one}) for mechanism, (one, _) in _CREDENTIALS.items()}


class _File:
    """A file of users that does not change."""

    async def current_value(self) -> dict[str, Users]:
        return _USERS


def check(data: bytes) -> None:
    """A line for each message."""
    first, _, final = data.partition(b"\n")
    for mechanism in DIGEST_BYTES:
        _check_exchange(mechanism, first, final)


def _check_exchange(mechanism: str, first: bytes, final: bytes) -> None:
    state = ScramAuthState(mechanism, _File())  # type: ignore[arg-type]
    answer = _round(state, first)
    assert not state.is_complete()
    if answer is None:
        return
    nonce = next(part[2:] for part in answer.split(b",") if part.startswith(b"r="))
    final = final.replace(NONCE, nonce)
    has_proof = PROOF in final
    if has_proof:
        final = final.replace(PROOF, _proof(mechanism, first, answer, final))
    if _round(state, final) is None:
        assert not state.is_complete()
        return
    assert has_proof, "identified without a proof"
    assert state.get_identity() == Identity("alice")
    assert _round(state, final) is None


def _proof(mechanism: str, first: bytes, answer: bytes, final: bytes) -> bytes:
    _, client_key = _CREDENTIALS[mechanism]
    stored_key = _CREDENTIALS[mechanism][0].stored_key
    bare = first.split(b",", 2)[-1]
    message = b",".join((bare, answer, final.partition(b",p=")[0]))
    signature = hmac.digest(stored_key, message, mechanism.removeprefix("SCRAM-").replace("-", "").lower())
    return base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True)))


def _round(state: ScramAuthState, message: bytes) -> bytes | None:
    """The server's answer; None where the client is denied."""
    try:
        answer = _returned(state.authenticate(message))
    except AuthenticationDenied as denied:
        _check_denial(denied)
        return None
    assert answer
    assert len(answer) <= MESSAGE_BYTES_MAX
    return answer


def _check_denial(denied: AuthenticationDenied) -> None:
    assert denied.reason in REASONS, denied.reason
    assert len(str(denied)) <= MESSAGE_BYTES_MAX * 4


def _returned(coroutine: Coroutine[Any, Any, bytes | None]) -> bytes | None:
    """What a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return returned.value  # type: ignore[no-any-return]
    raise AssertionError("the state waits")
