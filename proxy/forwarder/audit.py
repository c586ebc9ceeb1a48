"""Audit events of a forwarder's clients: what they tell, from a connection or from a relay's record."""

import time
from collections.abc import Callable
from typing import Any

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.runtime.observability.audit import AuditLog

Describe = Callable[[], StoredRelay]
"""Makes the record of a connection that is no relay; called only where its event is written."""


class ForwarderAudit(AuditLog):
    """The audit events of one forwarder."""

    def on_opened(self, describe: Describe) -> None:
        """Write the event of a client's connection that is served from now on."""
        if self.writes("connection_opened"):
            self.write("connection_opened", **_fields_of(describe()))

    def on_authentication(self, describe: Describe) -> None:
        """Write the event of a client that has authenticated itself."""
        if self.writes("authentication_success"):
            record = describe()
            ends_at = record.expires_at_unix_ms
            self.write("authentication_success", **_fields_of(record), expires_at_unix_ms=ends_at)

    def on_authentication_failure(self, describe: Describe, reason: str) -> None:
        """Write the event of a client that has failed to authenticate itself."""
        if self.writes("authentication_failure"):
            self.write("authentication_failure", **_fields_of(describe()), reason=reason)

    def on_connection_end(self, describe: Describe, kind: str, cause: DisconnectCause) -> None:
        """Write the event of a connection that was no relay."""
        if self.writes("connection_ended"):
            record = describe()
            ms = _ms_since(record.started_at_unix_ms)
            self.write("connection_ended", **_fields_of(record), kind=kind, ms=ms, cause=cause.value)

    def on_relay_end(self, record: StoredRelay, cause: DisconnectCause, to_broker: int, to_client: int) -> None:
        """Write the event of a relay with its bytes."""
        self.write(
            "connection_ended",
            **_fields_of(record),
            kind="websocket" if record.passed else "relay",
            ms=_ms_since(record.started_at_unix_ms),
            bytes_to_broker=to_broker,
            bytes_to_client=to_client,
            cause=cause.value,
        )

    def on_reauthentication(self, session: ExpiringSession, failure: str) -> None:
        """Write the event of a client that has authenticated itself again, or why it failed to."""
        event = "authentication_refresh_failure" if failure else "authentication_refresh"
        self.write(event, **_fields_of(session.relay_record), reason=failure)


def _fields_of(record: StoredRelay) -> dict[str, Any]:
    return {
        "client": record.client_address,
        "started_at_unix_ms": record.started_at_unix_ms,
        "listener": record.listener,
        "principal": record.principal,
        "proxy": record.proxy,
        "method": record.method,
        "target": record.target,
    }


def _ms_since(started_at_unix_ms: int) -> int:
    return max(0, int(time.time() * 1000) - started_at_unix_ms)
