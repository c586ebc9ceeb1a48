"""The forwarder's metrics, under the Java proxy's names where it has them."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.broker_reauthentication import BrokerReauthenticationMetrics
from proxy.forwarder.lifetime.metrics import ReauthenticationMetrics
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, BoundedLabel


class ForwarderMetrics:
    """The metrics of a forwarder. Labels take values from fixed lists, or few from other workers (BoundedLabel)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.active_connections = gauge("pulsar_proxy_active_connections", "Clients' connections open now.")
        self.connections_by_state = gauge(
            "pulsar_proxy_connections_by_state", "Clients' connections open now, by state.", ["state"]
        )
        self.new_connections = counter("pulsar_proxy_new_connections", "Clients' connections accepted.")
        self.rejected_connections = counter(
            "pulsar_proxy_rejected_connections",
            "Clients' connections turned away, by the limit that was reached; network: where they come from.",
            ["reason"],
        )
        self.tls_handshakes = counter(
            "pulsar_proxy_tls_handshakes",
            "TLS handshakes with clients, by the listener's index, result (success, failure) and reason.",
            ["listener", "result", "reason"],
        )
        self.tls_resumed_sessions = counter(
            "pulsar_proxy_tls_resumed_sessions",
            "TLS handshakes with clients that resumed a session by a ticket, by the listener's index.",
            ["listener"],
        )
        self.adopted_relays = counter(
            "pulsar_proxy_adopted_relays",
            "Relays taken over from a predecessor that was killed, crashed, or was replaced.",
        )
        self.kernel_tls_available = gauge(
            "pulsar_proxy_kernel_tls_available",
            "1 where relays with TLS 1.3 are moved into the kernel (relay.kernel_tls), 0 where they are not.",
        )
        self.kernel_tls_relays = gauge(
            "pulsar_proxy_kernel_tls_relays", "Relays open now of which the kernel encrypts a side."
        )
        self.denied_credentials = gauge(
            "pulsar_proxy_denied_credentials", "Entries of the deny list in force (authentication.deny_file)."
        )
        ended_connections = counter(
            "pulsar_proxy_ended_connections", "Clients' connections that ended, by cause.", ["cause"]
        )
        self.ended_connections = {cause: ended_connections.labels(cause=cause.value) for cause in DisconnectCause}
        handshake_seconds = Histogram(
            "pulsar_proxy_handshake_seconds",
            "Time of a client's handshake, by stage: authentication, broker (dialling and its handshake), total.",
            ["stage"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.handshake_seconds = {
            stage: handshake_seconds.labels(stage=stage) for stage in ("authentication", "broker", "total")
        }
        self._broker_failures = counter(
            "pulsar_proxy_broker_connection_failures", "Relays that were not opened, by reason.", ["reason"]
        )
        self._broker_failure_reasons = BoundedLabel()
        self.reauthentication = ReauthenticationMetrics(registry)
        self.broker_reauthentication = BrokerReauthenticationMetrics(registry)
        self.refused_commands = counter(
            "pulsar_proxy_refused_commands",
            "Commands of lookup mode answered with an error by the forwarder itself, by reason.",
            ["reason"],
        )
        self.sni_refused = counter(
            "pulsar_proxy_sni_refused",
            "Connections at listeners with routing by SNI that were not passed on to a broker, by reason.",
            ["reason"],
        )
        self.passed_connections = counter(
            "pulsar_proxy_websocket_relays",
            "Connections that HTTP workers passed to be relayed, by result: started, or the reason of a refusal.",
            ["result"],
        )

    def count_sni_refusal(self, reason: str) -> None:
        """Count a client whose TLS was not passed on; a lookup worker that denies its target names the reason."""
        self.sni_refused.labels(reason=self._broker_failure_reasons.value_of(reason)).inc()

    def count_broker_failure(self, reason: str) -> None:
        """Count a relay that was not opened; a lookup worker that denies its target names the reason."""
        self._broker_failures.labels(reason=self._broker_failure_reasons.value_of(reason)).inc()
