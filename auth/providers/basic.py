"""Method ``basic``: user and password against a file of htpasswd's, as Pulsar's AuthenticationProviderBasic takes them.

What a client can see, time included, does not tell whether a user exists: an unknown user's password is checked, too,
against the hash of a user of the file (auth.stand_ins). So unknown names cost as much as the file's users do, each its
own cost at all times. One cost for all would be the largest, and strangers could have it computed by any name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from passlib.hash import (  # type: ignore[import-untyped]
    apr_md5_crypt,
    bcrypt,
    des_crypt,
    md5_crypt,
    sha256_crypt,
    sha512_crypt,
)

from auth.check_queue import CheckQueue
from auth.stand_ins import StandIns
from auth.state import AuthenticationDenied, AuthenticationProvider, ClientContext, Identity, is_fit_for_a_role
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.common.reloading_file import ReloadingFile
from proxy.config.types import BasicAuthentication

KEY = "authentication.basic.file"
DATA_BYTES_MAX = 1024
"""User and password together. The cost of some hashes grows with the password's length, and that is a stranger's."""

BCRYPT_PASSWORD_BYTES_MAX = 72

_FORMS: tuple[tuple[re.Pattern[str], Any], ...] = (
    # The sets in the end: what bcrypt's base64 leaves over is zero, or passlib warns at each check.
    (re.compile(r"\$2[aby]\$\d\d\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{30}[.CGKOSWaeimquy26]"), bcrypt),
    (re.compile(r"\$apr1\$.+"), apr_md5_crypt),
    (re.compile(r"\$1\$.+"), md5_crypt),
    (re.compile(r"\$5\$.+"), sha256_crypt),
    (re.compile(r"\$6\$.+"), sha512_crypt),
    (re.compile(r"[./A-Za-z0-9]{13}"), des_crypt),
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One user's hash, and passlib's handler of its scheme."""

    handler: Any
    rounds: int
    hash: str = field(repr=False)

    def matches(self, password: bytes) -> bool:
        """Return True if this is the password; takes tens of milliseconds of CPU time, or more."""
        if self.handler is bcrypt:
            # All there is to bcrypt, and what htpasswd takes; the library below raises for more.
            password = password[:BCRYPT_PASSWORD_BYTES_MAX]
        return bool(self.handler.verify(password, self.hash))


@dataclass(frozen=True, slots=True)
class _Users:
    """Users of the file. ``stand_ins``: those against whose hashes unknown users' passwords are checked."""

    entries: Mapping[str, _Entry]
    stand_ins: StandIns[_Entry]


class BasicProvider(AuthenticationProvider):
    """The role is the user. Passwords are checked in threads, as many at a time as the configuration allows."""

    method = "basic"

    def __init__(self, config: BasicAuthentication) -> None:
        # Its first use sets it up, which threads must not do at one time.
        bcrypt.set_backend()
        self._users = ReloadingFile(KEY, [config.file], lambda: _read(config.file))
        self._checks = CheckQueue(slots=config.threads_max, key="authentication.basic.threads_max")
        self._threads = trio.CapacityLimiter(config.threads_max)

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        """Judge ``user:password``."""
        user, password = _user_and_password(data)
        users = await self._users.current_value()
        proved_user = user if self._checks.matches_recent_proof(user, password) else ""
        check = partial(self._check, users, user, password)
        identity = await self._checks.run_check(client, check, proved_user=proved_user)
        self._checks.remember_login(client)
        return identity

    async def _check(self, users: _Users, user: str, password: bytes) -> Identity:
        entry = users.entries.get(user)
        stand_in = users.stand_ins.choose(user).entry  # for users who exist, too: the same steps
        checked = entry or stand_in
        matches = await trio.to_thread.run_sync(checked.matches, password, limiter=self._threads)
        if entry is not None and matches:
            self._checks.remember_proof(user, password)
            return Identity(user)
        self._checks.forget_proof(user, password)
        if entry is None:
            # Not by name: a user may have typed the password first.
            raise AuthenticationDenied("unknown_user", "a user that is not in the file")
        raise AuthenticationDenied("bad_password", f"user {user!r}")


def _user_and_password(data: bytes) -> tuple[str, bytes]:
    if not data:
        raise AuthenticationDenied("missing", "no user and password")
    if len(data) > DATA_BYTES_MAX:
        raise AuthenticationDenied("malformed", f"user and password of {len(data)} bytes")
    user, _, password = data.partition(b":")
    if not user or not password or b"\0" in password:  # passlib takes no NUL
        raise AuthenticationDenied("malformed", "not user:password")
    try:
        password.decode()
        return user.decode(), password
    except UnicodeDecodeError:
        raise AuthenticationDenied("malformed", "not UTF-8") from None


# ---- the file


def _read(file: str) -> _Users:
    """Read the users in a file. Raises ConfigError, which names lines but not their hashes, and OSError."""
    entries: dict[str, _Entry] = {}
    for number, line in enumerate(read_file(file).splitlines(), 1):
        try:
            _add(entries, line)
        except ValueError as error:
            raise ConfigError(f"{KEY}: {file}, line {number}: {error}") from None
    if not entries:
        raise ConfigError(f"{KEY}: {file} names no user")
    # Two users may have one hash, so a user's secret has the name.
    secrets = ((entry, _cost(entry), f"{user}:{entry.hash}".encode()) for user, entry in entries.items())
    return _Users(entries, StandIns(secrets))


def _cost(entry: _Entry) -> tuple[str, int]:
    return entry.handler.name, entry.rounds


def _add(entries: dict[str, _Entry], line: bytes) -> None:
    """Add a line's user; raises ValueError with a text that holds nothing of the line."""
    if not line.strip() or line.startswith(b"#"):
        return
    try:
        user, colon, rest = line.decode().partition(":")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if not colon or not is_fit_for_a_role(user):
        raise ValueError("not user:hash, or not a user's name")
    if user in entries:
        raise ValueError("a user who has a line before")
    entries[user] = _entry(rest.strip())


def _entry(hashed: str) -> _Entry:
    for pattern, handler in _FORMS:
        if pattern.fullmatch(hashed):
            return _Entry(handler, _rounds(handler, hashed), hashed)
    raise ValueError("not a hash of bcrypt, apr1, or crypt with SHA-512, SHA-256, MD5 or DES")


def _rounds(handler: Any, hashed: str) -> int:
    """How often a scheme's function is applied, of those that have a number for it; 0 for others."""
    try:
        parsed = handler.from_string(hashed)
    except ValueError:
        parsed = None
    if parsed is None or parsed.checksum is None:
        raise ValueError(f"not a whole hash of {handler.name}")
    return int(getattr(parsed, "rounds", 0))
