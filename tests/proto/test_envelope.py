"""proto.envelope: whose requests an Envelope carries, and which of them are accepted (KIP-590)."""

import pytest

from proto import rpc_pb2
from proto.client_machine import is_plainly_lookup
from proto.envelope import (
    ENVELOPE_VERSION,
    EnvelopeRefused,
    EnvelopeVerifier,
    encode_embedded_request,
    parse_embedded_request,
)
from proto.lookup_kinds import KINDS
from proto.lookup_requests import RequestParser
from proto.pulsar_pb2 import BaseCommand
from proto.request_rules import RequestRefused
from proto.rpc_pb2 import EnvelopeRequest, EnvelopeResponse, Principal, ResolveTargetRequest
from proto.sealed_principal import seal

KEY = b"k" * 32
verify_envelope = EnvelopeVerifier().verify_envelope
NOW_MS = 1_700_000_000_000
ALICE = Principal(type="User", name="alice", method="token", expires_at_unix_ms=NOW_MS + 1)
LOOKUP = BaseCommand(type=BaseCommand.LOOKUP, lookup_topic={"topic": "t", "request_id": 7})


def envelope(**changes: object) -> EnvelopeRequest:
    """Alice's."""
    fields: dict[str, object] = {
        "version": ENVELOPE_VERSION,
        "requests": [LOOKUP.SerializeToString()],
        "principal_type": "User",
        "principal_name": "alice",
        "sealed_principal": seal(ALICE, KEY),
        "client_address": "192.0.2.7:4000",
    }
    return EnvelopeRequest(**{**fields, **changes})  # type: ignore[arg-type]


def refusal(request: EnvelopeRequest, key: bytes | None = KEY) -> int:
    with pytest.raises(EnvelopeRefused) as caught:
        verify_envelope(request, key, NOW_MS)
    assert str(caught.value)
    return caught.value.error


@pytest.mark.conforms("kip-590.8")
def test_the_principal_is_the_one_under_the_seal() -> None:
    assert verify_envelope(envelope(), KEY, NOW_MS) == ALICE


@pytest.mark.conforms("kip-590.10")
@pytest.mark.parametrize("version", [0, ENVELOPE_VERSION])
def test_older_versions_are_understood(version: int) -> None:
    assert verify_envelope(envelope(version=version), KEY, NOW_MS) == ALICE


@pytest.mark.conforms("kip-590.10")
@pytest.mark.parametrize("key", [KEY, None])
def test_a_newer_version_is_refused_before_anything_else_is_looked_at(key: bytes | None) -> None:
    """What it leaves out, or means otherwise, cannot be known here."""
    request = envelope(version=ENVELOPE_VERSION + 1, client_address="rubbish", sealed_principal=b"")
    assert refusal(request, key) == EnvelopeResponse.UNSUPPORTED_VERSION


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("address", ["", "rubbish", "192.0.2.7", "192.0.2.7:x", "a b:1", "192.0.2.7:0", "[::1]"])
def test_a_bad_client_address(address: str, key: bytes | None) -> None:
    assert refusal(envelope(client_address=address), key) == EnvelopeResponse.INVALID_REQUEST


def test_whose_request_it_is_comes_before_what_else_is_wrong_with_it() -> None:
    """As KIP-590 has it: a caller that cannot show a principal learns nothing of the rest."""
    request = envelope(sealed_principal=b"", client_address="rubbish")
    assert refusal(request) == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


@pytest.mark.conforms("kip-590.6")
@pytest.mark.parametrize(
    "sealed",
    [b"", b"\xff\xff\xff", ALICE.SerializeToString(), seal(ALICE, b"x" * 32), seal(ALICE, KEY)[:-1] + b"\x00"],
)
def test_unsealed_malformed_or_forged(sealed: bytes) -> None:
    """Security: a forwarder cannot mint a principal."""
    assert refusal(envelope(sealed_principal=sealed)) == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


