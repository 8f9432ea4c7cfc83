"""The device side of the KV cache: keys and values of every layer, and the page table.

    slot = page * page_size + offset          slot 0.. of page 0 is trash: only pads write there

Everything is reserved when the pool is made, the trash page and the pad row included, so no step ever allocates. Knows
nothing of sequences or prefixes. Invariant: row 0 of the page table, and entries past a row's pages, are page 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.errors import ConfigError
from ostinato.kv.pages import TRASH_PAGE
from ostinato.ops.cpu.huge_pages import mapped_zeros


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes that the memory of the KV cache follows from."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int

    @property
    def bytes_per_page(self) -> int:
        """Memory of one page, keys and values, all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.page_size

    def pages_in(self, num_bytes: int) -> int:
        """Pages (the trash page included) that fit in `num_bytes`. Raises ConfigError when it is too little."""
        pages = num_bytes // self.bytes_per_page
        if pages < 2:
            raise ConfigError(
                f"kv_memory of {num_bytes} bytes holds {pages} pages of {self.bytes_per_page} bytes; at least 2 are "
                "needed: give more memory or a smaller page_size"
            )
        return pages


class KVPool:
    """Tensors of the cache: k[layer] and v[layer], [num_slots, kv_heads, head_dim], zeroed; page_table int32.

    `page_table` is [max_requests + 1, max_pages_per_request]; a request's row maps its page index to a page id. Beside
    a device the host keeps a copy of it, so that nothing is read back.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        max_requests: int,
        max_pages_per_request: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        self.max_requests = max_requests
        shape = (num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
        self.k = [_zeros(shape, layout.dtype, device) for _ in range(layout.num_layers)]
        self.v = [_zeros(shape, layout.dtype, device) for _ in range(layout.num_layers)]
        self.page_table = torch.full(
            (max_requests + 1, max_pages_per_request), TRASH_PAGE, dtype=torch.int32, device=device
        )
        self._host_table = self.page_table if self.page_table.device.type == "cpu" else self.page_table.cpu()
        self._free_rows = list(range(max_requests, 0, -1))

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.page_table.device

    @property
    def free_rows(self) -> int:
        """Rows of the page table that no request holds."""
        return len(self._free_rows)

    def take_row(self) -> int:
        """A row of the page table for one request (never row 0, the pads')."""
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        """Return a row; its entries become the trash page again."""
        assert row > 0, "row 0 is the pads'"
        assert row not in self._free_rows, f"row {row} is free already"
        self._host_table[row].fill_(TRASH_PAGE)
        self._copy(row)
        self._free_rows.append(row)

    def write_row(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Set entries `start..` of a request's row."""
        assert row > 0, "row 0 is the pads'"
        if pages:
            self._host_table[row, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._copy(row)

    def _copy(self, row: int) -> None:
        """A row of the host's table goes to the device."""
        if self._host_table is not self.page_table:
            self.page_table[row].copy_(self._host_table[row])

    def slots(self, rows: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """KV slots int64 [n] of `positions` [n] of the request(s) whose page-table row(s) are `rows`, beside them."""
        table = self._host_table if positions.device.type == "cpu" else self.page_table
        pages = table[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Memory of the host comes into being as pages are first used: start-up need not touch all of it."""
    if torch.device(device).type == "cpu":
        return mapped_zeros(shape, dtype, huge=True)
    return torch.zeros(shape, dtype=dtype, device=device)
