"""auth.providers.tls: the only name of the configured source in a certificate is the role, until it ends."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Sequence

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from auth.providers.tls import TlsProvider
from auth.registry import ProviderRegistry, configured_providers
from auth.state import AuthenticationDenied, ClientContext, Identity
from proxy.config.types import Authentication, TlsAuthentication

pytestmark = pytest.mark.filterwarnings("ignore:Attribute's length:UserWarning")

ENDS_AT = dt.datetime(2040, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


HOST = (x509.DNSName("admin.example"),)
"""A host name is not a role, by default."""

CN = TlsAuthentication()
DN = TlsAuthentication(identity_source="DN")
URI = TlsAuthentication(identity_source="SAN:URI")
DNS = TlsAuthentication(identity_source="SAN:DNS")
EMAIL = TlsAuthentication(identity_source="SAN:EMAIL")


def attribute(kind: x509.ObjectIdentifier, text: str) -> x509.NameAttribute[str]:
    """An attribute as an authority might sign it, empty or too long."""
    return x509.NameAttribute(kind, text, _validate=False)


def certificate(
    *names: tuple[x509.ObjectIdentifier, str],
    ends_at: dt.datetime = ENDS_AT,
    alternatives: Sequence[x509.GeneralName] = HOST,
    rdns: Sequence[x509.RelativeDistinguishedName] = (),
    further: Sequence[x509.ExtensionType] = (),
) -> bytes:
    """A certificate as a listener hands it on; the listener has verified its signature."""
    subject = x509.Name([*rdns, *(x509.RelativeDistinguishedName([attribute(kind, text)]) for kind, text in names)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(ends_at)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    for extension in further:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def with_uris(*uris: str) -> bytes:
    return certificate(alternatives=[x509.UniformResourceIdentifier(uri) for uri in uris])


async def identity(der: bytes, data: bytes = b"", config: TlsAuthentication = CN) -> Identity:
    state = TlsProvider(config).new_auth_state(ClientContext("192.0.2.1:4000", der))
    assert await state.authenticate(data) is None
    assert state.is_complete()
    assert state.get_auth_role() == state.get_identity().role
    return state.get_identity()


async def denial(der: bytes, data: bytes = b"", config: TlsAuthentication = CN) -> AuthenticationDenied:
    with pytest.raises(AuthenticationDenied) as caught:
        await identity(der, data, config)
    return caught.value


async def role(der: bytes, config: TlsAuthentication) -> str:
    return (await identity(der, config=config)).role


async def reason(der: bytes, config: TlsAuthentication) -> str:
    return (await denial(der, config=config)).reason


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


# ---- names that are no role

HOSTILE = [
    "",
    " ",
    "al\0ice",
    "alice\n",
    "alice\r\nadmin",
    "\x1b[2Jalice",
    "alice\u202ecila",
    "alice\u2028",
    "a" * 1025,
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("config", [CN, DN])
async def test_a_name_in_the_subject_that_is_empty_too_long_or_harmful_in_logs(
    name: str, config: TlsAuthentication
) -> None:
    """The form of RFC 4514 would show NUL as harmless characters: the values themselves are checked."""
    assert await reason(certificate((NameOID.COMMON_NAME, name)), config) == "bad_role"


async def test_a_subject_that_is_too_long_as_a_whole() -> None:
    der = certificate(*[(NameOID.ORGANIZATIONAL_UNIT_NAME, "a" * 60)] * 17)
    assert await reason(der, DN) == "bad_role"


@pytest.mark.parametrize(
    "name", ["", "a\0.example", "a\n", "a" * 64, ".".join(["a" * 60] * 5), "a..b", "*.example", "a b"]
)
async def test_a_host_that_is_no_role(name: str) -> None:
    """Nor is a wildcard: `*` stands for all roles in Pulsar's permissions."""
    assert await reason(certificate(alternatives=[x509.DNSName(name)]), DNS) == "bad_role"


@pytest.mark.parametrize("name", ["", "alice", "a@b@c", "a\0@b", "a\n@b", "a b@c", "@b", "a@"])
async def test_an_email_address_that_is_no_role(name: str) -> None:
    assert await reason(certificate(alternatives=[x509.RFC822Name._init_without_validation(name)]), EMAIL) == "bad_role"


SPIFFE_ID = "spiffe://example.org/ns/payments/sa/alice"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://example.org/alice",
        "SPIFFE://example.org/alice",
        "spiffe://Example.org/alice",
        "spiffe://example.org:8443/alice",
        "spiffe://alice@example.org/alice",
        "spiffe://example.org/alice?role=admin",
        "spiffe://example.org/alice#admin",
        "spiffe:///alice",
        "spiffe://example.org",
        "spiffe://example.org/",
        "spiffe://example.org/alice/",
        "spiffe://example.org//alice",
        "spiffe://example.org/./alice",
        "spiffe://example.org/bob/../alice",
        "spiffe://example.org/al%69ce",
        "spiffe://example.org/alice\n",
        "spiffe://example.org/al\0ice",
        "spiffe://example.org/*",
        f"spiffe://{'a' * 256}/alice",
        f"spiffe://example.org/{'a' * 1024}",
    ],
)
async def test_a_uri_that_is_no_spiffe_id(uri: str) -> None:
    assert await reason(with_uris(uri), URI) == "bad_role"


# ---- sources


