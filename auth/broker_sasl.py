"""The proxy's own Kerberos credentials towards brokers: SASL's GSSAPI mechanism (RFC 4752), the client's side.

One cache in memory holds the tickets for all connections, so that the KDC is asked once for each broker and ticket's
lifetime; the library renews a ticket when half of its lifetime is over. It reads the keytab then, so a replaced one is
used from then on.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

import trio

from auth.gss import NO_LAYER, Keytab, context_end_unix_ms, error_text, gssapi, principal_name, run_in_thread
from auth.state import BrokerAuthState, CredentialsUnavailable
from proto.commands import AUTH_REFRESH
from proxy.common.errors import ConfigError
from proxy.config.types import BrokerCredentials

TIMEOUT_S = 4.0
"""Less than CREDENTIALS_TIMEOUT_S (proxy/runtime/network/credentials.py), so that the reason is told."""

THREADS_PER_BROKER_MAX = 4
CHALLENGE_BYTES_MAX = 64 * 1024

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,255}")
_caches = count(1)


class SaslCredentials:
    """The initiator for ``<broker_service>/<broker's host>@<realm of principal>``, the host as it is dialled.

    Where the KDC does not answer, a call of the library's can keep its thread for a minute. Each broker has a few
    threads of its own, so that one without a ticket takes nothing from those that have tickets.
    """

    method = "sasl"

    def __init__(self, config: BrokerCredentials) -> None:
        self._realm = config.principal.rpartition("@")[2]
        if "@" not in config.principal or not self._realm:
            raise ConfigError(f"brokers.credentials.principal: {config.principal} has no realm")
        self._keytab = Keytab("brokers.credentials.file", config.principal, config.file)
        self._config = config
        self._cache = f"MEMORY:pulsar-trio-proxy-{next(_caches)}"
        # A limiter exists for as long as a caller or a thread uses it, an abandoned thread included.
        self._limiters: WeakValueDictionary[str, trio.CapacityLimiter] = WeakValueDictionary()

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:
        """Make a state for one handshake."""
        limiter = self._limiters.get(broker_host)
        if limiter is None:
            limiter = self._limiters[broker_host] = trio.CapacityLimiter(THREADS_PER_BROKER_MAX)
        return _SaslBrokerAuthState(self, broker_host, limiter)

    async def new_initiator(self, broker_host: str) -> "_Initiator":
        """Start an exchange with a broker; raise CredentialsUnavailable for a host that cannot be in a principal."""
        # "@", "/" and "\" have a meaning in principals: another realm's server must not be asked for.
        if not _HOST.fullmatch(broker_host):
            raise CredentialsUnavailable(f"no principal can be made of the broker's host {broker_host[:255]!r}")
        broker = f"{self._config.broker_service}/{broker_host}@{self._realm}"
        await self._keytab.refresh()
        return _Initiator(self._config.principal, self._keytab, self._cache, broker)


class _SaslBrokerAuthState:
    """State of one handshake with one broker; its exchange may start again any number of times."""

    def __init__(self, credentials: SaslCredentials, broker_host: str, limiter: trio.CapacityLimiter) -> None:
        self._credentials = credentials
        self._broker_host = broker_host
        self._limiter = limiter
        # None while a round is under way and once it has failed: no other round meets a thread that was left behind.
        self._initiator: _Initiator | None = None

    async def authenticate(self, challenge: bytes | None) -> bytes:
        """Return the ticket for CONNECT and for a refresh, the choice for the broker's offer."""
        initiator, self._initiator = self._initiator, None
        if challenge is None or (initiator is not None and initiator.complete and challenge == AUTH_REFRESH):
            initiator, challenge = await self._credentials.new_initiator(self._broker_host), None
        if initiator is None:
            raise CredentialsUnavailable("the exchange with the broker has failed before")
        try:
            answer = await run_in_thread(partial(initiator.next_message, challenge), self._limiter, timeout_s=TIMEOUT_S)
        except trio.TooSlowError:
            text = f"Kerberos has not answered for {initiator.broker} within {TIMEOUT_S:g} s: is the KDC up?"
            raise CredentialsUnavailable(text) from None
        self._initiator = initiator
        return answer

    def is_complete(self) -> bool:
        """Return True if the broker has shown that it has its key, and the proxy owes nothing more."""
        return self._initiator is not None and self._initiator.complete

    @property
    def expires_at_unix_ms(self) -> int:
        """The end of the ticket for this broker."""
        return 0 if self._initiator is None else self._initiator.expires_at_unix_ms


class _Initiator:
    """The client's side of RFC 4752, section 3.1. ``step`` blocks: it may ask the KDC."""

    def __init__(self, principal: str, keytab: Keytab, cache: str, broker: str) -> None:
        self.broker = broker
        self.complete = False
        self.expires_at_unix_ms = 0
        """When the ticket ends; 0: never, or there is none yet."""
        self._principal = principal
        self._store: dict[str | bytes, str | bytes] = {"client_keytab": f"FILE:{keytab.path}", "ccache": cache}
        self._keytab = keytab  # as long as its path is used
        self._context: gssapi.SecurityContext | None = None

    def next_message(self, challenge: bytes | None) -> bytes:
        """Return the ticket first, then the choice. Raises CredentialsUnavailable."""
        if self._context is None:
            return self._ticket_message()
        if self.complete:
            raise CredentialsUnavailable(f"{self.broker} asks for more after the end of the exchange")
        return self._choice_message(self._context, challenge or b"")

    def _ticket_message(self) -> bytes:
        with _unavailable(f"no ticket for {self.broker}"):
            credentials = gssapi.Credentials(name=principal_name(self._principal), usage="initiate", store=self._store)
            flags = gssapi.RequirementFlag
            self._context = gssapi.SecurityContext(
                name=principal_name(self.broker),
                creds=credentials,
                usage="initiate",
                mech=gssapi.MechType.kerberos,
                # Not mutual_authentication: the offer proves the broker's key as well, and a round less does. Nor is
                # anything delegated.
                flags=flags.integrity | flags.replay_detection | flags.out_of_sequence_detection,
            )
            ticket: bytes | None = self._context.step(None)
            if not self._context.complete or not ticket:
                raise CredentialsUnavailable(f"no ticket for {self.broker}: one token is not enough")
            self.expires_at_unix_ms = context_end_unix_ms(self._context) or 0
        return ticket

    def _choice_message(self, context: gssapi.SecurityContext, challenge: bytes) -> bytes:
        if len(challenge) > CHALLENGE_BYTES_MAX:
            raise CredentialsUnavailable(f"{self.broker} sent a challenge of {len(challenge)} bytes")
        with _unavailable(f"{self.broker} has not proved its key"):
            offer: bytes = context.unwrap(challenge).message
            if len(offer) != len(NO_LAYER) or not offer[0] & NO_LAYER[0]:
                raise CredentialsUnavailable(f"{self.broker} does not offer to do without a security layer")
            choice: bytes = context.wrap(NO_LAYER + self._principal.encode(), False).message
        self.complete = True
        return choice


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except CredentialsUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 -- the library's own errors, and Python's for what a broker sends
        raise CredentialsUnavailable(f"{what}: {error_text(error)}") from None
