"""Huge pages for large tensors that are read front to back: fewer address translations, fewer faults at first touch.

A wish to the kernel, which may ignore it; nothing depends on it. Knows nothing of what lies in the memory.
"""

from __future__ import annotations

import ctypes
import sys

import torch

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # Linux


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under `tensor`, best before it is first written. Linux alone; elsewhere nothing."""
    size = tensor.numel() * tensor.element_size()
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (tensor.data_ptr() + size - start) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
