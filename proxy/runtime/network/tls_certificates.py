"""Certificates and keys from files, and which of a listener's certificates a client gets: by the name it asks for."""

import contextlib
import ssl
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from proxy.common.errors import ConfigError
from proxy.common.files import path_of_copy, read_file
from proxy.config.types import ListenerTls


@dataclass(frozen=True)
class NamedContexts:
    """The contexts of a listener: one for clients that ask for no name that is known, and others by name.

    Names are in lower case; `*.` in place of the first label stands for any one label.
    """

    default: ssl.SSLContext
    by_name: Mapping[str, ssl.SSLContext]
    groups: tuple[str, ...]

    def for_name(self, name: str | None) -> ssl.SSLContext:
        """Return the context for a name as a client sends it; any text. It chooses a certificate, and nothing else."""
        if not name or not self.by_name:
            return self.default
        name = name.lower().removesuffix(".")
        found = self.by_name.get(name)
        if found is None:
            label, dot, parent = name.partition(".")
            found = self.by_name.get(f"*.{parent}") if label and dot else None
        return found or self.default


def ignore_names_that_are_no_text() -> None:
    """Have Python not report a client's name that is not ASCII: a traceback for each, which strangers could repeat.

    Its ssl decodes the name before a callback gets it. The handshake fails, which is reported by itself.
    """
    report = sys.unraisablehook

    def report_others(found: "sys.UnraisableHookArgs") -> None:
        is_of_name = isinstance(found.object, bytes) or "servername" in (found.err_msg or "")
        if not (found.exc_type is UnicodeDecodeError and is_of_name):
            report(found)

    sys.unraisablehook = report_others


@dataclass(frozen=True)
class Certificate:
    """A certificate of a listener, for clients that ask for one of ``names``. ``table``: the configuration's."""

    table: str
    certificate: str
    key: str
    names: frozenset[str]
    key_type: str


Certificates: TypeAlias = tuple[Certificate, ...]
"""Of keys of different types: a client takes part in the choice by the signatures that it accepts."""


def certificates_by_name(key: str, config: ListenerTls) -> tuple[Certificates, dict[str, Certificates]]:
    """Return the certificates for clients without a name that is known, and those for each name. Raises ConfigError."""
    first = _read_certificate(key, config.certificate, config.key)
    by_name: dict[str, Certificates] = dict.fromkeys(first.names, (first,))
    default: Certificates = (first,)
    for index, further in enumerate(config.certificates):
        one = _read_certificate(f"{key}.certificates[{index}]", further.certificate, further.key)
        if not one.names:
            raise ConfigError(f"{one.table}.certificate: {one.certificate} has no DNS name that a client could ask for")
        for name in sorted(one.names):
            others = by_name.get(name, ())
            for other in others:
                if other.key_type == one.key_type:
                    raise ConfigError(
                        f"{one.table}.certificate: {one.certificate} is for {name} and has a key of type "
                        f"{one.key_type}, as {other.certificate}"
                    )
            by_name[name] = (*others, one)
        if one.names == first.names:
            default = (*default, one)
    return default, by_name


def _read_certificate(table: str, file: str, key: str) -> Certificate:
    with config_errors(f"{table}.certificate", file):
        content = read_file(file)
    try:
        leaf = load_pem_x509_certificates(content)[0]
        key_type = type(leaf.public_key()).__name__.removesuffix("PublicKey")
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        found = []
    except (ValueError, x509.DuplicateExtension, UnsupportedAlgorithm):
        raise ConfigError(
            f"{table}.certificate: {file} holds no certificate in PEM form whose names can be read"
        ) from None
    return Certificate(table, file, key, frozenset(name.lower() for name in found if _is_dns_name(name)), key_type)


def _is_dns_name(name: str) -> bool:
    """Return whether a client's name can match one of a certificate: `*` stands for all of the first label, alone."""
    rest = name.removeprefix("*.")
    return bool(rest) and "*" not in rest


def load_certificate(context: ssl.SSLContext, key: str, certificate: str, private_key: str) -> None:
    """Load a certificate and its key into a context, beside those of other types of key. Raises ConfigError."""

    def no_passphrase() -> str:
        """Refuse in place of OpenSSL's own prompt at the terminal."""
        raise ConfigError(f"{key}.key: {private_key} has a passphrase, which cannot be entered here")

    with config_errors(f"{key}.certificate, {key}.key", f"{certificate}, {private_key}"):
        try:
            with path_of_copy(certificate) as chain, path_of_copy(private_key) as its_key:
                context.load_cert_chain(chain, its_key, password=no_passphrase)
        except ssl.SSLError:
            _raise_for_broken_file(key, certificate, private_key)
            raise


def _raise_for_broken_file(key: str, certificate: str, private_key: str) -> None:
    """Raise ConfigError that names the broken one of two files, if one is; OpenSSL does not say which."""
    try:
        load_pem_x509_certificates(read_file(certificate))
    except ValueError:
        raise ConfigError(f"{key}.certificate: {certificate} holds no certificate in PEM form") from None
    try:
        load_pem_private_key(read_file(private_key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise ConfigError(f"{key}.key: {private_key} holds no private key in PEM form") from None


@contextlib.contextmanager
def config_errors(key: str, files: str) -> Iterator[None]:
    """Turn OpenSSL's errors and OSError into ConfigError that names key and files."""
    try:
        yield
    except ssl.SSLError as error:
        reason = str(error.reason or error).lower().replace("_", " ")
        raise ConfigError(f"{key}: {files}: {reason}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {files}: {error.strerror}") from None
