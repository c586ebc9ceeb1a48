"""Methods ``SCRAM-SHA-256`` and ``SCRAM-SHA-512`` (RFC 5802, RFC 7677), on the library ``scramp``.

A client proves in two rounds that it knows its password, and the server that it knows the user; the server's proof goes
out with the round that completes. The exchange does not tell whether a user exists: an unknown user has the iterations
of a user of the file (auth.stand_ins) and a salt, the same in every worker and replica, and is denied where a wrong
password is. Channel binding is not supported, and no client acts for another user (an ``authzid`` is denied).
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from secrets import token_bytes

from scramp import ScramException, ScramMechanism  # type: ignore[import-untyped]
from scramp.utils import ServerError, saslprep  # type: ignore[import-untyped]

from auth.stand_ins import StandIns
from auth.state import AuthenticationDenied, AuthState, ClientContext, Identified, Identity, is_fit_for_a_role
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.common.reloading_file import ReloadingFile
from proxy.config.types import ScramAuthentication

KEY = "authentication.scram.file"
DIGEST_BYTES = {"SCRAM-SHA-256": hashlib.sha256().digest_size, "SCRAM-SHA-512": hashlib.sha512().digest_size}
"""The mechanisms, with the length of their keys."""

DATA_BYTES_MAX = 1024
"""One message of a client; the longest steps in judging it take time that grows with it."""

USER_BYTES_MAX = 256
ITERATIONS_MIN = 4096  # RFC 7677, section 4
ITERATIONS_MAX = 10_000_000  # scramp's
ITERATIONS_DEFAULT = 10_000
SALT_BYTES_MIN = 12  # scramp's
SALT_BYTES_MAX = 64

_BASE64 = r"[A-Za-z0-9+/]+={0,2}"
_LINE = re.compile(
    r"(?P<user>.+):(?P<mechanism>SCRAM-SHA-(?:256|512))\$(?P<iterations>[1-9][0-9]{0,7}):"
    rf"(?P<salt>{_BASE64})\$(?P<stored_key>{_BASE64}):(?P<server_key>{_BASE64})"
)
_REASONS = {
    ServerError.CHANNEL_BINDING_NOT_SUPPORTED: "channel_binding",
    ServerError.UNSUPPORTED_CHANNEL_BINDING_TYPE: "channel_binding",
    ServerError.CHANNEL_BINDINGS_DONT_MATCH: "channel_binding",
    ServerError.INVALID_PROOF: "bad_password",
}


@dataclass(frozen=True, slots=True)
class Credential:
    """What a server knows of a user's password (RFC 5802, section 3)."""

    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """What a client sees of it beside the salt itself: iterations, and the salt's length in bytes."""
        return self.iterations, len(self.salt)


class Users:
    """Users of one mechanism, and the stand-ins for unknown ones."""

    def __init__(self, mechanism: str, found: "_Found") -> None:
        """``found``: all credentials of the file. Unknown users follow those of the mechanism, or of all if it has
        none.
        """
        self._mechanism = mechanism
        self._credentials = {user: one for (kind, user), one in found.items() if kind == mechanism}
        secrets: dict[str, bytes] = {}
        for (_, user), one in found.items():  # of both mechanisms: a name follows the same user with either
            secrets[user] = secrets.get(user, user.encode()) + one.server_key  # two lines may have the same keys
        followed = [(user, one) for (kind, user), one in found.items() if kind == mechanism or not self._credentials]
        self._stand_ins = StandIns((one, one.shape, secrets[user]) for user, one in followed)
        self._stand_in_key = token_bytes(DIGEST_BYTES[mechanism])

    def find(self, user: str) -> tuple[Credential, bool]:
        """Return a user's credential, and True if there is such a user. Takes the same steps for unknown users."""
        followed, key = self._stand_ins.choose(user)
        salt = hmac.digest(key, f"{self._mechanism}, salt of {user}".encode(), "sha512")[: len(followed.salt)]
        mock = Credential(followed.iterations, salt, self._stand_in_key, self._stand_in_key)
        return self._credentials.get(user, mock), user in self._credentials


def scram_providers(config: ScramAuthentication) -> Iterator["ScramProvider"]:
    """Make a provider for each mechanism, on one file. Raises ConfigError."""
    users = ReloadingFile(KEY, [config.file], lambda: _read(config.file))
    for mechanism in DIGEST_BYTES:
        yield ScramProvider(mechanism, users)


class ScramProvider:
    """The role is the user, as SASLprep (RFC 4013) writes it."""

    def __init__(self, mechanism: str, users: ReloadingFile[Mapping[str, Users]]) -> None:
        self.method = mechanism
        self._users = users

    def new_auth_state(self, client: ClientContext) -> AuthState:  # noqa: ARG002 -- the interface's
        """Make a state for one client."""
        return ScramAuthState(self.method, self._users)