def test_an_expired_principal() -> None:
    with pytest.raises(EnvelopeRefused) as caught:
        verify_envelope(envelope(), KEY, NOW_MS + 1)
    assert caught.value.error == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


def test_an_expired_principal_where_ends_are_only_observed() -> None:
    """Its seal, and whose it is, count as ever."""
    assert verify_envelope(envelope(), KEY, None) == ALICE
    for changes in ({"sealed_principal": seal(ALICE, b"x" * 32)}, {"principal_name": "bob"}):
        with pytest.raises(EnvelopeRefused):
            verify_envelope(envelope(**changes), KEY, None)


def test_a_verified_seal_is_valid_only_for_its_key_and_until_its_expiry() -> None:
    """Security: verified seals are cached, but no longer than they are valid."""
    for now_ms in (NOW_MS, NOW_MS + 1, NOW_MS, NOW_MS + 2**40):
        if now_ms == NOW_MS:
            assert verify_envelope(envelope(), KEY, now_ms) == ALICE
        else:
            with pytest.raises(EnvelopeRefused, match="expired"):
                verify_envelope(envelope(), KEY, now_ms)
    for _ in range(2):
        assert refusal(envelope(), b"x" * 32) == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE
    for_ever = Principal(type="User", name="alice")
    assert verify_envelope(envelope(sealed_principal=seal(for_ever, KEY)), KEY, 2**62) == for_ever


@pytest.mark.conforms("kip-590.8")
@pytest.mark.parametrize("claimed", [{"principal_name": "admin"}, {"principal_type": "Group"}, {"principal_name": ""}])
def test_the_name_must_be_the_one_under_the_seal(claimed: dict[str, str]) -> None:
    assert refusal(envelope(**claimed)) == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


def test_without_authentication_requests_have_no_principal_whatever_is_claimed() -> None:
    assert verify_envelope(envelope(principal_name="admin", sealed_principal=b"x"), None, NOW_MS) == Principal()


def test_an_envelope_without_a_request() -> None:
    """It has nothing that could be answered, and its caller waits."""
    assert refusal(envelope(requests=[])) == EnvelopeResponse.INVALID_REQUEST


def test_the_version_that_is_written() -> None:
    """A worker that was not replaced yet refuses any other."""
    assert ENVELOPE_VERSION == 1


def test_a_refusal_says_what_is_wrong() -> None:
    with pytest.raises(EnvelopeRefused) as caught:
        verify_envelope(envelope(requests=[]), KEY, NOW_MS)
    assert str(caught.value) == "an Envelope without a request"


# ---- targets of relays


def target(**changes: object) -> ResolveTargetRequest:
    """Alice's."""
    fields: dict[str, object] = {"principal_name": "alice", "sealed_principal": seal(ALICE, KEY)}
    return ResolveTargetRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_principal_of_a_relay_is_the_one_under_the_seal() -> None:
    assert EnvelopeVerifier().verify_target(target(), KEY, NOW_MS) == ALICE


@pytest.mark.parametrize(
    ("changes", "now_ms", "text"),
    [
        ({"sealed_principal": b""}, NOW_MS, "forged"),
        ({"sealed_principal": b"\xff"}, NOW_MS, "malformed"),
        ({"sealed_principal": seal(ALICE, b"x" * 32)}, NOW_MS, "forged"),
        ({"principal_name": "admin"}, NOW_MS, "not the one under the seal"),
        ({"principal_name": ""}, NOW_MS, "not the one under the seal"),
        ({}, NOW_MS + 1, "expired"),
    ],
)
def test_a_relay_for_another_principal_or_for_none_is_refused(
    changes: dict[str, object], now_ms: int, text: str
) -> None:
    """Security: a forwarder opens no relay in a name that no auth worker has sealed."""
    with pytest.raises(EnvelopeRefused, match=text) as caught:
        EnvelopeVerifier().verify_target(target(**changes), KEY, now_ms)
    assert caught.value.error == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE


