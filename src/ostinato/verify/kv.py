"""The pages that a verification works in: put back before a step, compared after it.

Whole pages are compared, as bits: attention may lay out a page in an order of its own. Knows nothing of steps.
Invariant: the trash page and whatever no request wrote hold NaN, so that reading them shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ostinato.kv.pages import TRASH_PAGE
from ostinato.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class KVDifference:
    """A page that holds something else: in which layer, whether in keys or values, and its id in the pool."""

    layer: int
    part: str
    page: int


class LiveKV:
    """`pages` of the pool, their neighbours between the first and the last one included."""

    def __init__(self, pool: KVPool, pages: Sequence[int]) -> None:
        self._first, self._last = min(pages), max(pages) + 1
        self._size = pool.page_size
        kinds = (("keys", pool.k), ("values", pool.v))
        self._caches = [
            (layer, part, cache.view(pool.num_pages, -1))
            for layer in range(pool.layout.num_layers)
            for part, caches in kinds
            for cache in (caches[layer],)
        ]
        self._saved: list[torch.Tensor] = []

    def clear(self) -> None:
        """NaN everywhere."""
        for _, _, cache in self._caches:
            cache[self._first : self._last] = torch.nan
        self._spoil_trash()

    def _spoil_trash(self) -> None:
        for _, _, cache in self._caches:
            cache[TRASH_PAGE] = torch.nan

    def save(self) -> None:
        """What is there now is what `restore` puts back."""
        self._saved = [cache[self._first : self._last].clone() for _, _, cache in self._caches]

    def restore(self, slots: torch.Tensor | None = None) -> None:
        """Put the pages of these slots back, or all of them; the trash page becomes NaN."""
        pages = None if slots is None else self._pages(slots)
        for (_, _, cache), saved in zip(self._caches, self._saved, strict=True):
            if pages is None:
                cache[self._first : self._last] = saved
            else:
                cache[pages + self._first] = saved[pages]
        self._spoil_trash()

    def expect(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Pages of these slots as they are now, for `differences`."""
        pages = self._pages(slots)
        return [cache[pages + self._first].clone() for _, _, cache in self._caches]

    def differences(self, slots: torch.Tensor, expected: list[torch.Tensor]) -> Iterator[KVDifference]:
        """Pages that hold neither what was saved nor, for pages of these slots, what was expected; one a layer."""
        pages = self._pages(slots)
        for (layer, part, cache), saved, own in zip(self._caches, self._saved, expected, strict=True):
            kept = saved[pages]
            saved[pages] = own
            now, want = _bits(cache[self._first : self._last]), _bits(saved)
            if not torch.equal(now, want):
                page = int((now != want).any(1).nonzero()[0])
                yield KVDifference(layer, part, page + self._first)
            saved[pages] = kept

    def pages_of(self, slots: torch.Tensor) -> frozenset[int]:
        """Ids of the pages that these slots are in."""
        return frozenset((self._pages(slots) + self._first).tolist())

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor(sorted({slot // self._size for slot in slots.tolist()})).long() - self._first


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """As integers, in which a NaN is equal to itself."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return cache.view(widths[cache.element_size()])
