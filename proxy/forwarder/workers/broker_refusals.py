"""What a client is told, and the log, where a broker refuses its relay with AuthenticationError.

The broker refuses the proxy's own credentials or the client's, and does not say which. What the lookup workers' logins
showed of the broker tells them apart.
"""

from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import OriginalData
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.runtime.network.broker_link import BrokerLinkFailed

CREDENTIALS_REFUSED = "The broker does not accept the credentials: the proxy's own, or the client's"

_WANTED = "the broker wants the client's own credentials (authenticateOriginalAuthData)"
_SETTING = "set brokers.forward_authorization_credentials"

_NOT_FORWARDED = {
    "tls": "a certificate",
    "sasl": "a Kerberos ticket",
    "SCRAM-SHA-256": "a SCRAM exchange",
    "SCRAM-SHA-512": "a SCRAM exchange",
}
"""By method: what a client proves itself with that no other party could verify."""


def explain_refusal(
    failed: BrokerLinkFailed, original_data: OriginalData, identity: ClientIdentity, *, forwards: bool
) -> BrokerLinkFailed:
    """Return the failure with what is known of its cause. ``forwards``: credentials are forwarded where they can be."""
    refusal = failed.refusal
    if refusal is None or refusal.error != ServerError.AuthenticationError:
        return failed
    if not identity.role or original_data == OriginalData.ORIGINAL_DATA_IGNORED:
        return failed  # the only credentials that count are the proxy's own
    code = failed.code
    if original_data != OriginalData.ORIGINAL_DATA_CHECKED:
        message = CREDENTIALS_REFUSED
    elif identity.original is not None:
        code, message = refusal.error, refusal.message
    else:
        message = _missing(identity.principal.method, forwards=forwards)
    detail = f"{failed} ({message})" if message != refusal.message else str(failed)
    return BrokerLinkFailed(failed.reason, detail, code=code, message=message, refusal=refusal)


def _missing(method: str, *, forwards: bool) -> str:
    """Return why the broker did not get the credentials that it wants, and what helps."""
    what = _NOT_FORWARDED.get(method)
    if what is None and not forwards:
        return f"{_WANTED}: {_SETTING}"
    what = what or f"what method {method} proves"
    return f"{_WANTED}, and {what} cannot be forwarded: set it to false at the brokers"
