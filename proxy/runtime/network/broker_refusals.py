"""What a client is told, and the log, where a broker refuses its connection with AuthenticationError.

The broker refuses the proxy's own credentials or the client's, and does not say which. What the lookup workers' logins
showed of the broker tells them apart.
"""

from dataclasses import dataclass

from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import OriginalData
from proxy.config.methods import WANTS_CLIENT_CREDENTIALS, missing_credentials_text
from proxy.runtime.network.broker_link import BrokerLinkFailed

_CHECKED = frozenset({OriginalData.ORIGINAL_DATA_CHECKED, OriginalData.ORIGINAL_DATA_SEEMS_CHECKED})

CREDENTIALS_REFUSED = "The broker does not accept the credentials: the proxy's own, or the client's"


@dataclass(frozen=True, slots=True)
class ShownCredentials:
    """What a broker was shown of a client: its role and method; and whether its own credentials, behind the proxy's.

    ``forwards``: credentials are forwarded where they can be.
    """

    role: str
    method: str
    has_original: bool
    forwards: bool


def explain_refusal(failed: BrokerLinkFailed, original_data: OriginalData, shown: ShownCredentials) -> BrokerLinkFailed:
    """Return the failure with what is known of its cause.

    Where the broker lacks the client's own credentials, the client gets AuthenticationError, as from the broker itself:
    to try again until a timeout would tell it nothing. In all other cases it may try again: the proxy has just accepted
    its credentials, so that the proxy's own are the likelier cause.
    """
    refusal = failed.refusal
    if refusal is None or refusal.error != ServerError.AuthenticationError:
        return failed
    if refusal.message.startswith(WANTS_CLIENT_CREDENTIALS):  # by a proxy behind this one, which knows better
        return BrokerLinkFailed(
            failed.reason, str(failed), code=refusal.error, message=refusal.message, refusal=refusal
        )
    if not shown.role or original_data == OriginalData.ORIGINAL_DATA_IGNORED:
        return failed  # the only credentials that count are the proxy's own
    code, message = failed.code, CREDENTIALS_REFUSED
    if original_data in _CHECKED and not shown.has_original:
        code, message = refusal.error, missing_credentials_text(shown.method, forwards=shown.forwards)
    return BrokerLinkFailed(failed.reason, f"{failed} ({message})", code=code, message=message, refusal=refusal)
