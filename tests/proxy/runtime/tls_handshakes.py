"""TLS handshakes in memory, as a listener and a client have them."""

from __future__ import annotations

import ssl
from typing import Any

from e2e.lab.certificates import Pair

from proxy.config.types import ListenerTls
from proxy.runtime.network import tls
from proxy.runtime.network.tls import continue_handshake, listener_contexts
from proxy.runtime.network.tls_session import TlsSession

TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


def front_context(pair: Pair, **more: Any) -> ssl.SSLContext:
    """The context in which a listener begins a handshake."""
    config = ListenerTls(certificate=pair.certificate, key=pair.key, **more)
    return tls._front(listener_contexts("listener[0].tls", config).value)


def shake_hands(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    host: str | None = "localhost",
    session: ssl.SSLSession | None = None,
) -> tuple[TlsSession, TlsSession]:
    """Server and client after a handshake; raises the TlsFailed of the one that refused the other first.

    ``session``: which the client wants to resume.
    """
    ours, theirs = TlsSession(server, server_side=True), TlsSession(client, server_side=False, host=host)
    if session is not None:
        theirs._tls.session = session
    is_done = False
    while not is_done:
        theirs_done = continue_handshake(theirs, ours.take_outgoing())
        is_done = continue_handshake(ours, theirs.take_outgoing()) and theirs_done
    return ours, theirs
