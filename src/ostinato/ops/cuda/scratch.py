"""Scratch memory on the device by name, shared by all launches of an op set, which run one after another.

A buffer that has become too small is replaced and kept: a captured graph may still write to it. Knows nothing of what
lies in it. Invariant: memory that was handed out stays allocated as long as the op set.
"""

from __future__ import annotations

import torch


class Scratch:
    """Flat buffers by name, each at least as large as the largest view ever taken of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._replaced: list[torch.Tensor] = []

    def take(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """`size` values of `dtype`; what they hold is left over from earlier launches."""
        found = self._buffers.get(name)
        if found is None or found.numel() < size or found.dtype != dtype:
            if found is not None:
                self._replaced.append(found)
            found = self._buffers[name] = torch.zeros(max(size, 1), dtype=dtype, device=self.device)
        return found[:size]
