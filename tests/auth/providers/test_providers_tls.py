"""auth.providers.tls: the one common name of a certificate is the role, until the certificate ends."""

from __future__ import annotations

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from auth.providers.tls import TlsProvider
from auth.registry import ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, ClientContext, Identity
from proxy.config.types import Authentication, TlsAuthentication

ENDS_AT = dt.datetime(2040, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(*names: tuple[x509.ObjectIdentifier, str], ends_at: dt.datetime = ENDS_AT) -> bytes:
    """A certificate as a listener hands it on; the listener has verified its signature."""
    subject = x509.Name([x509.NameAttribute(kind, text) for kind, text in names])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(ends_at)
        # A host name is not a role.
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("admin.example")]), critical=False)
    )
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


async def identity(der: bytes, data: bytes = b"") -> Identity:
    state = TlsProvider(TlsAuthentication()).new_auth_state(ClientContext("192.0.2.1:4000", der))
    assert await state.authenticate(data) is None
    assert state.is_complete()
    assert state.get_auth_role() == state.get_identity().role
    return state.get_identity()


async def denial(der: bytes, data: bytes = b"") -> AuthenticationDenied:
    with pytest.raises(AuthenticationDenied) as caught:
        await identity(der, data)
    return caught.value


@pytest.mark.conforms("pip-1.22")
async def test_the_common_name_is_the_role() -> None:
    der = certificate(
        (NameOID.COUNTRY_NAME, "DE"), (NameOID.ORGANIZATION_NAME, "CN=admin"), (NameOID.COMMON_NAME, "alice")
    )
    assert await identity(der) == Identity("alice", int(ENDS_AT.timestamp()) * 1000)


@pytest.mark.parametrize("name", ["älice, the first", "a=b", "CN=admin", 'quoted "name"', "with\\backslash"])
async def test_a_name_is_taken_as_it_is(name: str) -> None:
    """Not out of the subject's text, where a comma or an equals sign would mean something."""
    assert (await identity(certificate((NameOID.COMMON_NAME, name)))).role == name


async def test_no_certificate() -> None:
    assert (await denial(b"")).reason == "missing"


async def test_auth_data_in_connect_is_ignored_beside_the_certificate() -> None:
    assert (await denial(b"", certificate((NameOID.COMMON_NAME, "admin")))).reason == "missing"
    assert (await identity(certificate((NameOID.COMMON_NAME, "alice")), b"admin")).role == "alice"


async def test_no_common_name() -> None:
    assert (await denial(certificate((NameOID.ORGANIZATION_NAME, "alice")))).reason == "no_role"


async def test_two_common_names() -> None:
    """Java takes one of them; which one, must not decide a client's role."""
    der = certificate((NameOID.COMMON_NAME, "alice"), (NameOID.COMMON_NAME, "admin"))
    assert (await denial(der)).reason == "several_names"


@pytest.mark.parametrize("garbage", [b"x", b"0\x82\x01\x00", certificate((NameOID.COMMON_NAME, "alice"))[:-20]])
async def test_an_invalid_certificate_is_denied_as_malformed(garbage: bytes) -> None:
    assert (await denial(garbage)).reason == "malformed"


@pytest.mark.conforms("kip-368.14")
async def test_an_identity_ends_with_its_certificate() -> None:
    """That it has not ended yet is checked for all methods in one place (auth.service)."""
    past = dt.datetime(2021, 1, 1, tzinfo=dt.UTC)
    found = await identity(certificate((NameOID.COMMON_NAME, "alice"), ends_at=past))
    assert found.expires_at_unix_ms == int(past.timestamp()) * 1000


@pytest.mark.conforms("pip-30.35")
async def test_there_is_one_round() -> None:
    state = TlsProvider(TlsAuthentication()).new_auth_state(
        ClientContext("192.0.2.1:4000", certificate((NameOID.COMMON_NAME, "alice")))
    )
    await state.authenticate(b"")
    with pytest.raises(AuthenticationDenied):
        await state.authenticate(b"")


def test_the_configuration_asks_for_it() -> None:
    registry = ProviderRegistry(Authentication(enabled=True, tls=TlsAuthentication()), configured_providers)
    assert registry.methods == ("tls",)
