"""Files that libraries in an auth worker open by themselves: Kerberos' own, and those of third-party providers."""

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import trio

from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.runtime.process.hardening import FileAccess
from proxy.supervisor.processes.signals import in_thread_without_signals

POLL_INTERVAL_S = 5.0

_PUBLIC = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/lib", "/lib64", "/etc/ld.so.cache"),
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services"),
    *("/etc/protocols", "/etc/localtime", "/etc/passwd", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust"),
)
"""What libraries load, and what the C library reads to find a host. None of it is a secret."""

_KERBEROS = ("/etc/krb5.conf.d", "/etc/crypto-policies", "/etc/gss")


def files_of_libraries(config: Config) -> FileAccess:
    """Return what an auth worker may open by itself: nothing, without Kerberos and without third-party providers.

    These providers may read Python's packages and what their own tables name.
    """
    authentication, credentials = config.authentication, config.brokers.credentials
    readable: list[str] = []
    writable: list[str] = []
    if authentication.sasl is not None or (credentials is not None and credentials.method == "sasl"):
        readable += [*_PUBLIC, *_KERBEROS, *os.environ.get("KRB5_CONFIG", "/etc/krb5.conf").split(":")]
        # MIT's cache of replays, which is made where it is missing
        writable.append(os.environ.get("KRB5RCACHEDIR") or os.environ.get("TMPDIR") or "/var/tmp")  # noqa: S108
    if authentication.plugins:
        readable += [*_PUBLIC, *(path for path in sys.path if path), *_paths_in(authentication.plugins)]
    return FileAccess(tuple(dict.fromkeys(readable)), tuple(writable))


def _paths_in(value: Any) -> Iterator[str]:
    """Yield the absolute paths among the texts in a table."""
    if isinstance(value, str) and value.startswith("/") and value.strip("/"):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _paths_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _paths_in(one)


async def watch_library_files(config: Callable[[], Config], replace: Callable[[], Awaitable[None]]) -> None:
    """Call ``replace`` when a path leads to another file, until cancelled: Landlock's rules are for files, not for
    names, and only a new auth worker may open the new file.
    """
    access = files_of_libraries(config())
    inodes = _inodes_of(access)
    while True:
        await trio.sleep(POLL_INTERVAL_S)
        access_before, inodes_before = access, inodes
        access = files_of_libraries(config())
        inodes = await in_thread_without_signals(_inodes_of, access)
        changed = sorted(path for path, inode in inodes.items() if inode != inodes_before.get(path))
        if changed and access == access_before:  # otherwise a reload has replaced the auth workers
            get_logger().info("replacing the auth workers, which may not open new files", files=", ".join(changed))
            await replace()


def _inodes_of(access: FileAccess) -> dict[str, tuple[int, int]]:
    """Return the device and inode that each path leads to."""
    found = {}
    for path in (*access.readable, *access.writable):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)  # noqa: PTH116 -- needs no Path
            found[path] = (status.st_dev, status.st_ino)
    return found
