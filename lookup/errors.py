"""The lookup worker's errors.

LookupWorkerError: BrokerConnectionLost, CredentialsRefused, LookupFailed
"""


class LookupWorkerError(Exception):
    """Root of the lookup worker's errors."""
