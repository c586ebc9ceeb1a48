"""Differences between two configurations, sorted by what a running cluster needs to take them over."""

from proxy.config.binds import all_binds, keys_of_overlapping_binds
from proxy.config.types import Config, HttpListener, Listener


def changes_that_need_a_restart(old: Config, new: Config) -> list[str]:
    """Find the keys that differ and that only a restart changes."""
    changed = []
    if old.cluster.runtime_dir != new.cluster.runtime_dir:
        changed.append("cluster.runtime_dir")
    if old.cluster.forwarders > new.cluster.forwarders > 0:  # their relays need a process
        changed.append("cluster.forwarders (fewer)")
    if old.relay.crash_safe != new.relay.crash_safe:
        changed.append("relay.crash_safe")
    return changed + keys_of_overlapping_binds(old, new)


def changes_that_need_an_upgrade(old: Config, new: Config) -> list[str]:
    """Find the keys that differ and that a running cluster takes over by an upgrade, but not by a reload."""
    keys = ("name", "forwarders", "lookup_workers", "auth_workers", "http_workers")
    changed = [f"cluster.{key}" for key in keys if getattr(old.cluster, key) != getattr(new.cluster, key)]
    if old.cluster.forwarders > new.cluster.forwarders > 0:
        changed.remove("cluster.forwarders")
    overlaps = keys_of_overlapping_binds(old, new)
    if old.admin.bind != new.admin.bind and "admin.bind" not in overlaps:
        changed.append("admin.bind")
    for table in ("listener", "http_listener"):
        before, after = ([_fixed_properties(one) for one in getattr(config, table)] for config in (old, new))
        if before != after and table not in map(_kind, overlaps):
            changed.append(table)
    return changed


def _fixed_properties(listener: Listener | HttpListener) -> tuple[str, bool, str]:
    """Return the properties of a listener that are fixed while it is open; its certificate may change."""
    routing = listener.routing if isinstance(listener, Listener) else ""
    return listener.bind, listener.tls is not None, routing


def new_binds(old: Config, new: Config) -> list[tuple[str, str]]:
    """Return the addresses that only the new configuration binds, with their keys.

    A socket is handed on to the next program for a listener of the same kind alone.
    """
    before = {(_kind(key), bind) for key, bind in all_binds(old)}
    return [(key, bind) for key, bind in all_binds(new) if (_kind(key), bind) not in before]


def _kind(key: str) -> str:
    """Return of which kind of listener a key is."""
    return key.partition("[")[0]


def changes_that_need_new_processes(old: Config, new: Config) -> list[str]:
    """Find the keys that differ and that only a new process can take over."""
    frame_limits = ("max_command_bytes", "max_broker_frame_bytes")  # the workers' RPC is laid out for them
    changed = [f"limits.{key}" for key in frame_limits if getattr(old.limits, key) != getattr(new.limits, key)]
    if old.log != new.log:
        changed.append("log")
    return changed


def reload_refusal(old: Config, new: Config) -> str:
    """Return which changes a reload cannot make, and what can make them; "" where it can make all."""
    upgrade, restart = changes_that_need_an_upgrade(old, new), changes_that_need_a_restart(old, new)
    parts = [f"a restart is needed to change: {', '.join(restart)}"] if restart else []
    if upgrade:
        parts.append(f"an upgrade (pulsar-trio-proxy upgrade) is needed to change: {', '.join(upgrade)}")
    return "; ".join(parts)
