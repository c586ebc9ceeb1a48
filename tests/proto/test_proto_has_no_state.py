"""proto: no module keeps state; caches belong to instances, and tables of a module are constants."""

import importlib
import pkgutil

import pytest

import proto

MODULES = [f"proto.{module.name}" for module in pkgutil.iter_modules(proto.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_no_module_keeps_state(name: str) -> None:
    attributes = {key: value for key, value in vars(importlib.import_module(name)).items() if not key.startswith("__")}
    assert [key for key, value in attributes.items() if hasattr(value, "cache_clear")] == []
    assert [key for key, value in attributes.items() if isinstance(value, set | list | bytearray)] == []
