"""The checks of `make fuzz` over their seeds, and over changed ones: without Atheris, in seconds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, load

CHANGES_MAX = 4
EXAMPLES = 40


@pytest.mark.parametrize("name", PARSERS)
def test_seeds_hold(name: str) -> None:
    parser = load(name)
    for seed in (b"", *parser.seeds):
        parser.check(seed)


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with bytes replaced, inserted, removed, repeated, or of another seed in between."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, CHANGES_MAX))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 8)))
        put = draw(st.binary(max_size=4) | st.sampled_from([data[begin:end] * 3, *seeds]))
        data = data[:begin] + put + data[end:]
    return data


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=EXAMPLES)
@given(st.data())
def test_changed_seeds_hold(name: str, data: st.DataObject) -> None:
    parser = load(name)
    parser.check(data.draw(changed(tuple(parser.seeds))))
