"""From the label fields of many series to their numbers, with one dictionary look-up for each series.

In 1.0 a series carries its labels: their bytes are the key. In 2.0 it carries references into the request's symbols:
each symbol gets a number that holds for all requests, and the numbers' bytes are the key. Only a key that was never met
is parsed and checked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.remote_write.bounds import CEILING, Bounds, Budget
from analytics.remote_write.errors import BoundFault, DecodeError
from analytics.remote_write.series import Labels, SeriesTable, checked_labels, parsed_labels
from analytics.remote_write.wire import LENGTH_DELIMITED, VARINT, Bytes, Fields, Integers, joined, packed_numbers

_LABELS = 1  # the field's number in both versions
_REFERENCE_BYTES = 4
_ABSENT = -1
_SYMBOLS_MAX = 2**28
_MORE = 0x80  # a varint goes on
_ENTRY_BYTES = 200  # what an entry of a cache takes beside its text
_ENCODED_BYTES_MAX = 3  # of a reference to one of as many symbols as can be allowed


class References(NamedTuple):
    """The labels of all series of a 2.0 request.

    numbers: of symbols, in order (-1: beyond all symbols); behind: where those of each series end; characters: the
    length of each symbol.
    """

    numbers: npt.NDArray[np.int32]
    behind: Integers
    characters: Integers


class Interner:
    """Numbers of series by their labels' bytes. A number below zero is a fault: `fault` says which.

    bounds: those of a series hold here; a series beyond one is a fault. `held_bytes`: about what the caches take.
    """

    def __init__(self, table: SeriesTable, bounds: Bounds = CEILING) -> None:
        self.table = table
        self.bounds = bounds
        self.held_bytes = 0
        self._by_labels: dict[bytes, int] = {}
        self._by_symbols: dict[bytes, int] = {}
        self._symbols: dict[str, int] = {}
        self._symbol_texts: list[str] = []
        self._faults: list[str] = []

    def __len__(self) -> int:
        return len(self._by_labels) + len(self._by_symbols) + len(self._symbols)

    def forget(self) -> None:
        """Empty the caches. Numbers that were given stay."""
        self._by_labels.clear()
        self._by_symbols.clear()
        self._symbols.clear()
        self._symbol_texts.clear()
        self.held_bytes = 0

    def fault(self, number: int) -> str:
        """What is wrong with the labels that got this number, which is below zero."""
        return self._faults[-1 - number]

    def numbers_v1(self, blob: bytes, found: Fields) -> Integers:
        """The numbers of the series of a 1.0 request, whose fields these are."""
        keys = _label_regions(blob, found)
        return self._numbers(self._by_labels, keys, lambda key: parsed_labels(key, self.bounds))

    def numbers_v2(self, references: References, symbols: Sequence[str]) -> Integers:
        """The same for a 2.0 request with these references and symbols."""
        known = np.array([*self._symbol_numbers(symbols), _ABSENT], dtype=np.int32)
        ids = known[np.minimum(references.numbers.view(np.uint32), len(symbols))].tobytes()  # -1 is the largest there
        stops = (references.behind * _REFERENCE_BYTES).tolist()
        keys = [ids[begin:stop] for begin, stop in zip([0, *stops][:-1], stops, strict=True)]
        return self._numbers(self._by_symbols, keys, self._referenced)

    def _numbers(self, known: dict[bytes, int], keys: list[bytes], parse: Callable[[bytes], Labels | str]) -> Integers:
        """The numbers of these keys; what is not known yet is parsed."""
        numbers = list(map(known.get, keys))
        if None in numbers:
            for key in keys:  # in their order, so that numbers are the same in every run
                if key not in known:
                    known[key] = self._number(parse(key))
                    self.held_bytes += _ENTRY_BYTES + len(key)
            numbers = list(map(known.get, keys))
        return np.array(numbers, dtype=np.int64)

    def _symbol_numbers(self, symbols: Sequence[str]) -> list[int | None]:
        """A number for each text that holds until `forget`."""
        numbers = list(map(self._symbols.get, symbols))
        if None in numbers:
            for text in symbols:
                if text not in self._symbols:
                    self._symbols[text] = len(self._symbol_texts)
                    self._symbol_texts.append(text)
                    self.held_bytes += _ENTRY_BYTES + len(text)
            numbers = list(map(self._symbols.get, symbols))
        return numbers

    def _referenced(self, key: bytes) -> Labels | str:
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
        return checked_labels(list(zip(texts[::2], texts[1::2], strict=True)))

    def _number(self, labels: Labels | str) -> int:
        if not isinstance(labels, str):
            return self.table.number(labels)
        if labels not in self._faults:
            self._faults.append(labels)
        return -1 - self._faults.index(labels)


def _label_regions(blob: bytes, found: Fields) -> list[bytes]:
    """The bytes of each series's label fields: one slice where they stand together, as senders write them."""
    run = found.run(_LABELS, LENGTH_DELIMITED)
    regions = [blob[begin:end] for begin, end in zip(run.begin.tolist(), run.end.tolist(), strict=True)]
    scattered = np.flatnonzero(run.size != run.end - run.begin)
    if scattered.size:
        labels = found.select(_LABELS, LENGTH_DELIMITED)
        first, behind = np.searchsorted(labels.owner, (scattered, scattered + 1))
        for series, own in zip(scattered.tolist(), map(slice, first.tolist(), behind.tolist()), strict=True):
            spans = zip(labels.at[own].tolist(), labels.end[own].tolist(), strict=True)
            regions[series] = b"".join(blob[begin:end] for begin, end in spans)
    return regions


