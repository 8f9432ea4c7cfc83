"""Transposing blocks of 4-byte words in registers, 16 by 16: what packing weights consists of.

Knows nothing of weights. Invariant: exactly `rows` x `words` values are read and written.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import I32, LANES, VI, Lanes, Value


def transposed(lanes: Lanes, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 words, transposed by exchanging halves of pairs at distances 1, 2, 4, 8."""
    vectors = list(rows)
    for distance in (1, 2, 4, 8):
        take_low = [lane ^ distance | LANES if lane & distance else lane for lane in range(LANES)]
        take_high = [lane | LANES if lane & distance else lane ^ distance for lane in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                a, b = vectors[i], vectors[i + distance]
                vectors[i], vectors[i + distance] = (
                    lanes.b.shuffle_vector(a, b, ir.Constant(VI, order)) for order in (take_low, take_high)
                )
    return vectors


@intrinsic
def transpose_words(
    typing_context: Any,
    source: Any,
    source_stride: Any,
    target: Any,
    target_stride: Any,
    rows: Any,
    words: Any,
) -> tuple[Any, Any]:
    """target[j][i] = source[i][j] for i < rows <= 16 and j < words; strides in bytes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, target_stride, rows, words = args
        lanes = Lanes(builder)

        def row(i: Value) -> Value:
            return lanes.at(source, builder.mul(source_stride, i))

        def column(j: Value) -> Value:
            return lanes.at(target, builder.mul(target_stride, j))

        def block(k: Value) -> None:
            first = lanes.times(k, LANES)
            offset = lanes.times(first, 4)
            loaded = [lanes.load(lanes.at(row(lanes.i64(i)), offset), VI, 4) for i in range(LANES)]
            for j, vector in enumerate(transposed(lanes, loaded)):
                lanes.store(vector, column(lanes.at(first, j)), 4)

        def word(i: Value, j: Value) -> None:
            value = lanes.load(lanes.at(row(i), lanes.times(j, 4)), I32, 4)
            lanes.store(value, lanes.at(column(j), lanes.times(i, 4)), 4)

        whole = builder.icmp_signed("==", rows, lanes.i64(LANES))
        blocks = builder.select(whole, builder.sdiv(words, lanes.i64(LANES)), lanes.i64(0))
        lanes.each(blocks, block)
        done = lanes.times(blocks, LANES)
        left = builder.sub(words, done)
        lanes.each(rows, lambda i: lanes.each(left, lambda j: word(i, lanes.at(done, j))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit
