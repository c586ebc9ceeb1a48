"""The auth worker's errors.

AuthError: AuthenticationDenied, CredentialsUnavailable, HttpFailed, NotAvailable
"""


class AuthError(Exception):
    """Root of the auth worker's errors."""
