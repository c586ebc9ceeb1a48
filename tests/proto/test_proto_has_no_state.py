"""proto: no module keeps a cache; what is remembered belongs to an instance."""

import importlib
import pkgutil

import pytest

import proto

MODULES = [f"proto.{module.name}" for module in pkgutil.iter_modules(proto.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_no_module_has_a_cache(name: str) -> None:
    module = importlib.import_module(name)
    assert [attribute for attribute in vars(module) if hasattr(getattr(module, attribute), "cache_clear")] == []
