"""A cluster with several listeners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from local.ports import free_port

from .cluster import HOST, ProxyCluster, Tables, to_toml


class ManyListenersCluster(ProxyCluster):
    """One listener is the lab's own, which `port` is; behind it stand ``more``, all with ports of their own."""

    def __init__(self, tables: Tables, *more: Mapping[str, Any]) -> None:
        self.ports = [free_port() for _ in more]
        """Of these, in their order."""
        listeners = [{"bind": f"{HOST}:{port}", **listener} for port, listener in zip(self.ports, more, strict=True)]
        self._more = "\n".join(to_toml({"listener": listener}) for listener in listeners)
        super().__init__(tables)

    def write_config(self, tables: Tables) -> None:
        """With all of them."""
        self.config_path.write_text(f"{to_toml(tables)}\n{self._more}")
