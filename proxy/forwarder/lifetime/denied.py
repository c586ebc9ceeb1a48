"""The deny list in force in a forwarder, and when connections of what it names are ended."""

from collections.abc import Callable

import trio

from proxy.common.deny_list import KEY, DenyList, read_deny_list
from proxy.common.reloading_file import CHECK_INTERVAL_S, ReloadingFile
from proxy.config.types import Config

DENY_PASSES = 5
"""Passes over all connections, one a second, after a change: an auth worker that reads it later may meanwhile have
accepted a relay's fresh credentials.
"""

ERROR_CHARACTERS_MAX = 1000
"""How much of the reason the status tells why a changed deny list cannot be used; the log has all of it."""


class DeniedCredentials:
    """The file ``authentication.deny_file``."""

    def __init__(self, config: Config) -> None:
        self.use_file(self.read_file(config))

    @staticmethod
    def read_file(config: Config) -> ReloadingFile[DenyList]:
        """Read the deny list. Raises ConfigError."""
        file = config.authentication.deny_file
        return ReloadingFile(KEY, [file], lambda: read_deny_list(file))

    def use_file(self, file: ReloadingFile[DenyList]) -> None:
        """Use another file from now on."""
        self._file = file

    @property
    def value(self) -> DenyList:
        """The list that was read last."""
        return self._file.value

    async def watch(self, end_denied: Callable[[DenyList], None]) -> None:
        """Have connections of what the list names ended, each time that it has changed, until cancelled."""
        applied: DenyList | None = None
        passes = 0
        while True:
            denied = await self._file.current_value()
            if denied is not applied:
                applied, passes = denied, DENY_PASSES
            if passes:
                passes -= 1
                end_denied(denied)
            await trio.sleep(CHECK_INTERVAL_S)

    def status(self) -> dict[str, object]:
        """Return what the cluster's status tells of it."""
        file = self._file
        if not file.files:
            return {}
        return {
            "deny_list": {
                "entries": len(file.value.kinds),
                "read_at_unix_s": file.read_at_unix_s,
                "error": file.failure[:ERROR_CHARACTERS_MAX],
            }
        }
