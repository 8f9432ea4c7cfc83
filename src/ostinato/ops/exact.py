"""Elementwise functions in torch whose bits do not depend on where an element stands in its buffer.

torch's own `sigmoid`, `silu` and `softplus` do depend on it on CPU: the elements after the last full vector
go through another `exp`, so a row's result changes with the number of rows beside it. `torch.exp` and
`torch.log1p` treat all elements alike, and plain arithmetic is exact anyway. Knows nothing of layers.
Invariant: f(x)[i] == f(x[i:i+1])[0].
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), as x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
