"""Which KV pages are free: host-side bookkeeping of page ids, nothing else.

Page 0 is the trash page: pads write there, it is never handed out and never read by a real row. Knows nothing of
tensors, sequences or prefixes. Invariant: a page is free or held, never both; freeing twice is an error.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.errors import ConfigError

TRASH_PAGE = 0


class PageAllocator:
    """A stack of free page ids out of `num_pages`, the trash page included."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2 (one is the trash page), got {num_pages}")
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1 token, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # Low ids first: a lightly used pool touches little memory.
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._held = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has made sure that they are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for page in taken:
            self._held[page] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert self._held[page], f"page {page} is not held"
            self._held[page] = 0
            self._free.append(page)
