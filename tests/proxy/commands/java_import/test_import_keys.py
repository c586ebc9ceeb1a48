"""proxy.commands.java_import.keys: the table has every key of Java's proxy, and names keys that there are here."""

from __future__ import annotations

import typing

import pytest
from java_keys import FIELDS_4_0_8, FILE_4_0_8, NEW_IN_5_0, PROPERTIES

from proxy.commands.java_import import result
from proxy.commands.java_import.keys import KEYS, Key, defaults, find_key
from proxy.common.shape import fields_of, is_list, without_none
from proxy.config.types import Config


@pytest.mark.parametrize("names", [FILE_4_0_8, FIELDS_4_0_8, PROPERTIES, NEW_IN_5_0])
def test_every_key_of_java_is_in_the_table(names: str) -> None:
    assert [name for name in names.split() if find_key(name) is None] == []


def test_no_other_key_is_in_the_table() -> None:
    known = {name for names in (FILE_4_0_8, FIELDS_4_0_8, PROPERTIES, NEW_IN_5_0) for name in names.split()}
    assert {name for name in KEYS if "*" not in name} - known == set()


TARGETS = sorted({target for key in KEYS.values() for target in key.targets})


def has(path: str) -> bool:
    kind: typing.Any = Config
    for part in path.split("."):
        kind = without_none(kind)
        kind = typing.get_args(kind)[0] if is_list(kind) else kind
        if part not in fields_of(kind):
            return False
        kind = fields_of(kind)[part]
    return True


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_is_a_key_of_this_proxy(target: str) -> None:
    assert has(target)
    assert not has(f"{target}x")


@pytest.mark.parametrize("name", KEYS)
def test_each_line_says_one_thing(name: str) -> None:
    """A key has a target, or a reason; what is converted alone has one target, in a table that is written."""
    key = KEYS[name]
    assert bool(key.targets) != bool(key.reason)
    assert not key.lost or key.reason
    if key.convert is not None:
        (target,) = key.targets
        assert target.rpartition(".")[0] in result.TABLES


def test_the_defaults_of_release_5() -> None:
    old, new = defaults("4"), defaults("5")
    assert {name: new[name] for name in new if new[name] != old[name]} == {
        "forwardAuthorizationCredentials": "true",
        "tlsHostnameVerificationEnabled": "true",
        "webServiceTlsProvider": "",
    }
    assert isinstance(KEYS["servicePort"], Key)