def label_references(data: Bytes, found: Fields, symbols: Sequence[str], budget: Budget) -> References:
    """All references of all series; raises DecodeError, and BoundError for too many, or too long texts behind them."""
    characters = np.fromiter(map(len, symbols), dtype=np.int64, count=len(symbols))
    numbers, behind = _numbers_and_ends(data, found, budget)
    longest = int(characters.max()) if characters.size else 0
    if longest * numbers.size > budget.bounds.label_bytes:
        written_out = np.append(characters, 0)[np.minimum(numbers.view(np.uint32), characters.size)]
        budget.spend("label_bytes", int(written_out.sum()))
    return References(numbers, behind, characters)


def _numbers_and_ends(data: Bytes, found: Fields, budget: Budget) -> tuple[npt.NDArray[np.int32], Integers]:
    chunks = found.select(_LABELS, LENGTH_DELIMITED)
    sizes = chunks.end - chunks.begin
    if int(sizes.sum()) > _ENCODED_BYTES_MAX * budget.left("fields"):  # each byte costs some thirty from here on
        raise budget.bounds.error("fields")
    packed = joined(data, chunks.begin, sizes)
    references, last = packed_numbers(packed)
    budget.spend("fields", references.size)
    ends = np.cumsum(sizes)
    if (packed[ends[sizes > 0] - 1] >= _MORE).any():
        raise DecodeError("a reference to a symbol is cut off")
    behind = np.searchsorted(last, ends)
    held = np.diff(behind, prepend=0)
    single = found.select(_LABELS, VARINT)
    if not single.owner.size and np.array_equal(chunks.owner, np.arange(found.count)):
        return references, behind
    # protobuf allows a list to be written in parts, one by one, and both; or not at all
    order = np.argsort(np.concatenate((np.repeat(chunks.at, held), single.at)), kind="stable")
    numbers = np.where((single.value >= 0) & (single.value < _SYMBOLS_MAX), single.value, -1).astype(np.int32)
    owner = np.concatenate((np.repeat(chunks.owner, held), single.owner))
    return np.concatenate((references, numbers))[order], np.cumsum(np.bincount(owner, minlength=found.count))
