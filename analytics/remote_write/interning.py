"""From the label fields of many series to their numbers, with one dictionary look-up for each series.

In 1.0 a series carries its labels: their bytes are the key. In 2.0 it carries references into the request's symbols:
each symbol gets a number that holds for all requests, and the numbers' bytes are the key. Only a key that was never met
is parsed and checked.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from analytics.remote_write.errors import DecodeError
from analytics.remote_write.series import Labels, SeriesTable, checked_labels, parsed_labels
from analytics.remote_write.wire import LENGTH_DELIMITED, VARINT, Bytes, Fields, Integers, joined, packed_numbers

_LABELS = 1  # the field's number in both versions
_REFERENCE_BYTES = 4
_ABSENT = -1
_SYMBOLS_MAX = 2**28
_MORE = 0x80  # a varint goes on


class Interner:
    """Numbers of series by their labels' bytes. A number below zero is a fault: `fault` says which."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
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

    def fault(self, number: int) -> str:
        """What is wrong with the labels that got this number, which is below zero."""
        return self._faults[-1 - number]

    def numbers_v1(self, blob: bytes, found: Fields) -> Integers:
        """The numbers of the series of a 1.0 request, whose fields these are."""
        keys = _label_regions(blob, found)
        return self._numbers(self._by_labels, keys, parsed_labels)

    def numbers_v2(self, data: Bytes, found: Fields, symbols: Sequence[str]) -> Integers:
        """The same for a 2.0 request with these symbols."""
        references, behind = label_references(data, found)
        known = np.array([*self._symbol_numbers(symbols), _ABSENT], dtype=np.int32)
        ids = known[np.minimum(references.view(np.uint32), len(symbols))].tobytes()  # -1 is the largest there
        stops = (behind * _REFERENCE_BYTES).tolist()
        keys = [ids[begin:stop] for begin, stop in zip([0, *stops][:-1], stops, strict=True)]
        return self._numbers(self._by_symbols, keys, self._referenced)

    def _numbers(self, known: dict[bytes, int], keys: list[bytes], parse: Callable[[bytes], Labels | str]) -> Integers:
        """The numbers of these keys; what is not known yet is parsed."""
        numbers = list(map(known.get, keys))
        if None in numbers:
            for key in keys:  # in their order, so that numbers are the same in every run
                if key not in known:
                    known[key] = self._number(parse(key))
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
            numbers = list(map(self._symbols.get, symbols))
        return numbers

    def _referenced(self, key: bytes) -> Labels | str:
        numbers = np.frombuffer(key, dtype=np.int32).tolist()
        if len(numbers) % 2:
            return "it has a label name without a value"
        if _ABSENT in numbers:
            return "it refers to a symbol that is not there"
        texts = [self._symbol_texts[number] for number in numbers]
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


def label_references(data: Bytes, found: Fields) -> tuple[npt.NDArray[np.int32], Integers]:
    """All references of all series, in order (-1: beyond all symbols), and where those of each series end."""
    chunks = found.select(_LABELS, LENGTH_DELIMITED)
    sizes = chunks.end - chunks.begin
    packed = joined(data, chunks.begin, sizes)
    references, last = packed_numbers(packed)
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
