"""Both ends of the RPC's connections."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import trio
from runtime_fakes import MakeWires, RawServer, Wires, echo

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.runtime.rpc.server import Handler


@pytest.fixture
def wires(nursery: trio.Nursery) -> MakeWires:
    def make(handlers: Mapping[int, Handler] | None = None, role: Role = Role.FORWARDER) -> Wires:
        return Wires(nursery, handlers or {Method.ENVELOPE: echo}, role)

    return make


@pytest.fixture
def raw(nursery: trio.Nursery) -> RawServer:
    return RawServer(nursery)
