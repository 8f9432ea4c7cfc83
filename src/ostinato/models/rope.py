"""Rotary position embeddings: what a config says about them, and the table of cosines and sines.

Knows nothing of layers or kernels. Invariant: the table is a function of the position alone; a rope whose
frequencies would change with a request's length (dynamic, longrope) is fixed for a deployment by its longest
position, so a token's rotation never depends on what comes after it or on its batch-mates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import torch

from ostinato.errors import ModelError

_ROWS_AT_ONCE = 4096  # of the table, so that fp64 takes little memory


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rope: its type, base, rotary dimension and the raw parameters of its type.

    `max_positions` is the model's longest context, `original_max_positions` that of its pre-training.
    """

    rope_type: str
    theta: float
    dim: int
    max_positions: int
    original_max_positions: int
    params: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """A positive parameter; ModelError when it is absent without a default, or no positive number."""
        value = self.params.get(key)
        value = default if value is None else value
        if not is_positive(value):
            raise ModelError(
                f"rope type {self.rope_type!r} needs a number {key!r} in rope_parameters, positive and finite, "
                f"got {value!r}; correct config.json"
            )
        return float(value)

    def log(self, name: str, value: float) -> float:
        """The logarithm of `value`, by which a type divides; ModelError when it is not positive."""
        if value <= 1:
            raise ModelError(
                f"rope type {self.rope_type!r} needs {name} above 1, got {value:g}; correct config.json"
            )
        return math.log(value)


def is_positive(value: object) -> TypeGuard[float]:
    """Whether a value of a config is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= sys.float_info.max  # not so for NaN, and safe for integers that no float can hold


def rope_table(rope: RopeConfig, num_positions: int) -> torch.Tensor:
    """fp32 [num_positions, dim]: dim / 2 cosines, then dim / 2 sines, scaled by the type's attention factor.

    Angles are fp32, as in the models' own code; their cosines and sines are rounded once from fp64, because torch's in
    fp32 are other bits on other CPUs. Raises ModelError when `num_positions` is more than the model's context.
    """
    if num_positions > rope.max_positions:
        raise ModelError(
            f"{num_positions} positions are more than the model's {rope.max_positions} "
            "(max_position_embeddings); lower the context length"
        )
    inv_freq, scale = _ROPE_TYPES[rope.rope_type](rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * inv_freq
    table = torch.empty(num_positions, 2 * inv_freq.numel(), dtype=torch.float32)
    for first in range(0, num_positions, _ROWS_AT_ONCE):
        wide = angles[first : first + _ROWS_AT_ONCE].double()
        table[first : first + _ROWS_AT_ONCE] = torch.cat((wide.cos(), wide.sin()), dim=-1)
    return table.mul_(scale)


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _default(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    return 1.0 / (rope.theta ** _exponents(rope.dim)), 1.0


def _linear(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    return _default(rope, num_positions)[0] / rope.number("factor"), 1.0


def _llama3(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.

    With equal factors, as Llama 4 Scout has them, nothing lies between.
    """
    inv_freq, _ = _default(rope, num_positions)
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high < low:
        raise ModelError(
            f"rope type 'llama3' needs a high_freq_factor of its low_freq_factor {low:g} or more, got {high:g}; "
            "correct config.json"
        )
    context = rope.original_max_positions
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - low) / ((high - low) or 1.0)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = torch.where(wavelength > context / low, inv_freq / factor, blended)
    return torch.where(wavelength < context / high, inv_freq, stretched), 1.0


def _yarn(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): extrapolate fast dimensions, interpolate slow ones, a linear ramp between."""
    context, dim = rope.original_max_positions, rope.dim
    factor = rope.number("factor", rope.max_positions / context)
    log_theta = rope.log("rope_theta", rope.theta)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * log_theta)

    low = dimension_of(rope.number("beta_fast", 32))
    high = dimension_of(rope.number("beta_slow", 1))
    if rope.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** _exponents(dim)
    inv_freq = (1.0 / (factor * frequencies)) * ramp + (1.0 / frequencies) * (1 - ramp)
    return inv_freq, rope.number("attention_factor", _yarn_attention_factor(rope, factor))


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if rope.params.get("mscale") and rope.params.get("mscale_all_dim"):
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one factor per dimension, a short and a long set.

    The long set is used when the deployment's context exceeds the original one. PhiMoE names the attention
    factors of both sets (`short_mscale`, `long_mscale`).
    """
    context = rope.original_max_positions
    which = "long" if num_positions > context else "short"
    factors = rope.params.get(f"{which}_factor")
    count = rope.dim // 2
    if not isinstance(factors, (list, tuple)) or len(factors) != count or not all(map(is_positive, factors)):
        raise ModelError(
            f"rope type 'longrope' needs {count} numbers in {which}_factor, all positive; correct config.json"
        )
    factor = rope.number("factor", rope.max_positions / context)
    default = 1.0
    if factor > 1:
        log_context = rope.log("original_max_position_embeddings", context)
        default = math.sqrt(1 + math.log(factor) / log_context)
    scale = rope.number(f"{which}_mscale", rope.number("attention_factor", default))
    per_dim = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (per_dim * rope.theta ** _exponents(rope.dim)), scale


_ROPE_TYPES: Mapping[str, Callable[[RopeConfig, int], tuple[torch.Tensor, float]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        # Dynamic NTK changes nothing within max_position_embeddings, and more is refused.
        "dynamic": _default,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
)
ROPE_TYPES = tuple(_ROPE_TYPES)
