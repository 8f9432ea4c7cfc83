"""Named scratch memory at fixed addresses, shared by every layer and every bucket of a callable.

A captured graph may only touch memory that stays put. Activations therefore live here: one flat buffer per
name, allocated once for the largest step, handed out as leading views. Graphs of all buckets share it, so a
capture holds no memory of its own. Knows nothing of who computes.
"""

from __future__ import annotations

import math

import torch


class Workspace:
    """Flat buffers by name; `take` gives a view of the leading elements in the asked shape."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._flat: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Allocate (zeroed) the buffer `name` at its largest size. Must precede every capture."""
        if name in self._flat:
            raise ValueError(f"workspace buffer {name!r} is reserved already")
        self._flat[name] = torch.zeros(math.prod(shape), dtype=dtype, device=self.device)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A contiguous view `shape` of the buffer's leading elements; never allocates.

        Raises ValueError when the view is larger than what was reserved.
        """
        flat = self._flat[name]
        n = math.prod(shape)
        if n > flat.numel():
            raise ValueError(f"workspace buffer {name!r} holds {flat.numel()} elements, {shape} needs {n}")
        return flat[:n].view(shape)

    def fill(self, value: float) -> None:
        """Overwrite every buffer (poison for tests and `verify`); integers take the truncated value."""
        for flat in self._flat.values():
            flat.fill_(value if flat.is_floating_point() else 0)

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())