CLAIMS = {("AuthenticateRequest", "original_principal"), ("RelayRequest", "principal")}
"""What only a client says, whose own role an auth worker checks (auth.effective_principal). And what an HTTP worker
tells of a connection that it passes to a forwarder, which has no key for seals (docs/security.md, "A captured HTTP
worker").
"""


def test_every_request_that_names_a_principal_has_its_seal() -> None:
    """Security: a worker believes no other process whose request it is. A request that is new here is to be checked by
    EnvelopeVerifier, as these two are.
    """
    naming: dict[str, set[str]] = {}
    for name, message in rpc_pb2.DESCRIPTOR.message_types_by_name.items():
        for field in message.fields_by_name:
            if name.endswith("Request") and "principal" in field and (name, field) not in CLAIMS:
                naming.setdefault(name, set()).add(field)
    assert naming == {
        "EnvelopeRequest": {"principal_type", "principal_name", "sealed_principal"},
        "ResolveTargetRequest": {"principal_name", "sealed_principal"},
    }


def test_without_authentication_a_relay_has_no_principal_whatever_is_claimed() -> None:
    claimed = target(principal_name="admin", sealed_principal=b"x")
    assert EnvelopeVerifier().verify_target(claimed, None, NOW_MS) == Principal()


# ---- requests


@pytest.mark.parametrize("sizes", [[0], [1, 127, 128], [20_000, 0, 16_384]])
def test_requests_are_appended_to_an_envelope(sizes: list[int]) -> None:
    requests = [bytes([size % 251]) * size for size in sizes]
    whole = envelope(requests=[]).SerializeToString() + b"".join(map(encode_embedded_request, requests))
    assert EnvelopeRequest.FromString(whole) == envelope(requests=requests)


@pytest.mark.conforms("kip-590.11")
def test_a_request_and_its_id() -> None:
    request, request_id = parse_embedded_request(LOOKUP.SerializeToString(), RequestParser())
    assert request.kind is KINDS[BaseCommand.LOOKUP]
    assert request.to_command().lookup_topic.topic == "t"
    assert request_id == b"\x07"


@pytest.mark.conforms("kip-590.2", "kip-590.24")
@pytest.mark.parametrize("kind", sorted(set(BaseCommand.Type.values()) - set(KINDS)))
def test_a_command_that_may_not_be_forwarded(kind: int) -> None:
    """Security: a lookup worker asks for its clients, and does nothing else on their behalf."""
    with pytest.raises(EnvelopeRefused, match="may not be forwarded") as caught:
        parse_embedded_request(BaseCommand(type=kind).SerializeToString(), RequestParser())
    assert caught.value.error == EnvelopeResponse.INVALID_REQUEST


@pytest.mark.parametrize("kind", [BaseCommand.GET_TOPICS_OF_NAMESPACE, BaseCommand.GET_SCHEMA])
def test_a_request_for_much_that_begins_as_one_for_little(kind: int) -> None:
    """Security: a forwarder that took it for what it begins as would have no room for its answer."""
    command = BaseCommand(type=kind)
    request = getattr(command, KINDS[kind].request_field)
    request.request_id = 8
    setattr(request, KINDS[kind].subject_field, "t/n")
    assert parse_embedded_request(command.SerializeToString(), RequestParser())[0].kind is KINDS[kind]
    hidden = LOOKUP.SerializeToString() + command.SerializeToString()
    assert not is_plainly_lookup(hidden), "so a forwarder parses it"
    with pytest.raises(RequestRefused, match="has one message"):
        parse_embedded_request(hidden, RequestParser())


@pytest.mark.conforms("kip-590.25")
@pytest.mark.parametrize("inner", [b"\xff\xff\xff\xff", BaseCommand(type=BaseCommand.LOOKUP).SerializeToString()])
def test_inner_bytes_that_cannot_be_parsed(inner: bytes) -> None:
    with pytest.raises(EnvelopeRefused) as caught:
        parse_embedded_request(inner, RequestParser())
    assert caught.value.error == EnvelopeResponse.UNSUPPORTED_VERSION
