"""Scores and mixing of values where time is that of memory: pages are read in the order in which they lie.

The twins of `score_rows` and `mix_rows` for few rows a KV head, as in decode: page by page, all its heads, so that
the hardware's own prefetching sees one long run. (Prefetches beyond what memory delivers are dropped: asking for a
whole block at the speed of arithmetic is of little use, and each part is asked for twice.) Knows nothing of
requests. Invariant: a row's arithmetic is that of the twins, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ostinato.ops.cpu.attention_ir import BLOCK, LINES_A_ROW, PAGE, SCORE_BYTES, STATE_BYTES, multiply
from ostinato.ops.cpu.lane_kinds import Kind, vectors_beside
from ostinato.ops.cpu.vector_ir import I32, I64, LANES, VI, Keep, Lanes, Value

STREAM_ROWS = 6  # most rows of a KV head whose pages are streamed
# Parts of pages (of one head) by which a stream is asked for ahead of use: twice, since an asking may be dropped.
AHEAD = (4, 2)


def _stream(
    lanes: Lanes,
    args: tuple[Value, Value, Value, Value, Value],
    size: Value,
    lead: Callable[[int, Value], Value],
    body: Callable[[int, Value, Value, Value, list[Value]], None],
) -> None:
    """`body(n, page, head, part, following)` for every page of [low, high) and every head, in the order of memory.

    `args` are (n, heads, pages, low, high). `part` is the address of the head's `size` bytes of the page, `following`
    those of the parts to ask memory for; the addresses behind `pages` go on with what is read after these pages.
    `lead(n, place)`: how many parts beyond were asked for before, when part `place` of the block is read.
    """
    n, heads, pages, low, high = args
    b = lanes.b

    def address_of(place: Value) -> Value:
        page = b.sdiv(place, heads)
        address = lanes.load(lanes.at(pages, lanes.times(page, 8)), I64, 8)
        return lanes.at(address, b.mul(b.sub(place, b.mul(page, heads)), size))

    def of_rows(count: int) -> None:
        def over_pages(k: Value) -> None:
            page = b.add(low, k)

            def over_heads(head: Value) -> None:
                part = lanes.at(lanes.load(lanes.at(pages, lanes.times(page, 8)), I64, 8), b.mul(head, size))
                place = lanes.at(b.mul(page, heads), head)
                asked = [b.add(place, lead(count, place)), place]
                following = [address_of(lanes.at(at, n)) for at, n in zip(asked, AHEAD, strict=True)]
                body(count, page, head, part, following)

            lanes.each(heads, over_heads)

        lanes.each(b.sub(high, low), over_pages)

    lanes.cases(n, range(1, STREAM_ROWS + 1), of_rows)


def score_stream(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(rows, n, heads, pages, low, high, words, out): scores of `n` query rows of each head against the pages [low,
    high).

    `rows` and `out` hold all rows of the first head, then of the next; a row of scores is as in `score_rows`.
    """
    rows, n, heads, pages, low, high, words, out = args

    def body(count: int, page: Value, head: Value, part: Value, following: list[Value]) -> None:
        first = lanes.times(head, count)
        queries = [lanes.load(lanes.at(rows, lanes.times(first, 8), 8 * m), I64, 8) for m in range(count)]

        def step(word: Value, totals: list[Value]) -> list[Value]:
            across, along = lanes.times(word, 64), lanes.times(word, 4)
            for further in following:
                lanes.prefetch(lanes.at(further, across), Keep.SECOND)
            loaded = [lanes.load(lanes.at(part, across), VI)]
            return multiply(
                lanes, kind, totals, loaded, lambda m: lanes.load(lanes.at(queries[m], along), I32)
            )

        sums = lanes.loop(words, [lanes.floats(0.0)] * count, step)
        line = lanes.at(out, lanes.times(first, SCORE_BYTES), lanes.times(page, 64))
        for m, total in enumerate(sums):
            lanes.store(total, lanes.at(line, m * SCORE_BYTES))

    _stream(lanes, (n, heads, pages, low, high), lanes.times(words, 64), lambda n, place: lanes.i64(0), body)


def _asked_before(lanes: Lanes, heads: Value, size: Value, n: int, place: Value) -> Value:
    """`lead` of the values: the softmax asked for parts while nothing was read. They are used up bit by bit until the
    block's end, else memory would idle now instead.
    """
    b = lanes.b
    parts = lanes.times(heads, BLOCK // PAGE)
    asked = b.sdiv(lanes.times(heads, n * 64 * LINES_A_ROW), size)
    asked = b.select(b.icmp_signed("<", asked, parts), asked, parts)
    return b.sdiv(b.mul(b.sub(parts, place), asked), parts)


def mix_stream(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(probs, n, heads, pages, low, high, dim, acc, acc_stride, state): `mix_rows` for `n` rows of each head, rows
    lying as in `score_stream`.
    """
    probs, n, heads, pages, low, high, dim, acc, acc_stride, state = args
    words = PAGE * kind.value_bytes // 4
    size = lanes.times(dim, 4 * words)
    b = lanes.b

    def body(count: int, page: Value, head: Value, part: Value, following: list[Value]) -> None:
        rows = [lanes.at(lanes.times(head, count), m) for m in range(count)]
        is_first = b.icmp_signed("==", page, low)
        rescales = [lanes.load(lanes.at(state, lanes.times(row, STATE_BYTES), 128)) for row in rows]
        rescales = [b.select(is_first, rescale, lanes.floats(1.0)) for rescale in rescales]
        lines = [lanes.at(probs, lanes.times(row, SCORE_BYTES), lanes.times(page, 4 * words)) for row in rows]

        def columns(vectors: int, column: Value, tail: Value | None) -> None:
            most = vectors_beside(count)
            for j in range(0, vectors, most):
                wide = min(most, vectors - j)
                mix(wide, lanes.at(column, LANES * j), tail if j + wide == vectors else None)

        def mix(vectors: int, column: Value, tail: Value | None) -> None:
            offset, v_stride = lanes.times(column, 4), lanes.times(dim, 4)
            sums_at = [lanes.at(acc, b.mul(row, acc_stride), offset) for row in rows]
            sums = [
                b.fmul(lanes.load(lanes.at(at, 64 * j)), rescale)
                for at, rescale in zip(sums_at, rescales, strict=True)
                for j in range(vectors)
            ]

            def step(word: Value, sums: list[Value]) -> list[Value]:
                down = lanes.at(offset, b.mul(word, v_stride))
                for further in following:
                    for j in range(vectors):
                        lanes.prefetch(lanes.at(further, down, 64 * j), Keep.SECOND)
                places = [lanes.at(part, down, 64 * j) for j in range(vectors)]
                loaded = [lanes.load(place, VI) for place in places[: vectors - (tail is not None)]]
                if tail is not None:
                    loaded.append(lanes.load_masked(places[-1], tail, VI))
                along = lanes.times(word, 4)
                return multiply(
                    lanes, kind, sums, loaded, lambda m: lanes.load(lanes.at(lines[m], along), I32)
                )

            sums = lanes.loop(lanes.i64(words), sums, step)
            for m, at in enumerate(sums_at):
                for j in range(vectors):
                    lanes.store(sums[m * vectors + j], lanes.at(at, 64 * j))

        lanes.column_groups(dim, columns)

    _stream(lanes, (n, heads, pages, low, high), size, partial(_asked_before, lanes, heads, size), body)
