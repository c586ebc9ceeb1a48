"""Versions of what TLS and all else run on: an operator who reads of a vulnerability asks for them."""

import platform
import ssl

PYTHON_VERSION = platform.python_version()

OPENSSL_VERSION = " ".join(ssl.OPENSSL_VERSION.split()[:2])
"""The library of Python's ssl, which serves clients and connects to brokers, without its date: OpenSSL 3.5.4."""
