"""Who may call what: the whole matrix, written out (KIP-590: the right to ClusterAction)."""

import pytest

from proto.roles import MAY_CALL, Role, may_call
from proto.rpc_pb2 import Method

# method → the roles that may call it; numbers as on the wire, so that old and new workers agree
MATRIX: dict[int, set[str]] = {
    0: set(),  # METHOD_UNSPECIFIED
    1: {"forwarder", "http"},  # AUTHENTICATE
    2: {"forwarder", "lookup", "http"},  # BROKER_CREDENTIALS
    10: {"forwarder"},  # ENVELOPE
    11: {"forwarder", "http"},  # RESOLVE_TARGET
    12: {"forwarder"},  # BROKER_PROFILE
    13: {"forwarder"},  # REPORT_OUTLIER
    19: {"supervisor"},  # SUM_CONNECTIONS
    20: {"supervisor"},  # START
    21: {"supervisor"},  # SET_PEERS
    22: {"supervisor"},  # CONFIGURE
    23: {"supervisor"},  # DRAIN
    24: {"supervisor"},  # COLLECT_METRICS
    25: {"supervisor"},  # GET_STATUS
    26: {"supervisor"},  # TAKE_OVER_FILES
    27: {"supervisor"},  # LIST_CONNECTIONS
    28: {"supervisor"},  # END_CONNECTIONS
    29: {"supervisor"},  # SET_LOG_LEVEL
    30: {"operator"},  # CLUSTER_STATUS
    31: {"operator"},  # CLUSTER_DRAIN
    32: {"operator"},  # CLUSTER_RELOAD
    33: {"operator"},  # CLUSTER_UPGRADE
    34: {"operator"},  # CLUSTER_CONNECTIONS
    35: {"operator"},  # CLUSTER_DISCONNECT
    36: {"operator"},  # CLUSTER_LOG_LEVEL
    37: {"operator"},  # CLUSTER_UNREADY
    40: {"admin"},  # REPORT_HEALTH
    41: {"admin"},  # REPORT_READINESS
    42: {"admin"},  # REPORT_STATUS
    43: {"admin"},  # REPORT_PLACES
    44: {"admin"},  # REPORT_METRICS
    45: {"admin"},  # REPORT_OVERVIEW
    3: set(),
    99: set(),
    -1: set(),
}
ROLES = ("supervisor", "forwarder", "auth", "lookup", "admin", "http", "operator")


@pytest.mark.conforms("kip-590.4")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method", MATRIX)
def test_every_role_and_method(role: str, method: int) -> None:
    assert may_call(Role(role), method) is (role in MATRIX[method])


def test_the_matrix_is_complete() -> None:
    assert set(Method.values()) <= set(MATRIX)
    assert {role.value for role in Role} == set(ROLES)


def test_an_auth_worker_calls_no_process() -> None:
    assert not any(Role.AUTH in roles for roles in MAY_CALL.values())


def test_the_table_cannot_be_changed_at_run_time() -> None:
    with pytest.raises(TypeError):
        MAY_CALL[Method.START] = frozenset(Role)  # type: ignore[index]


def test_no_process_has_an_unknown_role() -> None:
    with pytest.raises(ValueError, match="root"):
        Role("root")
