"""Method ``sasl``: Kerberos by SASL's GSSAPI mechanism (RFC 4752), as Pulsar's AuthenticationProviderSasl takes it.

Rounds: the client's ticket → (where the client asks for it: the server's proof → nothing) → the server's offer of
security layers, which is "none" → the client's choice and its authorization identity. The offer and the choice are
signed with the ticket's session key; so a recorded ticket alone gets no further than the offer. Kerberos' replay cache
denies it earlier: it is a file of the user's, so all workers on one machine share it.

A replaced keytab is used from the next exchange on.
"""

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import trio

from auth.check_queue import CheckQueue
from auth.gss import (
    NO_LAYER,
    Keytab,
    acceptor_credentials,
    context_end_unix_ms,
    error_text,
    gssapi,
    run_in_thread,
)
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identified, Identity
from proxy.config.types import SaslAuthentication

ROUND_TIMEOUT_S = 10.0
TICKET_BYTES_MAX = 64 * 1024  # a Windows domain's tickets, with all groups of a user, have up to 48,000
CHOICE_BYTES_MAX = 4 * 1024

_ANONYMOUS = "WELLKNOWN/ANONYMOUS@"  # RFC 8062: a ticket that any client can have, in whichever realm

_REASONS = {
    2529638944: "expired",  # KRB_AP_ERR_TKT_EXPIRED
    2529638946: "replayed",  # KRB_AP_ERR_REPEAT
    2529638949: "clock_skew",  # KRB_AP_ERR_SKEW
}
"""Minor status (RFC 4120, section 7.5.9, as MIT's and Heimdal's libraries number it) → reason."""


class SaslProvider:
    """Makes a state for each client. The library's calls run in threads, of which there are ``threads_max``."""

    method = "sasl"

    def __init__(self, config: SaslAuthentication) -> None:
        self._keytab = Keytab("authentication.sasl.keytab", config.principal, config.keytab)
        self._config = config
        self._allowed = re.compile(config.allowed_principals)
        self._checks = CheckQueue(slots=config.threads_max, key="authentication.sasl.threads_max")
        self._threads = trio.CapacityLimiter(config.threads_max)

    def new_auth_state(self, client: ClientContext) -> AuthState:
        """Make a state for one client."""
        acceptor = _Acceptor(self._config, self._keytab, self._allowed)
        client = ClientContext(client.address)  # a certificate would be kept from round to round, in vain
        return _SaslAuthState(acceptor, client, self._checks, self._threads)


