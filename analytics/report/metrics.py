"""The proxy's metrics that a report uses, and the labels that it distinguishes. Meanings: docs/metrics.md."""

from __future__ import annotations

from typing import Final

BYTES: Final = "pulsar_proxy_binary_bytes_total"
MESSAGES: Final = "pulsar_proxy_principal_messages_total"
ACTIVE: Final = "pulsar_proxy_active_connections"
STATES: Final = "pulsar_proxy_connections_by_state"
OPENED: Final = "pulsar_proxy_new_connections_total"
REJECTED: Final = "pulsar_proxy_rejected_connections_total"
ENDED: Final = "pulsar_proxy_ended_connections_total"
ADOPTED: Final = "pulsar_proxy_adopted_relays_total"
BROKER_FAILURES: Final = "pulsar_proxy_broker_connection_failures_total"
REFUSED_COMMANDS: Final = "pulsar_proxy_refused_commands_total"
DENIED_TARGETS: Final = "pulsar_proxy_denied_targets_total"
HANDSHAKE: Final = "pulsar_proxy_handshake_seconds"
LOOKUP: Final = "pulsar_proxy_lookup_seconds"
ANSWERS: Final = "pulsar_proxy_lookup_answers_total"
REQUESTS: Final = {
    "lookup": "pulsar_proxy_lookup_requests_total",
    "partitions": "pulsar_proxy_partitions_metadata_requests_total",
    "topics of a namespace": "pulsar_proxy_get_topics_of_namespace_requests_total",
    "schema": "pulsar_proxy_get_schema_requests_total",
}
REJECTED_REQUESTS: Final = {
    name: metric.replace("pulsar_proxy_", "pulsar_proxy_rejected_") for name, metric in REQUESTS.items()
}
AUTH_SUCCESS: Final = "pulsar_authentication_success_total"
AUTH_FAILURES: Final = "pulsar_authentication_failures_total"
AUTH_ROUND: Final = "pulsar_proxy_authentication_round_seconds"
REAUTH_SUCCESS: Final = "pulsar_proxy_reauthentication_success_total"
REAUTH_FAILURE: Final = "pulsar_proxy_reauthentication_failure_total"
REAUTH_SECONDS: Final = "pulsar_proxy_reauthentication_seconds"
NO_REAUTH: Final = "pulsar_proxy_authentication_no_reauth_total"
EXPIRED_KILLED: Final = "pulsar_proxy_expired_connections_killed_total"
EJECTIONS: Final = "pulsar_proxy_broker_ejections_total"
DNS_FAILURES: Final = "pulsar_proxy_dns_failures_total"
RESTARTS: Final = "pulsar_proxy_worker_restarts_total"
BROKER_UP: Final = "pulsar_proxy_broker_up"
BROKER_EJECTED: Final = "pulsar_proxy_broker_set_aside"

PLAIN: Final[dict[str, tuple[str, ...]]] = {
    BYTES: ("direction",),
    MESSAGES: ("direction",),
    ACTIVE: (),
    STATES: ("state",),
    OPENED: (),
    REJECTED: ("reason",),
    ENDED: ("cause",),
    ADOPTED: (),
    BROKER_FAILURES: ("reason",),
    REFUSED_COMMANDS: ("reason",),
    DENIED_TARGETS: ("reason",),
    ANSWERS: ("request", "error"),
    **dict.fromkeys([*REQUESTS.values(), *REJECTED_REQUESTS.values()], ()),
    AUTH_SUCCESS: ("auth_method",),
    AUTH_FAILURES: ("auth_method", "reason"),
    REAUTH_SUCCESS: ("method",),
    REAUTH_FAILURE: ("method",),
    NO_REAUTH: ("method",),
    EXPIRED_KILLED: (),
    EJECTIONS: ("reason",),
    DNS_FAILURES: ("names",),
    RESTARTS: ("of",),
}
"""Counters and gauges → labels. Values are summed over all other labels: workers, roles, instances, principals."""

RATES: Final = (BYTES, MESSAGES, OPENED, *REQUESTS.values(), AUTH_SUCCESS, REAUTH_SUCCESS)
"""Counters that are drawn as growth per second."""

HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    HANDSHAKE: ("stage",),
    LOOKUP: ("request",),
    AUTH_ROUND: (),
    REAUTH_SECONDS: (),
}
"""Histograms → labels. They are stored as classic ones (`_bucket`, `_sum`, `_count` as samples) or as native ones."""

BUCKET: Final = "_bucket"
CLASSIC: Final[dict[str, tuple[str, ...]]] = {
    name + suffix: (*labels, "le") if suffix == BUCKET else labels
    for name, labels in HISTOGRAMS.items()
    for suffix in (BUCKET, "_sum", "_count")
}
ROWS: Final = PLAIN | CLASSIC
"""All metrics that are read from the rollups of plain samples, with their labels."""
BROKERS: Final = {BROKER_UP: ("broker",), BROKER_EJECTED: ("broker",)}
