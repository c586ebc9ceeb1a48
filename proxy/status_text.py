"""Text form of /status: the same facts, a line each."""

import datetime as dt
from typing import Any


def status_text(status: dict[str, Any]) -> str:
    """Format a status (proxy.supervisor.operators.report) as text."""
    lines = [
        f"{_title(status)}: {_state(status)}",
        f"  listeners       {', '.join(status['listeners'])}",
        f"  brokers         {status['service_url']}",
        f"  authentication  {'on' if status['authentication'] else 'off'}",
        *_libraries(status),
        *(f"  log level       {line}" for line in log_level_lines(status.get("log_levels"))),
        *(f"  note            {note}" for note in status.get("notes", ())),
        *_kernel_tls(status.get("kernel_tls")),
        *_certificates(status.get("certificate_ends")),
        *_near_expiry(status.get("sessions_near_expiry")),
    ]
    for worker in status["workers"]:
        lines.append(_worker_line(worker))
        lines.extend(f"      broker {_broker(broker)}" for broker in worker.get("brokers", ()))
        lines.extend(_deny_list(worker.get("deny_list")))
    for worker in status.get("leaving_workers", ()):
        lines += [_worker_line(worker), *_deny_list(worker.get("deny_list"))]
    return "\n".join(map(printable, lines))


def log_level_lines(told: dict[str, Any] | None) -> list[str]:
    """Return the levels that an operator has changed. None: a supervisor from before an upgrade."""
    if told is None:
        return []
    lines = []
    for one in told["changed"]:
        left = "until it is changed" if one["seconds_left"] is None else f"for {one['seconds_left']} s more"
        lines.append(f"{one['role']}: CHANGED to {one['level']} {left} (configured: {told['configured']})")
    return lines


def printable(text: str) -> str:
    """Return a text for a terminal, whatever a client is called, and whatever a captured worker says."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _title(status: dict[str, Any]) -> str:
    return f"cluster {status['cluster']}, version {status['version']}, generation {status['generation']}"


def _libraries(status: dict[str, Any]) -> list[str]:
    """Versions of Python and of the library for TLS. None: a supervisor from before an upgrade."""
    return [f"  runs on         Python {status['python']}, {status['openssl']}"] if "openssl" in status else []


def _state(status: dict[str, Any]) -> str:
    if status["ready"]:
        return "ready, workers are being replaced" if status["replacing_workers"] else "ready"
    return "not ready: " + "; ".join(status["not_ready_because"])


def _kernel_tls(told: dict[str, Any] | None) -> list[str]:
    """Return what is used of `relay.kernel_tls`. None: it is off."""
    if told is None:
        return []
    without = ""
    if told["setting"] != "off" and told["forwarders_without"]:
        where = "" if not told["forwarders_with"] else f" in {told['forwarders_without']} of the forwarders"
        without = f", NOT available{where} (modprobe tls, then upgrade)"
    return [f"  kernel TLS      {told['setting']}, relays now: {told['relays']}{without}"]


def _certificates(ends: list[dict[str, Any]] | None) -> list[str]:
    """Return the ends of certificates and CRLs, the first one first. None: a supervisor from before an upgrade."""
    if not ends:
        return []
    soon = sum(one["within_30_days"] for one in ends)
    lines = [f"  certificates    {soon} of {len(ends)} files (certificates, CRLs) end within 30 days"]
    for one in ends:
        says = "ends at"
        if one["within_30_days"]:
            says = "HAS ENDED at" if one["has_ended"] else "ENDS WITHIN 30 DAYS, at"
        lines.append(f"      {one['key']}: {says} {_utc(one['ends_at_unix_s'])}")
    return lines


def _utc(unix_s: float) -> str:
    return f"{dt.datetime.fromtimestamp(unix_s, dt.UTC):%Y-%m-%dT%H:%M:%SZ}"


def _near_expiry(near: dict[str, Any] | None) -> list[str]:
    """Sessions that end soon (KIP-368), if there are any. None: a supervisor from before an upgrade."""
    if near is None or not (near["expired_and_idle"] or near["ending_within_60_s"]):
        return []
    expired, ending = near["expired_and_idle"], near["ending_within_60_s"]
    lines = [f"  sessions        {expired} expired and idle, {ending} end within 60 s"]
    for session in near["soonest"]:
        who = session["principal"] or "nobody"
        lines.append(f"      {who} at {session['client']}: {session['seconds_left']} s left")
    return lines


def _worker_line(worker: dict[str, Any]) -> str:
    facts = [worker["state"]]
    if "pid" in worker:
        facts += [f"pid {worker['pid']}", f"up {worker['uptime_seconds']} s"]
    if worker["restarts"]:
        facts.append(f"restarted {worker['restarts']} times")
    for key, text in (
        ("connections", "connections"),
        ("kernel_tls_relays", "relays with kernel TLS"),
        ("requests_under_way", "requests under way"),
        ("lookups_under_way", "lookups under way"),
        ("broker_connections", "broker connections"),
        ("authentications_under_way", "authentications under way"),
    ):
        if key in worker:
            facts.append(f"{worker[key]} {text}")
    if worker.get("brokers_changed_s_ago") is not None:
        facts.append(f"list of brokers changed {worker['brokers_changed_s_ago']} s ago")
    if worker.get("methods"):
        facts.append(f"methods {', '.join(worker['methods'])}")
    name = f"{worker['role']}-{worker['worker']}"
    return f"  {name:<15} {', '.join(facts)}"


def _deny_list(denied: dict[str, Any] | None) -> list[str]:
    """Return what a forwarder has of the deny list. None: there is none."""
    if denied is None:
        return []
    lines = [f"      deny list: {denied['entries']} entries, read at {_utc(denied['read_at_unix_s'])}"]
    if denied["error"]:
        lines.append(f"      deny list: the changed file is NOT in force: {denied['error']}")
    return lines


def _broker(broker: dict[str, Any]) -> str:
    state = f"{broker['broker']}: {'reachable' if broker['reachable'] else 'NOT reachable'}, {broker['detail']}"
    age = broker.get("probed_s_ago")
    return state if age is None else f"{state}, probed {age} s ago"
