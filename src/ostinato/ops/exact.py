"""Elementwise functions and softmax in torch whose bits do not depend on where an element stands in its buffer.

torch's own `sigmoid`, `softplus` and `softmax` do depend on it on CPU: the elements after the last full vector go
through another `exp`. What routing needs is built here from operations that IEEE 754 rounds correctly and that torch
runs one by one, so a kernel that repeats them in this order has the same bits, on any device. Knows nothing of
layers. Invariant: f(x)[i] == f(x[i:i+1])[0]; a row of a softmax depends on that row alone.
"""

from __future__ import annotations

import torch

# exp(x) = 2**n * exp(r), n = round(x / ln 2), r = x - n ln 2 in two steps, the first of them exact.
LOG2_E = 1.44269502162933349609375
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194442749023438e-4
ROUND_TO_INT = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
LARGEST_EXPONENT = 88.0  # arguments past it are taken for it
SMALLEST_EXPONENT = -87.0  # below it the result is 0
# exp(r) = 1 + r + r**2 * P(r) on [-ln 2 / 2, ln 2 / 2]; relative error 3.3e-9 before rounding. Fitted, as is the next,
# by iterated reweighted least squares on Chebyshev nodes.
EXP_COEFFICIENTS = (
    0.0013813148252665997,
    0.008369418792426586,
    0.04166845604777336,
    0.16666515171527863,
    0.4999999403953552,
)
# log1p(t) = 2 s (1 + s**2 Q(s**2)) with s = t / (2 + t), t in [0, 1]; relative error 1.1e-10 before rounding.
LOG1P_COEFFICIENTS = (
    0.12152315676212311,
    0.10713376849889755,
    0.1430847942829132,
    0.19999437034130096,
    0.3333333730697632,
)
LANES = 16
"""Sums over a row run over the vectors of so many values first, in order, then over the lanes by halving."""


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of fp32 to about 1 ulp; 0 under -87, no more than exp(88)."""
    x = x.clamp_max(LARGEST_EXPONENT)
    shifted = x * LOG2_E + ROUND_TO_INT
    whole = shifted - ROUND_TO_INT
    r = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = r * EXP_COEFFICIENTS[0] + EXP_COEFFICIENTS[1]
    for coefficient in EXP_COEFFICIENTS[2:]:
        power = power * r + coefficient
    power = power * r * r + r + 1.0
    scale = ((shifted.view(torch.int32) << 23) + 0x3F800000).view(torch.float32)
    return (power * scale).masked_fill(x < SMALLEST_EXPONENT, 0.0)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of fp32."""
    return 1.0 / (1.0 + exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of fp32 without overflow: max(x, 0) + log1p(exp(-|x|))."""
    t = exp(-x.abs())
    s = t / (t + 2.0)
    square = s * s
    series = square * LOG1P_COEFFICIENTS[0] + LOG1P_COEFFICIENTS[1]
    for coefficient in LOG1P_COEFFICIENTS[2:]:
        series = series * square + coefficient
    return x.clamp_min(0.0) + (s + s) * (series * square + 1.0)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root of fp32, rounded correctly, which torch's own on CPU is not."""
    return x.double().sqrt().float()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of fp32 [N, E] over E."""
    powers = exp(x - x.amax(-1, keepdim=True))
    return powers / _row_sum(powers)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """[N, E] -> [N, 1]."""
    rows, width = x.shape
    vectors = torch.nn.functional.pad(x, (0, -width % LANES)).view(rows, -(-width // LANES), LANES)
    total = vectors[:, 0]
    for i in range(1, vectors.shape[1]):
        total = total + vectors[:, i]
    half = LANES // 2
    while half:
        total = total[:, :half] + total[:, half : 2 * half]
        half //= 2
    return total


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), as x / (1 + exp(-x)); by torch's `exp`, which treats all elements alike."""
    return x / (1.0 + torch.exp(-x))
