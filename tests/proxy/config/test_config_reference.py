"""proxy.config.reference: docs/configuration.md says what the types say."""

from typing import Annotated

import msgspec
import pytest

from proxy.config import reference as module
from proxy.config.reference import reference
from proxy.config.types import Config, Strict


def every_key(kind: type[msgspec.Struct]) -> list[str]:
    found = []
    for field in msgspec.structs.fields(kind):
        found.append(field.name)
        table, _ = module._table_of(field.type)
        if table is not None:
            found += every_key(table)
    return found


def test_every_key_is_there() -> None:
    text = reference()
    for key in set(every_key(Config)) - {field.name for field in msgspec.structs.fields(Config)}:
        assert f"| `{key}` |" in text, key


def test_every_table_is_there() -> None:
    text = reference()
    for table in ("[cluster]", "[[listener]]", "[brokers]", "[brokers.credentials]", "[authentication.token]", "[log]"):
        assert f"## `{table}`" in text


def test_rows() -> None:
    text = reference()
    assert '| `name` | text | `"pulsar"` |' in text
    assert "| `forwarders` | integer, 0 to 256 | `0` |" in text
    assert "| `allowed_ports` | list of integer, 1 to 65535 | `[]` |" in text
    assert "| `port_pairs` | list of list of integer, 1 to 65535 (2 of them) | `[[6650, 6651]]` |" in text
    assert "| `enabled` | boolean | `false` |" in text
    assert "| `credentials` | table | absent |" in text
    assert "| `method` | `token` or `basic` or `tls` or `sasl` or `oauth2` | required |" in text
    assert "| `format` | `logfmt` or `json` |" in text


def test_a_key_without_a_description_is_an_error() -> None:
    class Undescribed(Strict, frozen=True):
        """A table.

        one: described
        """

        one: int = 1
        two: Annotated[int, msgspec.Meta(ge=1)] = 2

    with pytest.raises(ValueError, match="two"):
        module._documentation(Undescribed)


def test_a_description_without_a_key_is_an_error() -> None:
    class Overdescribed(Strict, frozen=True):
        """A table.

        one: described
        two: of the past
        """

        one: int = 1

    with pytest.raises(ValueError, match="two"):
        module._documentation(Overdescribed)
