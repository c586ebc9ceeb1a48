"""proxy.forwarder.workers.broker_refusals: what is said of a broker that refuses credentials is true."""

from __future__ import annotations

import pytest

from proto.broker_handshake import Refused
from proto.connect_rules import OriginalCredentials
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import OriginalData, Principal
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientIdentity
from proxy.forwarder.workers.broker_refusals import CREDENTIALS_REFUSED, explain_refusal
from proxy.runtime.network.broker_link import PROXY_CREDENTIALS_REFUSED, BrokerLinkFailed

UNKNOWN = OriginalData.ORIGINAL_DATA_UNKNOWN
IGNORED = OriginalData.ORIGINAL_DATA_IGNORED
CHECKED = OriginalData.ORIGINAL_DATA_CHECKED
WANTED = "the broker wants the client's own credentials (authenticateOriginalAuthData)"


def refused(error: int = ServerError.AuthenticationError, text: str = "Unable to authenticate") -> BrokerLinkFailed:
    return BrokerLinkFailed(
        "refused", f"b0:6650 refused: {text}", message=PROXY_CREDENTIALS_REFUSED, refusal=Refused(error, text)
    )


def alice(method: str = "token", *, forwarded: bool = False) -> ClientIdentity:
    original = OriginalCredentials(method, "secret") if forwarded else None
    return ClientIdentity(Principal(type="User", name="alice", method=method), b"sealed", original)


@pytest.mark.parametrize(
    ("method", "forwards", "text"),
    [
        ("tls", True, f"{WANTED}, and a certificate cannot be forwarded: set it to false at the brokers"),
        ("tls", False, f"{WANTED}, and a certificate cannot be forwarded: set it to false at the brokers"),
        ("sasl", True, f"{WANTED}, and a Kerberos ticket cannot be forwarded: set it to false at the brokers"),
        ("SCRAM-SHA-256", True, f"{WANTED}, and a SCRAM exchange cannot be forwarded: set it to false at the brokers"),
        ("SCRAM-SHA-512", True, f"{WANTED}, and a SCRAM exchange cannot be forwarded: set it to false at the brokers"),
        ("none", True, f"{WANTED}, and what method none proves cannot be forwarded: set it to false at the brokers"),
        ("token", False, f"{WANTED}: set brokers.forward_authorization_credentials"),
        ("basic", False, f"{WANTED}: set brokers.forward_authorization_credentials"),
    ],
)
def test_the_broker_wants_what_it_did_not_get(method: str, forwards: bool, text: str) -> None:
    """The code lets a Java client try again: its own credentials are right."""
    failed = explain_refusal(refused(), CHECKED, alice(method), forwards=forwards)
    assert (failed.reason, failed.code, failed.message) == ("refused", ServerError.ServiceNotReady, text)
    assert str(failed) == f"b0:6650 refused: Unable to authenticate ({text})"
    assert failed.refusal == refused().refusal


def test_the_broker_refuses_the_clients_own() -> None:
    failed = explain_refusal(refused(), CHECKED, alice(forwarded=True), forwards=True)
    assert (failed.code, failed.message) == (ServerError.AuthenticationError, "Unable to authenticate")
    assert str(failed) == "b0:6650 refused: Unable to authenticate"


@pytest.mark.parametrize("forwarded", [True, False])
def test_where_nothing_is_known_nothing_is_claimed(forwarded: bool) -> None:
    failed = explain_refusal(refused(), UNKNOWN, alice(forwarded=forwarded), forwards=forwarded)
    assert (failed.code, failed.message) == (ServerError.ServiceNotReady, CREDENTIALS_REFUSED)


@pytest.mark.parametrize(
    ("original_data", "identity"), [(IGNORED, alice(forwarded=True)), (IGNORED, alice()), (CHECKED, ANONYMOUS)]
)
def test_only_the_proxys_own_were_shown(original_data: OriginalData, identity: ClientIdentity) -> None:
    failed = refused()
    assert explain_refusal(failed, original_data, identity, forwards=True) is failed


@pytest.mark.parametrize(
    "failed", [refused(ServerError.AuthorizationError, "Invalid roles."), BrokerLinkFailed("timeout", "", message="x")]
)
def test_other_failures_stay_as_they_are(failed: BrokerLinkFailed) -> None:
    assert explain_refusal(failed, CHECKED, alice(), forwards=True) is failed
