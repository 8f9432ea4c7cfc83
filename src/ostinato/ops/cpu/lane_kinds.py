"""How 4-byte words of activations are multiplied and stored: all that differs between dtypes and paths.

A word is one fp32 value or a pair of bf16 values that stand next to each other along the reduced axis, so
kernels address memory alike for every kind and are compiled once per kind from one source. Knows nothing of
kernels. Invariant: a product accumulates words in sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from llvmlite import ir

from ostinato.errors import ConfigError
from ostinato.ops.cpu.isa import Isa
from ostinato.ops.cpu.products import Bf16Dot, Bf16Fma, Bf16Narrow, Fp32Fma, Product
from ostinato.ops.cpu.vector_ir import LANES, VB16, VF, VH, VI, Lanes, Value, host_has


class Kind(Protocol):
    """Words of one dtype on one instruction path."""

    @property
    def name(self) -> str: ...

    @property
    def value_bytes(self) -> int: ...

    @property
    def product(self) -> Product:
        """How words are multiplied."""
        ...

    def store(self, lanes: Lanes, values: Value, address: Value, mask: Value | None = None) -> None:
        """Store 16 fp32 values in the kind's dtype, those under `mask` alone if given."""
        ...

    def load(self, lanes: Lanes, address: Value, mask: Value | None = None) -> Value:
        """Load 16 values as fp32, zero where the mask is off."""
        ...

    def load_pairs(self, lanes: Lanes, address: Value, mask: Value) -> tuple[Value, Value]:
        """First and second values (fp32) of 16 pairs of neighbours; `mask` is by pair."""
        ...

    def store_pairs(self, lanes: Lanes, pairs: tuple[Value, Value], address: Value, mask: Value) -> None:
        """The reverse of `load_pairs`."""
        ...

    def word_mask(self, lanes: Lanes, word: Value, low: Value, high: Value) -> Value:
        """Bits (i32) of the values of `word` whose index is in [low, high)."""
        ...

    def has_nonfinite(self, lanes: Lanes, words: Value) -> Value:
        """i1 per lane: does the word hold an infinity or NaN?"""
        ...


class Float32:
    """One fp32 value a word."""

    name = "fp32"
    value_bytes = 4

    @property
    def product(self) -> Product:
        return Fp32Fma()

    def store(self, lanes: Lanes, values: Value, address: Value, mask: Value | None = None) -> None:
        if mask is None:
            lanes.store(values, address)
        else:
            lanes.store_masked(values, address, mask)

    def load(self, lanes: Lanes, address: Value, mask: Value | None = None) -> Value:
        return lanes.load(address) if mask is None else lanes.load_masked(address, mask, VF)

    def load_pairs(self, lanes: Lanes, address: Value, mask: Value) -> tuple[Value, Value]:
        low, high = _doubled(lanes, mask)
        near = lanes.load_masked(address, low, VF)
        far = lanes.load_masked(lanes.at(address, 64), high, VF)
        first, second = (_pick(lanes, near, far, range(k, 2 * LANES, 2)) for k in (0, 1))
        return first, second

    def store_pairs(self, lanes: Lanes, pairs: tuple[Value, Value], address: Value, mask: Value) -> None:
        low, high = _doubled(lanes, mask)
        order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        lanes.store_masked(_pick(lanes, *pairs, order[:LANES]), address, low)
        lanes.store_masked(_pick(lanes, *pairs, order[LANES:]), lanes.at(address, 64), high)

    def word_mask(self, lanes: Lanes, word: Value, low: Value, high: Value) -> Value:
        return _index_mask(lanes, word, low, high, 0xFFFFFFFF)

    def has_nonfinite(self, lanes: Lanes, words: Value) -> Value:
        return _exponent_full(lanes, words, 0x7F800000)


