"""proxy.runtime.network.broker_refusals: what is said of a broker that refuses credentials is true."""

from __future__ import annotations

import pytest

from proto.broker_handshake import Refused
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import OriginalData
from proxy.runtime.network.broker_link import PROXY_CREDENTIALS_REFUSED, BrokerLinkFailed
from proxy.runtime.network.broker_refusals import CREDENTIALS_REFUSED, ShownCredentials, explain_refusal

UNKNOWN = OriginalData.ORIGINAL_DATA_UNKNOWN
IGNORED = OriginalData.ORIGINAL_DATA_IGNORED
CHECKED = OriginalData.ORIGINAL_DATA_CHECKED
HELPS = "set it to false at the brokers"
WANTED = "the broker wants the client's own credentials (authenticateOriginalAuthData)"


def refused(error: int = ServerError.AuthenticationError, text: str = "Unable to authenticate") -> BrokerLinkFailed:
    return BrokerLinkFailed(
        "refused", f"b0:6650 refused: {text}", message=PROXY_CREDENTIALS_REFUSED, refusal=Refused(error, text)
    )


def alice(method: str = "token", *, forwarded: bool = False, forwards: bool = True) -> ShownCredentials:
    return ShownCredentials("alice", method, has_original=forwarded, forwards=forwards)


ANONYMOUS = ShownCredentials("", "", has_original=False, forwards=True)


@pytest.mark.parametrize(
    ("method", "forwards", "text"),
    [
        ("tls", True, f"{WANTED}, and a certificate cannot be forwarded: {HELPS}"),
        ("tls", False, f"{WANTED}, and a certificate cannot be forwarded: {HELPS}"),
        ("sasl", True, f"{WANTED}, and a Kerberos ticket cannot be forwarded: {HELPS}"),
        ("SCRAM-SHA-256", True, f"{WANTED}, and a SCRAM exchange cannot be forwarded: {HELPS}"),
        ("SCRAM-SHA-512", True, f"{WANTED}, and a SCRAM exchange cannot be forwarded: {HELPS}"),
        (
            "none",
            True,
            f"{WANTED}, and a client without credentials (authentication.anonymous_role) has none to forward: {HELPS}",
        ),
        (
            "of-a-plugin",
            True,
            f"{WANTED}, and an exchange of several rounds cannot be forwarded: {HELPS}",
        ),
        ("token", False, f"{WANTED}: set brokers.forward_authorization_credentials = true"),
        ("basic", False, f"{WANTED}: set brokers.forward_authorization_credentials = true"),
    ],
)
def test_the_broker_wants_what_it_did_not_get(method: str, forwards: bool, text: str) -> None:
    """The code makes clients fail at once, with the text: to try again does not help."""
    failed = explain_refusal(refused(), CHECKED, alice(method, forwards=forwards))
    assert (failed.reason, failed.code, failed.message) == ("refused", ServerError.AuthenticationError, text)
    assert str(failed) == f"b0:6650 refused: Unable to authenticate ({text})"
    assert failed.refusal == refused().refusal


@pytest.mark.parametrize(
    ("original_data", "shown"), [(CHECKED, alice(forwarded=True)), (UNKNOWN, alice(forwarded=True)), (UNKNOWN, alice())]
)
def test_whose_credentials_are_refused_is_not_known(original_data: OriginalData, shown: ShownCredentials) -> None:
    """The code lets a client try again: the proxy has just accepted its credentials."""
    failed = explain_refusal(refused(), original_data, shown)
    assert (failed.code, failed.message) == (ServerError.ServiceNotReady, CREDENTIALS_REFUSED)
    assert str(failed) == f"b0:6650 refused: Unable to authenticate ({CREDENTIALS_REFUSED})"


def test_a_proxy_in_front_that_forwards_nothing_is_named() -> None:
    """Of a client by token only a proxy in front (authentication.proxy_roles) can have kept back what it has."""
    text = f"{WANTED}, and the proxy in front of this one does not forward them"
    assert explain_refusal(refused(), CHECKED, alice("token")).message == text


def test_a_broker_that_seems_to_check_is_enough_for_the_text() -> None:
    failed = explain_refusal(refused(), OriginalData.ORIGINAL_DATA_SEEMS_CHECKED, alice("tls"))
    assert failed.message == f"{WANTED}, and a certificate cannot be forwarded: {HELPS}"


def test_an_explanation_by_the_next_proxy_is_passed_on_unchanged() -> None:
    text = f"{WANTED}, and a certificate cannot be forwarded: {HELPS}"
    failed = explain_refusal(refused(text=text), IGNORED, alice("tls"))
    assert (failed.code, failed.message) == (ServerError.AuthenticationError, text)


@pytest.mark.parametrize(
    ("original_data", "shown"), [(IGNORED, alice(forwarded=True)), (IGNORED, alice()), (CHECKED, ANONYMOUS)]
)
def test_only_the_proxys_own_were_shown(original_data: OriginalData, shown: ShownCredentials) -> None:
    failed = refused()
    assert explain_refusal(failed, original_data, shown) is failed


@pytest.mark.parametrize(
    "failed", [refused(ServerError.AuthorizationError, "Invalid roles."), BrokerLinkFailed("timeout", "", message="x")]
)
def test_other_failures_stay_as_they_are(failed: BrokerLinkFailed) -> None:
    assert explain_refusal(failed, CHECKED, alice()) is failed
