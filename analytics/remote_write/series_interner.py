"""Interning of series: maps the label fields of many series to numbers, with one dictionary look-up for each series.

In 1.0 a series carries its labels: their bytes are the key. In 2.0 it carries references into the request's symbols:
each symbol gets a number that holds for all requests, and the numbers' bytes are the key. Only unknown keys are parsed
and checked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.remote_write.bounds import CEILING, Bounds, Budget
from analytics.remote_write.errors import BoundFault, DecodeError
from analytics.remote_write.protobuf_fields import (
    LENGTH_DELIMITED,
    VARINT,
    Bytes,
    Fields,
    Integers,
    join_spans,
    read_packed_varints,
)
from analytics.remote_write.series import Labels, SeriesTable, normalize_labels, parse_labels

_LABELS = 1  # the field's number in both versions
_REFERENCE_BYTES = 4
_ABSENT = -1
_SYMBOLS_MAX = 2**28
_MORE = 0x80  # a varint goes on
_ENTRY_BYTES = 200  # what an entry of a cache takes beside its text
_ENCODED_BYTES_MAX = 3  # of a reference to one of as many symbols as can be allowed


class LabelReferences(NamedTuple):
    """Label references of all series of a 2.0 request.

    numbers: of symbols, in order (-1: beyond all symbols); ends: the end of each series' references in `numbers`;
    characters: the length of each symbol.
    """

    numbers: npt.NDArray[np.int32]
    ends: Integers
    characters: Integers


class SeriesInterner:
    """Map of series' label bytes to numbers. A negative number is a fault, with a text from `fault_text`.

    bounds: those of a series apply; a series beyond one is a fault. `cached_bytes`: approximate size of the caches.
    """

    def __init__(self, table: SeriesTable, bounds: Bounds = CEILING) -> None:
        self.table = table
        self.bounds = bounds
        self.cached_bytes = 0
        self._by_labels: dict[bytes, int] = {}
        self._by_symbols: dict[bytes, int] = {}
        self._symbols: dict[str, int] = {}
        self._symbol_texts: list[str] = []
        self._faults: list[str] = []

    def __len__(self) -> int:
        return len(self._by_labels) + len(self._by_symbols) + len(self._symbols)

    def clear_caches(self) -> None:
        """Empty the caches. Assigned numbers stay valid."""
        self._by_labels.clear()
        self._by_symbols.clear()
        self._symbols.clear()
        self._symbol_texts.clear()
        self.cached_bytes = 0

    def fault_text(self, number: int) -> str:
        """Return what is wrong with the labels that got this negative number."""
        return self._faults[-1 - number]

    def series_numbers_v1(self, blob: bytes, found: Fields) -> Integers:
        """Return the numbers of the series of a 1.0 request with these fields."""
        keys = _label_regions(blob, found)
        return self._look_up_numbers(self._by_labels, keys, lambda key: parse_labels(key, self.bounds))

    def series_numbers_v2(self, references: LabelReferences, symbols: Sequence[str]) -> Integers:
        """Return the numbers of the series of a 2.0 request with these references and symbols."""
        known = np.array([*self._symbol_numbers(symbols), _ABSENT], dtype=np.int32)
        ids = known[np.minimum(references.numbers.view(np.uint32), len(symbols))].tobytes()  # -1 is the largest there
        stops = (references.ends * _REFERENCE_BYTES).tolist()
        keys = [ids[begin:stop] for begin, stop in zip([0, *stops][:-1], stops, strict=True)]
        return self._look_up_numbers(self._by_symbols, keys, self._resolve_labels)

    def _look_up_numbers(
        self, known: dict[bytes, int], keys: list[bytes], parse: Callable[[bytes], Labels | str]
    ) -> Integers:
        """Return the numbers of these keys; unknown keys are parsed."""
        numbers = list(map(known.get, keys))
        if None in numbers:
            for key in keys:  # in their order, so that numbers are the same in every run
                if key not in known:
                    known[key] = self._assign_number(parse(key))
                    self.cached_bytes += _ENTRY_BYTES + len(key)
            numbers = list(map(known.get, keys))
        return np.array(numbers, dtype=np.int64)

    def _symbol_numbers(self, symbols: Sequence[str]) -> list[int | None]:
        """Return a number for each text, valid until `clear_caches`."""
        numbers = list(map(self._symbols.get, symbols))
        if None in numbers:
            for text in symbols:
                if text not in self._symbols:
                    self._symbols[text] = len(self._symbol_texts)
                    self._symbol_texts.append(text)
                    self.cached_bytes += _ENTRY_BYTES + len(text)
            numbers = list(map(self._symbols.get, symbols))
        return numbers

    def _resolve_labels(self, key: bytes) -> Labels | str:
        numbers = np.frombuffer(key, dtype=np.int32).tolist()
        if len(numbers) % 2:
            return "it has a label name without a value"
        if _ABSENT in numbers:
            return "it refers to a symbol that is not there"
        if len(numbers) > 2 * self.bounds.labels_per_series:
            return BoundFault(self.bounds.error("labels_per_series"))
        texts = [self._symbol_texts[number] for number in numbers]
        if sum(map(len, texts)) > self.bounds.label_bytes_per_series:
            return BoundFault(self.bounds.error("label_bytes_per_series"))
        return normalize_labels(list(zip(texts[::2], texts[1::2], strict=True)))

    def _assign_number(self, labels: Labels | str) -> int:
        if not isinstance(labels, str):
            return self.table.number_for(labels)
        if labels not in self._faults:
            self._faults.append(labels)
        return -1 - self._faults.index(labels)


def _label_regions(blob: bytes, found: Fields) -> list[bytes]:
    """Return the bytes of each series' label fields: one slice where they are adjacent, as senders write them."""
    run = found.find_runs(_LABELS, LENGTH_DELIMITED)
    regions = [blob[begin:end] for begin, end in zip(run.begin.tolist(), run.end.tolist(), strict=True)]
    scattered = np.flatnonzero(run.size != run.end - run.begin)
    if scattered.size:
        labels = found.select(_LABELS, LENGTH_DELIMITED)
        first, behind = np.searchsorted(labels.owner, (scattered, scattered + 1))
        for series, own in zip(scattered.tolist(), map(slice, first.tolist(), behind.tolist()), strict=True):
            spans = zip(labels.at[own].tolist(), labels.end[own].tolist(), strict=True)
            regions[series] = b"".join(blob[begin:end] for begin, end in spans)
    return regions