@pytest.mark.parametrize("uri", [SPIFFE_ID, "spiffe://a_b-c.1/A.b_c-1/..."])
async def test_a_spiffe_id_is_the_role_without_a_common_name(uri: str) -> None:
    assert await identity(with_uris(uri), config=URI) == Identity(uri, int(ENDS_AT.timestamp()) * 1000)


async def test_a_host_or_an_email_address_is_the_role_as_it_is() -> None:
    names = [x509.DNSName("Alice.example"), x509.RFC822Name("alice@Example.org"), x509.UniformResourceIdentifier("x:y")]
    der = certificate((NameOID.COMMON_NAME, "admin"), alternatives=names)
    assert (await role(der, DNS), await role(der, EMAIL)) == ("Alice.example", "alice@Example.org")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (URI, [x509.UniformResourceIdentifier(SPIFFE_ID), x509.UniformResourceIdentifier(f"{SPIFFE_ID}2")]),
        (URI, [x509.UniformResourceIdentifier(SPIFFE_ID), x509.UniformResourceIdentifier("https://example.org")]),
        (DNS, [x509.DNSName("a.example"), x509.DNSName("b.example")]),
        (EMAIL, [x509.RFC822Name("a@example.org"), x509.RFC822Name("b@example.org")]),
    ],
)
async def test_of_several_names_none_is_taken(config: TlsAuthentication, names: list[x509.GeneralName]) -> None:
    """PIP-485 takes the first; an X509-SVID with a second URI is invalid."""
    assert await reason(certificate(alternatives=names), config) == "several_names"


@pytest.mark.parametrize("config", [URI, DNS, EMAIL, DN])
@pytest.mark.parametrize("alternatives", [(), (x509.RegisteredID(NameOID.COMMON_NAME),)])
async def test_no_name_of_the_source(config: TlsAuthentication, alternatives: Sequence[x509.GeneralName]) -> None:
    """A common name does not stand in for it."""
    names = [] if config is DN else [(NameOID.COMMON_NAME, "admin")]
    assert await reason(certificate(*names, alternatives=alternatives), config) == "no_role"


async def test_alternative_names_that_cannot_be_read() -> None:
    """Twice the extension, bytes that are none, and a name of a kind that the library does not read."""
    oid = x509.SubjectAlternativeName.oid
    party = certificate(alternatives=(), further=[x509.UnrecognizedExtension(oid, b"0\x02\xa5\x00")])
    assert await reason(party, DNS) == "malformed"
    broken = certificate(alternatives=(), further=[x509.UnrecognizedExtension(oid, b"\x30\x05x")])
    assert await reason(broken, DNS) == "malformed"
    other = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.99"), b"0\x03\x82\x01a")
    twice = certificate(further=[other]).replace(b"\x06\x03\x55\x1d\x63", b"\x06\x03\x55\x1d\x11")
    assert await reason(twice, DNS) == "malformed"


@pytest.mark.parametrize("position", range(0, 300, 3))
async def test_a_damaged_certificate_raises_nothing_else(position: int) -> None:
    der = bytearray(certificate((NameOID.COMMON_NAME, "alice"), alternatives=[x509.DNSName("alice.example")]))
    der[position] ^= 0xFF
    for config in (CN, DN, DNS):
        with contextlib.suppress(AuthenticationDenied):
            await identity(bytes(der), config=config)


async def test_the_subject_is_in_the_form_of_rfc_4514() -> None:
    """The last RDN first, with escapes; an attribute without a short name has its OID and its value's DER."""
    both = x509.RelativeDistinguishedName(
        [attribute(NameOID.COMMON_NAME, "a,CN=admin"), attribute(NameOID.USER_ID, "#7 ")]
    )
    der = certificate(
        (NameOID.EMAIL_ADDRESS, "e" * 200),
        rdns=[x509.RelativeDistinguishedName([attribute(NameOID.COUNTRY_NAME, "DE")]), both],
    )
    value = "1681c8" + "65" * 200  # an IA5String, whose length takes two bytes
    assert await role(der, DN) == rf"1.2.840.113549.1.9.1=#{value},CN=a\,CN=admin+UID=\#7\ ,C=DE"


# ---- mapping rules


async def test_rules_make_the_role_of_a_name() -> None:
    rules = (r"RULE:spiffe:\/\/example\.org\/ns\/([^\/]+)\/sa\/([^\/]+)/$1__$2/",)
    config = msgspec.structs.replace(URI, principal_mapping_rules=rules)
    assert await role(with_uris(SPIFFE_ID), config) == "payments__alice"
    assert await reason(with_uris("spiffe://evil.org/ns/payments/sa/alice"), config) == "no_mapping_rule"


@pytest.mark.parametrize("name", HOSTILE)
async def test_patterns_see_no_name_that_is_no_role(name: str) -> None:
    config = msgspec.structs.replace(CN, principal_mapping_rules=(r"RULE:[\s\S]*/alice/",))
    assert await reason(certificate((NameOID.COMMON_NAME, name)), config) == "bad_role"


@pytest.mark.parametrize("rule", ["RULE:.*//", "RULE:(.*)/$1$1/", "RULE:(.*)/$1\n/"])
async def test_a_rule_makes_no_role_that_is_empty_too_long_or_harmful_in_logs(rule: str) -> None:
    config = msgspec.structs.replace(CN, principal_mapping_rules=(rule,))
    assert await reason(certificate((NameOID.COMMON_NAME, "a" * 1000)), config) == "bad_role"
