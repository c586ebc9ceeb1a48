"""A lookup worker that was taken over: as `sitecustomize` it makes each target one of the proxy's own machine."""

from lookup.targets import rules
from proto.addresses import HostPort


async def check_target(_self: object, text: str, _owner: str = "") -> rules.Target:
    """Name what the client has asked for, at an address that no rule allows."""
    host, _, port = text.partition(":")
    return rules.Target(HostPort(host, int(port)), ("169.254.169.254",) if host == "metadata" else ("127.0.0.1",))


rules.TargetRules.check_target = check_target  # type: ignore[method-assign]
