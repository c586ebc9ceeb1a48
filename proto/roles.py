"""Roles of the cluster's processes, and the RPC methods that each may call (KIP-590: the right to ClusterAction)."""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from proto.rpc_pb2 import Method


class Role(enum.StrEnum):
    """Role of a process of the cluster, or of a caller at control.sock."""

    SUPERVISOR = "supervisor"
    FORWARDER = "forwarder"
    AUTH = "auth"
    LOOKUP = "lookup"
    ADMIN = "admin"
    HTTP = "http"
    OPERATOR = "operator"


MAY_CALL: Mapping[int, frozenset[Role]] = MappingProxyType(
    {
        Method.AUTHENTICATE: frozenset({Role.FORWARDER, Role.HTTP}),
        Method.BROKER_CREDENTIALS: frozenset({Role.FORWARDER, Role.LOOKUP, Role.HTTP}),
        Method.ENVELOPE: frozenset({Role.FORWARDER}),
        Method.RESOLVE_TARGET: frozenset({Role.FORWARDER, Role.HTTP}),
        Method.BROKER_PROFILE: frozenset({Role.FORWARDER}),
        Method.REPORT_OUTLIER: frozenset({Role.FORWARDER}),
        Method.START: frozenset({Role.SUPERVISOR}),
        Method.SET_PEERS: frozenset({Role.SUPERVISOR}),
        Method.CONFIGURE: frozenset({Role.SUPERVISOR}),
        Method.DRAIN: frozenset({Role.SUPERVISOR}),
        Method.COLLECT_METRICS: frozenset({Role.SUPERVISOR}),
        Method.GET_STATUS: frozenset({Role.SUPERVISOR}),
        Method.TAKE_OVER_FILES: frozenset({Role.SUPERVISOR}),
        Method.LIST_CONNECTIONS: frozenset({Role.SUPERVISOR}),
        Method.END_CONNECTIONS: frozenset({Role.SUPERVISOR}),
        Method.SET_LOG_LEVEL: frozenset({Role.SUPERVISOR}),
        Method.SUM_CONNECTIONS: frozenset({Role.SUPERVISOR}),
        Method.CLUSTER_STATUS: frozenset({Role.OPERATOR}),
        Method.CLUSTER_DRAIN: frozenset({Role.OPERATOR}),
        Method.CLUSTER_RELOAD: frozenset({Role.OPERATOR}),
        Method.CLUSTER_UPGRADE: frozenset({Role.OPERATOR}),
        Method.CLUSTER_CONNECTIONS: frozenset({Role.OPERATOR}),
        Method.CLUSTER_DISCONNECT: frozenset({Role.OPERATOR}),
        Method.CLUSTER_LOG_LEVEL: frozenset({Role.OPERATOR}),
        Method.CLUSTER_UNREADY: frozenset({Role.OPERATOR}),
        Method.REPORT_HEALTH: frozenset({Role.ADMIN}),
        Method.REPORT_READINESS: frozenset({Role.ADMIN}),
        Method.REPORT_STATUS: frozenset({Role.ADMIN}),
        Method.REPORT_PLACES: frozenset({Role.ADMIN}),
        Method.REPORT_METRICS: frozenset({Role.ADMIN}),
        Method.REPORT_OVERVIEW: frozenset({Role.ADMIN}),
    }
)


def may_call(role: Role, method: int) -> bool:
    """Return whether a role may call a method. No role may call a method that is not in the table."""
    return role in MAY_CALL.get(method, frozenset())
