"""A configuration file to load, for the tests of this room."""

from pathlib import Path

import pytest

from proxy.common.errors import ConfigError
from proxy.config.load import load_config
from proxy.config.types import Config


class Files:
    """A configuration file, and what it leads to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "proxy.toml"

    def load(self, text: str = "", **environment: str) -> Config:
        self.path.write_text(text, encoding="utf-8")
        return load_config(self.path, {f"PULSAR_TRIO_PROXY__{key}": value for key, value in environment.items()})

    def error(self, text: str = "", **environment: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(text, **environment)
        return str(caught.value)
