"""When certificates and CRLs end, as operators are told in time."""

import datetime as dt
import re
from collections.abc import Iterable, Iterator

from cryptography.x509 import load_pem_x509_certificates, load_pem_x509_crl

from proxy.common.files import read_file

CRL_PATTERN = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
CRL_KEY = ".client_crl"
"""What keys of CRLs end in."""
CRL_WARNING_S = 7 * 86400.0
"""How long before a CRL expires operators are warned."""


def read_ends(files: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return for each pair of a configuration key and a file (PEM) when the first certificate or CRL in it ends, in
    seconds since 1970; nothing for an empty name, and for what cannot be read here, though OpenSSL may use it.
    """
    ends = {}
    for key, file in files:
        try:
            found = [end.timestamp() for end in _ends(read_file(file))] if file else []
        except Exception:  # noqa: BLE001, S112 -- a parser may raise anything, and a worker must not end by it
            continue
        if found:
            ends[key] = min(found)
    return ends


def crl_warning(end_unix_s: float, now_unix_s: float) -> str:
    """Return what is to be logged of a CRL's end; empty: it is far away."""
    if end_unix_s - now_unix_s >= CRL_WARNING_S:
        return ""
    if end_unix_s > now_unix_s:
        return "a CRL expires soon"
    return "a CRL has expired: all its issuer's clients are refused"


def _ends(pem: bytes) -> Iterator[dt.datetime]:
    """Yield the ends of a file's certificates and CRLs; a CRL need not have one."""
    if b"-----BEGIN CERTIFICATE-----" in pem:
        yield from (certificate.not_valid_after_utc for certificate in load_pem_x509_certificates(pem))
    ends = (load_pem_x509_crl(crl).next_update_utc for crl in CRL_PATTERN.findall(pem))
    yield from (end for end in ends if end is not None)
