"""Paged attention around its inner loops: writing pages, cleaning them, merging chunks, finishing rows.

Works on the row state and sums of `attention_ir`, by address. Knows nothing of requests. Invariant: merging
is exact where either side saw nothing, so a chunk that a tile computes and one that it skips leave the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llvmlite import ir

from ostinato.ops.cpu.attention_ir import (
    LOWEST,
    PAGE,
    STATE_BYTES,
    mix_rows,
    score_rows,
    softmax_rows,
    softmax_stream,
)
from ostinato.ops.cpu.attention_stream_ir import mix_stream, score_stream
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.native import NativeFunction
from ostinato.ops.cpu.vector_ir import I32, I64, LANES, VI, Lanes, Value


def write_kv_row(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(k, v, k_page, v_page, offset, dim): put one head's key and value of one position into their pages.

    The position is `offset` within the pages; no other position is touched.
    """
    k, v, k_page, v_page, offset, dim = args
    b = lanes.b
    column = lanes.at(k_page, lanes.times(offset, 4))

    def key_word(w: Value) -> None:
        word = lanes.load(lanes.at(k, lanes.times(w, 4)), I32)
        lanes.store(word, lanes.at(column, lanes.times(w, 4 * PAGE)), 4)

    lanes.each(b.sdiv(lanes.times(dim, kind.value_bytes), lanes.i64(4)), key_word)
    byte = lanes.times(offset, kind.value_bytes)
    line = lanes.at(v_page, b.mul(b.ashr(byte, lanes.i64(2)), lanes.times(dim, 4)))
    line = lanes.at(line, b.and_(byte, lanes.i64(3)))
    typ = ir.IntType(8 * kind.value_bytes)

    def value(d: Value) -> None:
        bits = lanes.load(lanes.at(v, lanes.times(d, kind.value_bytes)), typ)
        lanes.store(bits, lanes.at(line, lanes.times(d, 4)))

    lanes.each(dim, value)


def clean_page(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(source, target, low, high, dim, found): copy a V page, zeros at positions outside [low, high).

    The int64 at `found` becomes 1 if an infinity or NaN is left. Pages hold stale memory past a sequence's
    end, and zero probability times stale NaN would still be NaN.
    """
    source, target, low, high, dim, out = args
    b = lanes.b
    vectors = b.sdiv(lanes.at(dim, LANES - 1), lanes.i64(LANES))

    def word(w: Value, found: list[Value]) -> list[Value]:
        mask = lanes.splat(kind.word_mask(lanes, w, low, high))
        line = b.mul(w, lanes.times(dim, 4))

        def vector(j: Value, found: list[Value]) -> list[Value]:
            there = lanes.lanes_below(b.sub(dim, lanes.times(j, LANES)))
            at = lanes.at(line, lanes.times(j, 64))
            words = b.and_(lanes.load_masked(lanes.at(source, at), there, VI), mask)
            lanes.store_masked(words, lanes.at(target, at), there)
            return [b.or_(found[0], b.sext(kind.has_nonfinite(lanes, words), VI))]

        return lanes.loop(vectors, found, vector)

    count = lanes.i64(PAGE * kind.value_bytes // 4)
    (found,) = lanes.loop(count, [ir.Constant(VI, [0] * LANES)], word)
    flag = b.and_(b.zext(lanes.first_lane(lanes.fold(found, b.or_)), I64), lanes.i64(1))
    lanes.store(b.or_(lanes.load(out, I64, 8), flag), out, 8)


def clear_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(n, state, acc, acc_stride): rows that saw nothing yet; `acc_stride` is a multiple of 64 bytes."""
    n, state, acc, acc_stride = args

    def row(r: Value) -> None:
        at = lanes.at(state, lanes.times(r, STATE_BYTES))
        lanes.store(lanes.floats(LOWEST), at)
        lanes.store(lanes.floats(0.0), lanes.at(at, 64))
        line = lanes.at(acc, lanes.b.mul(r, acc_stride))
        vectors = lanes.b.sdiv(acc_stride, lanes.i64(64))
        lanes.each(vectors, lambda j: lanes.store(lanes.floats(0.0), lanes.at(line, lanes.times(j, 64))))

    lanes.each(n, row)


def merge_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(n, state, acc, more, more_acc, acc_stride): add a later chunk to the chunks before it."""
    n, state, acc, more, more_acc, acc_stride = args
    b = lanes.b

    def row(r: Value) -> None:
        here, there = (lanes.at(base, lanes.times(r, STATE_BYTES)) for base in (state, more))
        old, new = lanes.load(here), lanes.load(there)
        lanes.barrier()  # see `_raise_maximum`
        maximum = lanes.max(old, new)
        keep, take = lanes.exp2(b.fsub(old, maximum)), lanes.exp2(b.fsub(new, maximum))

        def joined(to: Value, source: Value) -> None:
            lanes.store(lanes.fma(lanes.load(source), take, b.fmul(lanes.load(to), keep)), to)

        lanes.store(maximum, here)
        joined(lanes.at(here, 64), lanes.at(there, 64))
        line, more_line = (lanes.at(base, b.mul(r, acc_stride)) for base in (acc, more_acc))

        def vector(j: Value) -> None:
            offset = lanes.times(j, 64)
            joined(lanes.at(line, offset), lanes.at(more_line, offset))

        lanes.each(b.sdiv(acc_stride, lanes.i64(64)), vector)

    lanes.each(n, row)


def finish_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(n, dim, state, acc, acc_stride, outs): sums / sum of probabilities, to each row's address at `outs`.

    A row that saw nothing is zero.
    """
    n, dim, state, acc, acc_stride, outs = args
    b = lanes.b
    zero = lanes.floats(0.0)

    def row(r: Value) -> None:
        total = lanes.sum_lanes(lanes.load(lanes.at(state, lanes.times(r, STATE_BYTES), 64)))
        nothing = b.fcmp_ordered("==", total, zero)
        line = lanes.at(acc, b.mul(r, acc_stride))
        to = lanes.load(lanes.at(outs, lanes.times(r, 8)), I64, 8)

        def vector(j: Value) -> None:
            # Adding zero makes -0 from an underflow equal to the 0 of a block that was skipped.
            value = b.fadd(b.fdiv(lanes.load(lanes.at(line, lanes.times(j, 64))), total), zero)
            mask = lanes.lanes_below(b.sub(dim, lanes.times(j, LANES)))
            address = lanes.at(to, lanes.times(j, LANES * kind.value_bytes))
            kind.store(lanes, b.select(nothing, zero, value), address, mask)

        lanes.each(b.sdiv(lanes.at(dim, LANES - 1), lanes.i64(LANES)), vector)

    lanes.each(n, row)


ATTENTION_FUNCTIONS: Mapping[str, NativeFunction] = MappingProxyType(
    {
        "score_rows": NativeFunction(6, score_rows),
        "softmax_rows": NativeFunction(10, softmax_rows),
        "mix_rows": NativeFunction(10, mix_rows),
        "softmax_stream": NativeFunction(13, softmax_stream),
        "score_stream": NativeFunction(8, score_stream),
        "mix_stream": NativeFunction(10, mix_stream),
        "write_kv_row": NativeFunction(6, write_kv_row),
        "clean_page": NativeFunction(6, clean_page),
        "clear_rows": NativeFunction(4, clear_rows),
        "merge_rows": NativeFunction(6, merge_rows),
        "finish_rows": NativeFunction(6, finish_rows),
    }
)
