"""Scratch memory of an op set: bytes by name, shared by all of its launches, which run one after another.

Knows nothing of what lies in them. Invariant: a launch's buffers live as long as the launch.
"""

from __future__ import annotations

import torch

_LINE = 64


class Scratch:
    """Bytes by name, shared by launches; a buffer that is too small is replaced by one twice as large.

    Launches keep the buffer they were bound to.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes` bytes, aligned to a cache line."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes:
            size = max(num_bytes, _LINE, 0 if found is None else 2 * found.numel())
            found = torch.empty(size + _LINE, dtype=torch.uint8)
            found = found[-found.data_ptr() % _LINE :]
            self._buffers[name] = found
        return found

    @property
    def nbytes(self) -> int:
        """What all buffers hold."""
        return sum(buffer.numel() for buffer in self._buffers.values())