def read_label_references(data: Bytes, found: Fields, symbols: Sequence[str], budget: Budget) -> LabelReferences:
    """Read the label references of all series. Raises DecodeError, and BoundError for too many or too long labels."""
    characters = np.fromiter(map(len, symbols), dtype=np.int64, count=len(symbols))
    numbers, behind = _numbers_and_ends(data, found, budget)
    longest = int(characters.max()) if characters.size else 0
    if longest * numbers.size > budget.bounds.label_bytes:
        written_out = np.append(characters, 0)[np.minimum(numbers.view(np.uint32), characters.size)]
        budget.spend("label_bytes", int(written_out.sum()))
    return LabelReferences(numbers, behind, characters)


def _numbers_and_ends(data: Bytes, found: Fields, budget: Budget) -> tuple[npt.NDArray[np.int32], Integers]:
    chunks = found.select(_LABELS, LENGTH_DELIMITED)
    sizes = chunks.end - chunks.begin
    if int(sizes.sum()) > _ENCODED_BYTES_MAX * budget.remaining("fields"):  # from here on each byte costs some thirty
        raise budget.bounds.error("fields")
    packed = join_spans(data, chunks.begin, sizes)
    references, last = read_packed_varints(packed)
    budget.spend("fields", references.size)
    ends = np.cumsum(sizes)
    if (packed[ends[sizes > 0] - 1] >= _MORE).any():
        raise DecodeError("a reference to a symbol is cut off")
    behind = np.searchsorted(last, ends)
    held = np.diff(behind, prepend=0)
    single = found.select(_LABELS, VARINT)
    if not single.owner.size and np.array_equal(chunks.owner, np.arange(found.count)):
        return references, behind
    # protobuf allows a repeated field to be packed in parts, unpacked, mixed, or absent
    order = np.argsort(np.concatenate((np.repeat(chunks.at, held), single.at)), kind="stable")
    numbers = np.where((single.value >= 0) & (single.value < _SYMBOLS_MAX), single.value, -1).astype(np.int32)
    owner = np.concatenate((np.repeat(chunks.owner, held), single.owner))
    return np.concatenate((references, numbers))[order], np.cumsum(np.bincount(owner, minlength=found.count))