class PairedBFloat16:
    """Two bf16 values a word, by generic vector instructions: the value that stands first is added first."""

    name = "bf16"
    value_bytes = 2

    @property
    def product(self) -> Product:
        return Bf16Narrow() if is_narrow() else Bf16Fma()

    def store(self, lanes: Lanes, values: Value, address: Value, mask: Value | None = None) -> None:
        halves = self.narrow(lanes, values)
        if mask is None:
            lanes.store(halves, address)
        else:
            lanes.store_masked(halves, address, mask)

    def narrow(self, lanes: Lanes, values: Value) -> Value:
        return lanes.narrow(values)

    def load(self, lanes: Lanes, address: Value, mask: Value | None = None) -> Value:
        return lanes.widen(lanes.load(address, VH) if mask is None else lanes.load_masked(address, mask, VH))

    def load_pairs(self, lanes: Lanes, address: Value, mask: Value) -> tuple[Value, Value]:
        words, b = lanes.load_masked(address, mask, VI), lanes.b
        low, high = b.shl(words, lanes.ints(16)), b.and_(words, lanes.ints(0xFFFF0000))
        return b.bitcast(low, VF), b.bitcast(high, VF)

    def store_pairs(self, lanes: Lanes, pairs: tuple[Value, Value], address: Value, mask: Value) -> None:
        low, high = (lanes.b.zext(self.narrow(lanes, part), VI) for part in pairs)
        lanes.store_masked(lanes.b.or_(low, lanes.b.shl(high, lanes.ints(16))), address, mask)

    def word_mask(self, lanes: Lanes, word: Value, low: Value, high: Value) -> Value:
        first = lanes.times(word, 2)
        return lanes.b.or_(
            _index_mask(lanes, first, low, high, 0xFFFF),
            _index_mask(lanes, lanes.at(first, 1), low, high, 0xFFFF0000),
        )

    def has_nonfinite(self, lanes: Lanes, words: Value) -> Value:
        return lanes.b.or_(_exponent_full(lanes, words, 0x7F80), _exponent_full(lanes, words, 0x7F800000))


class DottedBFloat16(PairedBFloat16):
    """Two bf16 values a word, by AVX512-BF16 dot products (subnormals count as zero there)."""

    name = "bf16_dot"

    @property
    def product(self) -> Product:
        return Bf16Dot()

    def narrow(self, lanes: Lanes, values: Value) -> Value:
        short = lanes.call("llvm.x86.avx512bf16.cvtneps2bf16.512", VB16, values)
        return lanes.b.bitcast(short, VH)


def _pick(lanes: Lanes, near: Value, far: Value, order: Iterable[int]) -> Value:
    """16 lanes of two vectors, by index into both."""
    return lanes.b.shuffle_vector(near, far, ir.Constant(VI, list(order)))


def _doubled(lanes: Lanes, mask: Value) -> tuple[Value, Value]:
    """A mask by pair as two masks by value."""
    low, high = (_pick(lanes, mask, mask, [k + i // 2 for i in range(LANES)]) for k in (0, LANES // 2))
    return low, high


def _index_mask(lanes: Lanes, index: Value, low: Value, high: Value, bits: int) -> Value:
    b = lanes.b
    inside = b.and_(b.icmp_signed(">=", index, low), b.icmp_signed("<", index, high))
    return b.select(inside, ir.Constant(ir.IntType(32), bits), ir.Constant(ir.IntType(32), 0))


def _exponent_full(lanes: Lanes, words: Value, exponent: int) -> Value:
    return lanes.b.icmp_signed("==", lanes.b.and_(words, lanes.ints(exponent)), lanes.ints(exponent))


def kind_for(dtype: torch.dtype, isa: Isa) -> Kind:
    """The kind for tensors of `dtype` on the instruction path `isa`.

    Raises ConfigError for a dtype that the CPU kernels do not compute in.
    """
    if dtype == torch.float32:
        return Float32()
    if dtype == torch.bfloat16:
        return DottedBFloat16() if isa.dot_products else PairedBFloat16()
    raise ConfigError(f"the CPU kernels compute in bfloat16 or float32, not {dtype}; load with another dtype")


def is_narrow() -> bool:
    """Whether this machine has 16 vector registers of 256 bits, which code must be fitted to."""
    return host_has("avx2") and not host_has("avx512f")


def tile_shape() -> tuple[int, int]:
    """Rows and vectors of a register tile: what fits the vector registers of this machine."""
    return (6, 4) if host_has("avx512f") else (6, 1) if is_narrow() else (2, 2)


def vectors_beside(rows: int) -> int:
    """Vectors of sums that so many rows have registers for."""
    most_rows, most_vectors = tile_shape()
    return max(1, most_rows * most_vectors // rows)