class _SaslAuthState(Identified):
    """State of one exchange: each round runs in a thread, round robin between client addresses, by a deadline."""

    def __init__(
        self, acceptor: "_Acceptor", client: ClientContext, checks: CheckQueue, threads: trio.CapacityLimiter
    ) -> None:
        # None while a round is under way and once it has failed: no other round meets a thread that was left behind.
        self._acceptor: _Acceptor | None = acceptor
        self._client = client
        self._checks = checks
        self._threads = threads

    async def authenticate(self, data: bytes) -> bytes | None:
        """Take one round's data."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is None:
            raise AuthenticationDenied("unexpected_round", "data after the exchange was over")
        await acceptor.keytab.refresh()
        # A thread that is left behind gives its place in line back, but goes on to count among the threads.
        step = partial(run_in_thread, partial(acceptor.step, data), self._threads, timeout_s=ROUND_TIMEOUT_S)
        try:
            with trio.fail_after(ROUND_TIMEOUT_S):
                challenge = await self._checks.run_check(self._client, step)
        except trio.TooSlowError:
            raise AuthenticationDenied("timeout", f"not judged within {ROUND_TIMEOUT_S:g} s") from None
        if challenge is None:
            self._identity = acceptor.identity
            self._checks.remember_login(self._client)
        else:
            self._acceptor = acceptor
        return challenge


class _Awaited(enum.Enum):
    """What the client has to send next."""

    TICKET = "its ticket"
    NOTHING = "an empty answer to the server's proof"
    CHOICE = "its choice of a security layer"


class _Acceptor:
    """The server's side of RFC 4752, section 3.2. ``step`` blocks (keytab, cache of replays)."""

    def __init__(self, config: SaslAuthentication, keytab: Keytab, allowed: re.Pattern[str]) -> None:
        self.keytab = keytab
        self._config = config
        self._allowed = allowed
        self._awaited = _Awaited.TICKET
        self._context: gssapi.SecurityContext
        self.identity = Identity("")

    def step(self, data: bytes) -> bytes | None:
        """Take the client's data. Returns the challenge, or None when complete; raises AuthenticationDenied."""
        if self._awaited is _Awaited.TICKET:
            return self._take_ticket(data)
        if self._awaited is _Awaited.CHOICE:
            self._take_choice(data)
            return None
        if data:
            raise AuthenticationDenied("malformed", "data in answer to the server's proof")
        return self._offer()

    def _take_ticket(self, token: bytes) -> bytes:
        if not token:
            raise AuthenticationDenied("missing", "no ticket")
        if len(token) > TICKET_BYTES_MAX:
            raise AuthenticationDenied("malformed", f"a ticket of {len(token)} bytes")
        with _denying("bad_keytab"):
            credentials = acceptor_credentials(self._config.principal, self.keytab.path)
        with _denying("bad_ticket"):
            self._context = gssapi.SecurityContext(creds=credentials, usage="accept")
            proof: bytes | None = self._context.step(token)
            if not self._context.complete:  # raises here what step() has kept back to have a token sent first
                raise AuthenticationDenied("bad_ticket", "one token of the client's is not enough: DCE's dialect")
            self.identity = self._identity()
        self._check_principal(self.identity.role)
        if not proof:
            return self._offer()
        self._awaited = _Awaited.NOTHING
        return proof

    def _identity(self) -> Identity:
        """Return the client's principal, and its ticket's end, the clocks' allowed skew included, as the library
        reckons.
        """
        expires_at_unix_ms = context_end_unix_ms(self._context)
        return Identity(str(self._context.initiator_name), expires_at_unix_ms)

    def _check_principal(self, principal: str) -> None:
        if principal.startswith(_ANONYMOUS):
            raise AuthenticationDenied("not_allowed", "an anonymous ticket")
        # Before the client has answered anything: it takes an error for the last word then, and retries later.
        if not self._allowed.fullmatch(principal):
            raise AuthenticationDenied("not_allowed", f"{principal[:200]!r} does not match allowed_principals")

    def _offer(self) -> bytes:
        self._awaited = _Awaited.CHOICE
        with _denying("bad_ticket"):
            offer: bytes = self._context.wrap(NO_LAYER, False).message
        return offer

    def _take_choice(self, token: bytes) -> None:
        if len(token) > CHOICE_BYTES_MAX:
            raise AuthenticationDenied("malformed", f"a choice of {len(token)} bytes")
        with _denying("bad_layer"):
            choice: bytes = self._context.unwrap(token).message
        layer, authorization_identity = choice[: len(NO_LAYER)], choice[len(NO_LAYER) :]
        if layer != NO_LAYER:
            raise AuthenticationDenied("bad_layer", f"chose {layer.hex()} where only {NO_LAYER.hex()} was offered")
        if authorization_identity and authorization_identity != self.identity.role.encode():
            text = f"{self.identity.role[:200]!r} wants to be {authorization_identity[:200]!r}"
            raise AuthenticationDenied("bad_authzid", text)


@contextmanager
def _denying(reason: str) -> Iterator[None]:
    """Deny the client whatever its bytes break in the library; the library's text goes to the log."""
    try:
        yield
    except AuthenticationDenied:
        raise
    except gssapi.raw.exceptions.InvalidTokenError as error:
        raise AuthenticationDenied("malformed", error_text(error)) from None
    except gssapi.raw.misc.GSSError as error:
        raise AuthenticationDenied(_REASONS.get(error.min_code & 0xFFFFFFFF, reason), error_text(error)) from None
    except Exception as error:  # noqa: BLE001 -- see above
        raise AuthenticationDenied("malformed", type(error).__name__) from None
