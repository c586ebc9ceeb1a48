"""Names to addresses, through the system's resolver: /etc/hosts and search domains count, as in every other program."""

import ipaddress
import socket

import trio


class ResolutionFailed(Exception):
    """A name without an address; says why."""


async def resolve(host: str, *, timeout_s: float) -> tuple[str, ...]:
    """All IP addresses of a host, in the system's order; an IP address is its own. Raises ResolutionFailed."""
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        pass
    try:
        with trio.fail_after(timeout_s):
            found = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except trio.TooSlowError:
        raise ResolutionFailed(f"{host}: no answer from the resolver within {timeout_s} s") from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ResolutionFailed(f"{host}: {reason}") from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
