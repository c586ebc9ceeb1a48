"""Method ``tls``: the certificate that a client showed in TLS. Its role comes from the subject or a subject alternative
name, by rules in the manner of PIP-485.

Where PIP-485 takes the first of several names, a certificate with several is denied: which of them its authority meant
must not depend on their order.
"""

import re
from collections.abc import Callable

from cryptography import x509
from cryptography.x509.oid import NameOID

from auth.state import (
    ROLE_CHARACTERS_MAX,
    AuthenticationDenied,
    AuthenticationProvider,
    ClientContext,
    Identity,
    is_fit_for_a_role,
)
from proxy.common.eager import eager
from proxy.config.principal_rules import compile_principal_rules, map_principal
from proxy.config.types import TlsAuthentication

_SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+)+")
"""SPIFFE-ID, sections 2.1 to 2.4. The path is needed: a trust domain's own ID names no workload (X509-SVID, 4.1)."""

_DNS_NAME = re.compile(r"(?!.{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
"""No wildcard: it names many hosts, and "*" means every role in Pulsar's permissions."""

_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")


class TlsProvider(AuthenticationProvider):
    """The role is a name in the certificate; the listener has checked who signed it.

    An identity ends with its certificate.
    """

    method = "tls"

    def __init__(self, config: TlsAuthentication) -> None:
        """Compile the mapping rules; raises ConfigError."""
        self._names = _SOURCES[config.identity_source]
        self._source = config.identity_source
        self._rules = compile_principal_rules(
            config.principal_mapping_rules, "authentication.tls.principal_mapping_rules"
        )

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- all is in the certificate
        """Return the role in the certificate."""
        if not client.certificate:
            raise AuthenticationDenied("missing", "no client certificate")
        try:
            certificate = x509.load_der_x509_certificate(client.certificate)
            names = self._names(certificate)
            ends_at = certificate.not_valid_after_utc
        except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
            raise AuthenticationDenied("malformed", f"a certificate that cannot be read: {error}") from None
        if not names:
            raise AuthenticationDenied("no_role", f"the certificate has no {self._source}")
        if len(names) > 1:
            raise AuthenticationDenied("several_names", f"the certificate has {len(names)} of {self._source}")
        return Identity(self._role(names[0]), int(ends_at.timestamp() * 1000))

    def _role(self, name: str) -> str:
        """Return the role for a certificate's only name; raise AuthenticationDenied."""
        if not is_fit_for_a_role(name):  # also bounds what the operator's patterns get to see
            raise AuthenticationDenied("bad_role", _UNFIT)
        valid = _FORMS.get(self._source)
        if valid is not None and not valid.fullmatch(name):
            raise AuthenticationDenied("bad_role", f"not a valid name for {self._source}")
        role = map_principal(self._rules, name)
        if role is None:
            raise AuthenticationDenied("no_mapping_rule", "none of principal_mapping_rules fits the certificate's name")
        if not is_fit_for_a_role(role):
            raise AuthenticationDenied("bad_role", f"by its mapping rule, {_UNFIT}")
        return role


_UNFIT = f"the name is empty, longer than {ROLE_CHARACTERS_MAX} characters, or has control characters"

_FORMS = {"SAN:URI": _SPIFFE_ID, "SAN:DNS": _DNS_NAME, "SAN:EMAIL": _EMAIL}


def _common_names(certificate: x509.Certificate) -> list[str]:
    values = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return [value if isinstance(value, str) else "" for value in values]  # a string of bits is no name


def _distinguished_name(certificate: x509.Certificate) -> list[str]:
    """Return the subject in the form of RFC 4514, last RDN first; [] if it is empty.

    Values are checked here, as the form escapes NUL to harmless characters.
    """
    subject = certificate.subject
    for attribute in subject:
        if not (isinstance(attribute.value, str) and is_fit_for_a_role(attribute.value)):
            raise AuthenticationDenied("bad_role", f"in the subject, {_UNFIT}")
    rdns = ["+".join(map(_attribute, rdn)) for rdn in reversed(subject.rdns)]
    return [",".join(rdns)] if rdns else []


def _attribute(attribute: x509.NameAttribute[str | bytes]) -> str:
    """Return an attribute in the form of RFC 4514: one without a short name as its OID and its value's DER (2.4)."""
    if attribute.rfc4514_attribute_name != attribute.oid.dotted_string:
        return attribute.rfc4514_string()
    pair = x509.Name([attribute]).public_bytes()
    for _ in range(3):  # the name, its RDN, the attribute
        pair = pair[_der_header(pair) :]
    value = pair[_der_header(pair) + pair[1] :]  # behind the OID, whose length fits into one byte
    return f"{attribute.oid.dotted_string}=#{value.hex()}"


def _der_header(der: bytes) -> int:
    """Return the number of bytes of tag and length."""
    return 2 if der[1] < 0x80 else 2 + (der[1] & 0x7F)  # noqa: PLR2004 -- the bit for a long length


def _alternative_names(
    kind: type[x509.DNSName | x509.UniformResourceIdentifier | x509.RFC822Name],
) -> Callable[[x509.Certificate], list[str]]:
    def names(certificate: x509.Certificate) -> list[str]:
        try:
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return []
        return found.value.get_values_for_type(kind)

    return names


_SOURCES: dict[str, Callable[[x509.Certificate], list[str]]] = {
    "CN": _common_names,
    "DN": _distinguished_name,
    "SAN:URI": _alternative_names(x509.UniformResourceIdentifier),
    "SAN:DNS": _alternative_names(x509.DNSName),
    "SAN:EMAIL": _alternative_names(x509.RFC822Name),
}
