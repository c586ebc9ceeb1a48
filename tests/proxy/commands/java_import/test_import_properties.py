"""proxy.commands.java_import.properties: files are read as Java reads them, and the environment as Pulsar's image."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.commands.java_import.properties import (
    FILE_BYTES_MAX,
    apply_environment,
    parse_properties,
    parse_variables,
    read_file,
)
from proxy.common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1", {"a": "1"}),
        ("a:1\nb 2\nc = 3\n d\t:\t4", {"a": "1", "b": "2", "c": "3", "d": "4"}),
        ("a==1\nb= =2\nc : : 3", {"a": "=1", "b": "=2", "c": ": 3"}),
        ("# a=1\n! b=2\n  # c=3\n\n \t\f\n", {}),
        ("a=1\na=2\r\na=3\rb=4", {"a": "3", "b": "4"}),
        ("a=1,\\\n   2,\\\r\n\t3\nb=4", {"a": "1,2,3", "b": "4"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\\\\\n2", {"a": "1\\2"}),
        ("a=1 \\\n# no comment", {"a": "1 # no comment"}),
        ("# a comment does not go on \\\na=1", {"a": "1"}),
        ("a\\ b\\:c\\=d=1", {"a b:c=d": "1"}),
        (r"a=\t\n\r\f\u0041\q\"\\", {"a": '\t\n\r\fAq"\\'}),
        (r"a=\ud83d\ude00 \ud83d", {"a": "\U0001f600 �"}),
        ("\\\n# a comment\n\\\n\na=1\n\\", {"a": "1"}),
        ("a", {"a": ""}),
        ("a=1\\", {"a": "1"}),
        ("=1", {"": "1"}),
        ("a=1  ", {"a": "1  "}),
        ("a=\xe9", {"a": "\xe9"}),
    ],
)
def test_as_java(text: str, values: dict[str, str]) -> None:
    assert parse_properties(text.encode("latin-1")) == values


def test_a_wrong_escape_is_named_by_its_line_and_not_quoted() -> None:
    with pytest.raises(ConfigError, match=r"^line 3: ") as caught:
        parse_properties(b"a=1\n\nsecret=\\u12\\\nxy")
    assert "12" not in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_are_a_defect(data: bytes) -> None:
    try:
        values = parse_properties(data)
    except ConfigError:
        return
    "".join([*values, *values.values()]).encode()


@given(st.dictionaries(st.text("ab=: \\\n#!é\U0001f600", min_size=1), st.text("xy=: \\\n\t#é\U0001f600")))
def test_what_is_escaped_comes_back(values: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        units = text.encode("utf-16-be")
        return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

    lines = "\n".join(f"{escaped(key)}={escaped(value)}" for key, value in values.items())
    assert parse_properties(lines.encode()) == values


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "proxy.conf"
    path.write_bytes(b"a" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="is longer than 1048576 bytes"):
        read_file(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_file(tmp_path / "none")


def applied(text: str, environment: dict[str, str]) -> dict[str, str]:
    return apply_environment(parse_properties(text.encode()), text.encode(), environment)


def test_the_environment_as_the_image_applies_it() -> None:
    text = "servicePort=6650\n#numIOThreads=4\n# clusterName=x\nwebServicePort=8080"
    environment = {
        "servicePort": " 6660 ",  # in the file
        "numIOThreads": "8",  # in a comment
        "clusterName": "a",  # in a comment with a space, which is none of the file's keys
        "statusFilePath": "/x",  # not in the file
        "PULSAR_PREFIX_statusFilePath": "/y",  # any key with the prefix
        "PULSAR_PREFIX_webServicePort": "1",
        "webServicePort": "2",  # the bare name comes last
        "PULSAR_PREFIX_": "no key",
        "HOME": "/root",
    }
    assert applied(text, environment) == {
        "servicePort": "6660",
        "numIOThreads": "8",
        "statusFilePath": "/y",
        "webServicePort": "2",
    }


def test_values_of_the_environment_are_read_as_java_reads_the_line_that_they_become() -> None:
    assert applied("a=1", {"a": r"x\ty"}) == {"a": "x\ty"}
    with pytest.raises(ConfigError, match=r"^PULSAR_PREFIX_a: .u without"):
        applied("", {"PULSAR_PREFIX_a": r"\u1"})


def test_a_file_of_variables() -> None:
    text = b"A=1\n# B=2\nPULSAR_PREFIX_c=d=e\nnone\n F = 3\n"
    assert parse_variables(text) == {"A": "1", "PULSAR_PREFIX_c": "d=e", "F": " 3"}
