"""What both sides of Kerberos share: the library, its threads, the words for its errors (RFC 4752, RFC 4121).

Imported only where Kerberos is configured: the library is an extra.
"""

import os
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import trio

from proxy.common.errors import ConfigError
from proxy.common.files import copy_into_memory
from proxy.common.reloading_file import ReloadingFile

try:
    import gssapi as gssapi  # noqa: PLC0414 -- for the modules that import this one
except (ImportError, OSError) as error:  # OSError: Python's half is there, the system's libraries are not
    raise ConfigError(
        "authentication.sasl and method sasl of brokers.credentials: need the package's extra `kerberos` "
        f"(pip install 'pulsar-trio-proxy[kerberos]'): {error}"
    ) from None

NO_LAYER = b"\x01\x00\x00\x00"
"""RFC 4752, section 3.3: the security layer "none", and hence a largest message of no size at all."""

TEXT_CHARACTERS_MAX = 400

_INDEFINITE_S = 2**32 - 1
"""RFC 2744's GSS_C_INDEFINITE."""

ResultT = TypeVar("ResultT")


def principal_name(principal: str) -> gssapi.Name:
    """Make a name of a principal as it is written: no DNS look-up, no realm added but the default one."""
    return gssapi.Name(principal, gssapi.NameType.kerberos_principal)


def acceptor_credentials(principal: str, keytab: str) -> gssapi.Credentials:
    """Return the key of a principal, for the server's side. Reads the keytab; raises GSSError.

    Kerberos alone: with SPNEGO among the mechanisms an empty token would be answered by a hint.
    """
    return gssapi.Credentials(
        name=principal_name(principal),
        usage="accept",
        mechs=[gssapi.MechType.kerberos],
        store={"keytab": f"FILE:{keytab}"},
    )


class Keytab:
    """A keytab's content in memory, where the library can open it; replaced when the file changes.

    ``key``: the configuration's, for errors. Raises ConfigError for a file that cannot be read, or that holds no key of
    ``principal``. The KDC is not asked. The memory is freed with this object, which users of the path keep.
    """

    def __init__(self, key: str, principal: str, file: str) -> None:
        self._file = file
        self._memory = os.memfd_create("keytab", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._memory)
        self.path = f"/proc/self/fd/{self._memory}"
        self._copy = ReloadingFile(key, [file], self._copy_file)
        try:
            acceptor_credentials(principal, self.path)
        except Exception as error:  # noqa: BLE001 -- the library's own, and Python's for names that it cannot encode
            text = error_text(error).replace(self.path, file)
            raise ConfigError(f"{key}: {file} holds no key of {principal}: {text}") from None

    async def refresh(self) -> None:
        """Replace the content if the file has changed; the path stays."""
        await self._copy.current_value()

    def _copy_file(self) -> None:
        copy = copy_into_memory(self._file)
        os.dup2(copy, self._memory, inheritable=False)  # at once: the library may be opening it
        os.close(copy)


def error_text(error: Exception) -> str:
    """Return the library's text, fit for a log. It is the thread's own: call this in the thread that raised."""
    words = f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS_MAX]
    return "".join(character for character in words if character.isprintable())


def context_end_unix_ms(context: gssapi.SecurityContext) -> int | None:
    """When a context ends with its ticket, the clocks' allowed skew included, as the library reckons; None: never.

    At a whole second: the library tells the whole seconds that are left, and one ticket is to have one end, however
    often it is used. Its principal has one seal then, which a forwarder knows again.
    """
    lifetime_s = int(context.lifetime)
    return None if lifetime_s >= _INDEFINITE_S else int(time.time() + lifetime_s) * 1000


async def run_in_thread(work: Callable[[], ResultT], limiter: trio.CapacityLimiter, *, timeout_s: float) -> ResultT:
    """Do what may block for long. Raises TooSlowError; the thread then goes on by itself, and counts until it ends."""
    with trio.fail_after(timeout_s):
        return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)
