"""Names to addresses, through the system's resolver: /etc/hosts and search domains count, as in every other program."""

import ipaddress
import socket
from functools import partial
from typing import Any

import trio

THREADS_MAX = 16


def new_resolver_threads() -> trio.CapacityLimiter:
    """A limiter for one group of names."""
    return trio.CapacityLimiter(THREADS_MAX)


class ResolutionFailed(Exception):
    """A name without an address; says why."""


async def resolve(host: str, *, timeout_s: float, threads: trio.CapacityLimiter) -> tuple[str, ...]:
    """All IP addresses of a host, in the system's order; an IP address is its own. Raises ResolutionFailed.

    The system's resolver blocks, for longer than we wait: ``threads`` bounds how many may be stuck in it. Names that
    clients choose need a limiter of their own, or slow ones would keep the operator's from being resolved.
    """
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        pass
    try:
        with trio.fail_after(timeout_s):
            found = await getaddrinfo(host, None, threads=threads)
    except trio.TooSlowError:
        raise ResolutionFailed(f"{host}: no answer from the resolver within {timeout_s} s") from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ResolutionFailed(f"{host}: {reason}") from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def getaddrinfo(host: str, port: int | None, *, threads: trio.CapacityLimiter) -> list[tuple[Any, ...]]:
    """The system's resolver, in one of ``threads``; a cancelled call leaves its thread behind until it returns."""
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return list(await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=threads))