class ScramAuthState(Identified):
    """Takes client-first-message, then client-final-message (RFC 5802, section 7); gives the server's in answer."""

    def __init__(self, mechanism: str, users: ReloadingFile[Mapping[str, Users]]) -> None:
        self._mechanism = mechanism
        self._watched = users
        self._server = ScramMechanism(mechanism).make_server(self._look_up)
        self._rounds = 0
        self._users: Users | None = None
        self._user = ""
        self._is_known = False

    @eager
    async def authenticate(self, data: bytes) -> bytes | None:
        """Judge one message; returns the server's in answer to it."""
        self._rounds += 1
        if self._rounds > 2:  # noqa: PLR2004 -- first and final
            raise AuthenticationDenied("unexpected_round", "data after the client's final message")
        if self._rounds == 1:
            self._users = (await self._watched.current_value())[self._mechanism]
        text = _text(data)
        try:
            return (self._first(text) if self._rounds == 1 else self._final(text)).encode()
        except ScramException as error:
            raise self._denial(error) from None

    def _first(self, message: str) -> str:
        self._server.set_client_first(message)
        return str(self._server.get_server_first())

    def _final(self, message: str) -> str:
        self._server.set_client_final(message)
        if not self._is_known:  # whatever proof it was
            raise ScramException("a proof of no user's password", ServerError.INVALID_PROOF)
        self._identity = Identity(self._user)
        return str(self._server.get_server_final())

    def _look_up(self, user: str) -> tuple[bytes, bytes, bytes, int]:
        """Return what scramp needs once it knows the user's name."""
        assert self._users is not None
        found, self._is_known = self._users.find(user)
        self._user = user
        return found.salt, found.stored_key, found.server_key, found.iterations

    def _denial(self, error: ScramException) -> AuthenticationDenied:
        reason = _REASONS.get(error.server_error, "malformed")
        if reason != "bad_password":
            return AuthenticationDenied(reason, str(error)[:200])
        if not self._is_known:
            return AuthenticationDenied("unknown_user", "a user that is not in the file")
        return AuthenticationDenied(reason, f"user {self._user!r}")


def _text(data: bytes) -> str:
    if not data:
        raise AuthenticationDenied("missing", "no message")
    if len(data) > DATA_BYTES_MAX:
        raise AuthenticationDenied("malformed", f"a message of {len(data)} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise AuthenticationDenied("malformed", "not UTF-8") from None


# ---- the file

_Found = dict[tuple[str, str], Credential]
"""By mechanism and user, in the file's order."""


def credential_line(user: str, password: str, mechanism: str, iterations: int = ITERATIONS_DEFAULT) -> str:
    """Return a line for the file, with a new salt; raise ValueError, with a text that holds nothing of the password."""
    if not password:
        raise ValueError("the password is empty")
    _check_iterations(iterations)
    try:
        salt, stored_key, server_key, _ = ScramMechanism(mechanism).make_auth_info(password, iterations)
    except ScramException:
        raise ValueError("the password has characters that SASLprep (RFC 4013) forbids") from None
    salt_text, stored_text, server_text = (base64.b64encode(key).decode() for key in (salt, stored_key, server_key))
    line = f"{user}:{mechanism}${iterations}:{salt_text}${stored_text}:{server_text}"
    if _is_comment(line) or _parsed(line)[0] != user:
        raise ValueError("not a user's name, or not as SASLprep (RFC 4013) writes it")
    return line


def _read(file: str) -> Mapping[str, Users]:
    """Read the users of each mechanism. Raises OSError, and ConfigError, which names lines but not their keys."""
    found: _Found = {}
    for number, line in enumerate(read_file(file).splitlines(), 1):
        try:
            _add(found, line)
        except ValueError as error:
            raise ConfigError(f"{KEY}: {file}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"{KEY}: {file} names no user")
    return {mechanism: Users(mechanism, found) for mechanism in DIGEST_BYTES}


def _add(found: _Found, line: bytes) -> None:
    """Add a line's user; raises ValueError with a text that holds nothing of the line."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if _is_comment(text):
        return
    user, mechanism, credential = _parsed(text)
    if (mechanism, user) in found:
        raise ValueError("a user who has a line before, for the same mechanism")
    found[mechanism, user] = credential


def _is_comment(line: str) -> bool:
    return not line.strip() or line.startswith("#")


def _parsed(line: str) -> tuple[str, str, Credential]:
    """User, mechanism and credential of a line; raises ValueError with a text that holds nothing of the line."""
    parts = _LINE.fullmatch(line)
    if parts is None:
        raise ValueError("not user:SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey, or with SCRAM-SHA-512")
    mechanism, iterations = parts["mechanism"], int(parts["iterations"])
    try:
        salt, stored_key, server_key = (
            base64.b64decode(parts[name], validate=True) for name in ("salt", "stored_key", "server_key")
        )
    except binascii.Error:
        raise ValueError("not base64") from None
    _check_iterations(iterations)
    if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
        raise ValueError(f"a salt of fewer than {SALT_BYTES_MIN} bytes, or of more than {SALT_BYTES_MAX}")
    if not len(stored_key) == len(server_key) == DIGEST_BYTES[mechanism]:
        raise ValueError(f"keys that are not of {DIGEST_BYTES[mechanism]} bytes")
    return _user(parts["user"]), mechanism, Credential(iterations, salt, stored_key, server_key)


def _check_iterations(iterations: int) -> None:
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ValueError(f"fewer than {ITERATIONS_MIN} iterations, or more than {ITERATIONS_MAX}")


def _user(text: str) -> str:
    try:
        user = str(saslprep(text))
    except ScramException:
        raise ValueError("a user's name with characters that SASLprep (RFC 4013) forbids") from None
    if not is_fit_for_a_role(user) or len(user.encode()) > USER_BYTES_MAX:
        raise ValueError(f"a user's name that is empty, not printable, or longer than {USER_BYTES_MAX} bytes")
    return user
