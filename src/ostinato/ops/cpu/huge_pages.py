"""Large host memory: mappings of its own whose pages come into being, zeroed, when they are first written.

Weights ask for huge pages: fewer address translations as they are read front to back, fewer faults as they are
first written. A wish to the kernel, which may ignore it; nothing depends on it. Knows nothing of what lies in the
memory. Invariant: what nobody wrote takes no memory, reads as zero, and is given back with the last tensor over it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import torch

HUGE_PAGE = 2 << 20
_PAGE = mmap.PAGESIZE
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 14, 23  # Linux, the last one since 5.14
_SMALLEST = 64 << 10  # under this a mapping of its own wastes more than it saves


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge: bool = False) -> torch.Tensor:
    """Zeros [shape] that take memory page by page as they are written; `huge`: in huge pages where there are any."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALLEST or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    huge = huge and size >= HUGE_PAGE
    whole_pages = -(-size // HUGE_PAGE) * HUGE_PAGE  # the last one too, which the tensor may not fill
    length = whole_pages + HUGE_PAGE if huge else size
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE if huge else 0
    if huge:
        prefer_huge_pages(whole[start : start + whole_pages])
    return whole[start : start + size].view(dtype).view(shape)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under `tensor`, best before it is first written. Linux alone; elsewhere nothing."""
    _advise(tensor, _MADV_HUGEPAGE)


def give_back(tensor: torch.Tensor) -> None:
    """Give back the memory of mapped zeros that nobody needs any more, in whole huge pages: they read as zero again."""
    _advise(tensor, _MADV_DONTNEED)


def populate(address: int, size: int) -> bool:
    """Let the small pages under `size` bytes of mapped zeros come into being now, whatever they hold; False where the
    system cannot. Other threads may read and write them meanwhile.
    """
    start = address // _PAGE * _PAGE
    length = -(-(address + size - start) // _PAGE) * _PAGE
    if sys.platform != "linux" or size <= 0:
        return False
    at, whole = ctypes.c_void_p(start), ctypes.c_size_t(length)
    return int(ctypes.CDLL(None).madvise(at, whole, _MADV_POPULATE_WRITE)) == 0


def _advise(tensor: torch.Tensor, advice: int) -> None:
    size = tensor.numel() * tensor.element_size()
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (tensor.data_ptr() + size - start) // HUGE_PAGE * HUGE_PAGE
    if sys.platform == "linux" and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
