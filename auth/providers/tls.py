"""Method ``tls``: the certificate that a client showed in TLS, as Pulsar's AuthenticationProviderTls takes it."""

from cryptography import x509
from cryptography.x509.oid import NameOID

from auth.state import AuthenticationDenied, AuthenticationProvider, ClientContext, Identity


class TlsProvider(AuthenticationProvider):
    """The role is the common name (CN) of the certificate's subject; the listener has checked who signed it.

    An identity ends with its certificate.
    """

    method = "tls"

    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- all is in the certificate
        """Return the role in the certificate."""
        if not client.certificate:
            raise AuthenticationDenied("missing", "no client certificate")
        try:
            certificate = x509.load_der_x509_certificate(client.certificate)
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            ends_at = certificate.not_valid_after_utc
        except ValueError as error:
            raise AuthenticationDenied("malformed", f"a certificate that cannot be read: {error}") from None
        if len(names) != 1:
            raise AuthenticationDenied("no_role", f"the certificate's subject has {len(names)} common names")
        return Identity(str(names[0].value), int(ends_at.timestamp() * 1000))
