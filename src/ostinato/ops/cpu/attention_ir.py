"""The inner loops of paged attention: scores, softmax and mixing of values over one block of keys.

All work on a tile of query rows of one KV head, in scratch memory given by address. Knows nothing of requests
or pages beyond addresses. Invariant: a row's arithmetic is a sequence that depends on its own query, keys and
mask alone; how many rows stand beside it, and which register tile computes it, never changes it.

Row state, STATE_BYTES each: 16 copies of the running maximum (in units of log2), 16 partial sums of the
probabilities (one a lane), 16 copies of the factor by which the last block's maximum rescaled the row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ostinato.ops.cpu.lane_kinds import Kind, is_narrow, tile_shape
from ostinato.ops.cpu.vector_ir import F32, I32, I64, LANES, VI, Keep, Lanes, Value

PAGE = 16  # positions of one KV block in memory: the lanes of a vector of scores
BLOCK = 128  # positions between two updates of a row's maximum
CHUNK = 512  # positions summed on their own, then merged in order
STATE_BYTES = 192
SCORE_BYTES = BLOCK * 4  # a row of scores, and the stride of a row of probabilities
LOWEST = -3.0e38  # score of a masked position, and the maximum of a row that saw nothing
_MOST_ROWS = 6  # rows that share a pass over the pages; passes of fewer wait for memory and ask for it ahead
LINES_A_ROW = 16  # that the softmax of a row asks for: as many as come in its time
STREAM_PAGES = 24  # addresses from a block's V on: V now, K next, V next


def score_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(rows, n, pages, ahead, words, out): scores of `n` query rows against 4 K pages, all given by address.

    Row r gets 64 fp32 at out + r * SCORE_BYTES. Pages at `ahead` are prefetched along the way.
    """
    rows, n, pages, ahead, words, out = args
    most_rows, most_pages = tile_shape()
    keys = [lanes.load(lanes.at(pages, 8 * j), I64, 8) for j in range(4)]
    next_keys = [lanes.load(lanes.at(ahead, 8 * j), I64, 8) for j in range(4)]

    def tile(first: Value, count: int, columns: range, streamed: bool) -> None:
        queries = [lanes.load(lanes.at(rows, lanes.times(first, 8), 8 * m), I64, 8) for m in range(count)]

        def step(word: Value, totals: list[Value]) -> list[Value]:
            across, along = lanes.times(word, 64), lanes.times(word, 4)
            if streamed:
                for j in columns:
                    lanes.prefetch(lanes.at(next_keys[j], across), Keep.SECOND)
            loaded = [lanes.load(lanes.at(keys[j], across), VI) for j in columns]
            return multiply(
                lanes, kind, totals, loaded, lambda m: lanes.load(lanes.at(queries[m], along), I32)
            )

        sums = lanes.loop(words, [lanes.floats(0.0)] * (count * len(columns)), step)
        for m in range(count):
            line = lanes.at(out, lanes.times(first, SCORE_BYTES), m * SCORE_BYTES)
            for j, column in enumerate(columns):
                lanes.store(sums[m * len(columns) + j], lanes.at(line, 64 * column))

    def body(first: Value, count: int) -> None:
        for m in range(0, count, most_rows):
            for j in range(0, 4, most_pages):
                part = range(j, j + most_pages)
                tile(lanes.at(first, m), min(most_rows, count - m), part, count < _MOST_ROWS)

    lanes.rows(n, _MOST_ROWS, body)


def multiply(
    lanes: Lanes, kind: Kind, totals: list[Value], vectors: list[Value], word: Callable[[int], Value]
) -> list[Value]:
    """One step of an outer product: totals[row][vector] += vector * word of the row."""
    product, across, narrow = kind.product, len(vectors), is_narrow()
    rows = range(len(totals) // across)
    words = [] if narrow else [word(m) for m in rows]
    result = list(totals)
    for part in range(product.parts):
        columns = [product.panel(lanes, vector, part) for vector in vectors]
        for m in rows:
            if narrow:
                lanes.barrier()
            value = product.row(lanes, word(m) if narrow else words[m], part)
            for j, column in enumerate(columns):
                i = m * across + j
                result[i] = product.add(lanes, result[i], column, value)
    return result


Ask = Callable[[Value, Value], None]  # asks memory for something: row, number of the vector in the row


def softmax_stream(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """`softmax_rows` with (..., ahead, size, asked): asks memory, which would idle, for pages to come, in order.

    `ahead` is the address of STREAM_PAGES addresses of pages of `size` bytes, of which the first `asked` bytes were
    asked for before; a row asks for LINES_A_ROW lines.
    """
    *plain, ahead, size, asked = args
    b = lanes.b

    def ask(row: Value, vector: Value) -> None:
        place = lanes.at(
            lanes.times(row, 64 * LINES_A_ROW), lanes.times(vector, 64 * LINES_A_ROW * PAGE // BLOCK)
        )
        place = b.add(place, asked)
        page, last = b.sdiv(place, size), lanes.i64(STREAM_PAGES - 1)
        page = b.select(b.icmp_signed("<", page, last), page, last)
        at = lanes.at(lanes.load(lanes.at(ahead, lanes.times(page, 8)), I64, 8), b.srem(place, size))
        for line in range(LINES_A_ROW * PAGE // BLOCK):
            lanes.prefetch(lanes.at(at, 64 * line), Keep.SECOND)

    _softmax(lanes, kind, plain, ask)


def softmax_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(scores, probs, n, low, high, masked, bounds, start, state, factor): probabilities, and the state.

    Probabilities are exp2(score * factor - maximum) over the pages [low, high); `factor` is the address of an
    fp32. With `masked`, position j of row r counts only if bounds[r][0] <= start + j < bounds[r][1] (int64
    pairs).
    """
    _softmax(lanes, kind, args, lambda row, vector: None)


def _softmax(lanes: Lanes, kind: Kind, args: list[Value], ask: Ask) -> None:
    scores, probs, n, low, high, masked, bounds, start, state, factor = args
    b = lanes.b
    scale = lanes.splat(lanes.load(factor, F32, 4))

    def rows(is_masked: bool) -> None:
        def seen_by(r: Value) -> tuple[Value, Value] | None:
            if not is_masked:
                return None
            pair = lanes.at(bounds, lanes.times(r, 16))
            first, last = (b.sub(lanes.load(lanes.at(pair, k), I64, 8), start) for k in (0, 8))
            return lanes.splat(b.trunc(first, I32)), lanes.splat(b.trunc(last, I32))

        def maximum(r: Value) -> None:
            at, here = (
                lanes.at(scores, lanes.times(r, SCORE_BYTES)),
                lanes.at(state, lanes.times(r, STATE_BYTES)),
            )
            _raise_maximum(lanes, at, here, low, high, seen_by(r), scale)

        def probabilities(r: Value) -> None:
            at, to = (lanes.at(place, lanes.times(r, SCORE_BYTES)) for place in (scores, probs))
            here = lanes.at(state, lanes.times(r, STATE_BYTES))
            _exponentials(lanes, kind, at, to, here, low, high, seen_by(r), scale, partial(ask, r))

        # Maxima first: each is a chain of waits, in which others' go on; behind a row's exponentials they could not.
        lanes.each(n, maximum)
        lanes.each(n, probabilities)

    with b.if_else(b.icmp_signed("!=", masked, lanes.i64(0))) as (then, otherwise):
        with then:
            rows(True)
        with otherwise:
            rows(False)


def _visible(lanes: Lanes, page: Value, seen: tuple[Value, Value] | None) -> Value | None:
    """Which lanes of a page are in the visible range relative to the block (None: all of them)."""
    if seen is None:
        return None
    b = lanes.b
    index = b.add(lanes.splat(b.trunc(lanes.times(page, PAGE), I32)), lanes.lane_numbers())
    return b.and_(b.icmp_signed(">=", index, seen[0]), b.icmp_signed("<", index, seen[1]))


def _raise_maximum(
    lanes: Lanes,
    scores: Value,
    state: Value,
    low: Value,
    high: Value,
    seen: tuple[Value, Value] | None,
    scale: Value,
) -> None:
    """One row's maximum over a block, and the factor by which it rescales what came before, to its state."""
    b = lanes.b

    def peak(i: Value, carried: list[Value]) -> list[Value]:
        page = b.add(low, i)
        value = lanes.load(lanes.at(scores, lanes.times(page, 64)))
        mask = _visible(lanes, page, seen)
        if mask is not None:
            value = b.select(mask, value, lanes.floats(LOWEST))
        return [lanes.max(carried[0], value)]

    (highest,) = lanes.loop(b.sub(high, low), [lanes.floats(LOWEST)], peak)
    before = lanes.load(state)
    lanes.barrier()  # else LLVM stores under a mask only lanes that rise, which is slow where it is microcode (AVX2)
    maximum = lanes.max(before, b.fmul(lanes.max_lanes(highest), scale))
    lanes.store(maximum, state)
    lanes.store(lanes.exp2(b.fsub(before, maximum)), lanes.at(state, 128))


def _exponentials(
    lanes: Lanes,
    kind: Kind,
    scores: Value,
    probs: Value,
    state: Value,
    low: Value,
    high: Value,
    seen: tuple[Value, Value] | None,
    scale: Value,
    ask: Callable[[Value], None],
) -> None:
    """One row's probabilities over a block, from the maximum in its state, and their sums there."""
    b = lanes.b
    minus = b.fneg(lanes.load(state))

    def exponential(i: Value, carried: list[Value]) -> list[Value]:
        page = b.add(low, i)
        ask(i)
        value = lanes.load(lanes.at(scores, lanes.times(page, 64)))
        value = lanes.exp2(lanes.fma(value, scale, minus))
        mask = _visible(lanes, page, seen)
        if mask is not None:
            value = b.select(mask, value, lanes.floats(0.0))
        kind.store(lanes, value, lanes.at(probs, lanes.times(page, PAGE * kind.value_bytes)))
        return [b.fadd(carried[0], value)]

    total = b.fmul(lanes.load(lanes.at(state, 64)), lanes.load(lanes.at(state, 128)))
    (total,) = lanes.loop(b.sub(high, low), [total], exponential)
    lanes.store(total, lanes.at(state, 64))


class _Mix(NamedTuple):
    """The arguments of `mix_rows`, by name."""

    probs: Value
    n: Value
    pages: Value
    ahead: Value
    low: Value
    high: Value
    dim: Value
    acc: Value
    acc_stride: Value
    state: Value


def mix_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(see `_Mix`): acc = acc * rescale + probs @ values over the V pages [low, high); acc is fp32.

    `acc_stride` is in bytes, `dim` in values; V pages at `ahead` are prefetched along the way.
    """
    mix = _Mix(*args)
    most_rows, most_vectors = tile_shape()

    def columns(vectors: int, column: Value, tail: Value | None) -> None:
        """All rows, over `vectors` vectors of dimensions from `column` on."""

        def body(first: Value, count: int) -> None:
            for m in range(0, count, most_rows):
                for j in range(0, vectors, most_vectors):
                    wide = min(most_vectors, vectors - j)
                    mask = tail if j + wide == vectors else None
                    rows = [lanes.at(first, r) for r in range(m, min(m + most_rows, count))]
                    _mix_tile(
                        lanes, kind, mix, rows, wide, lanes.at(column, LANES * j), mask, count < _MOST_ROWS
                    )

        lanes.rows(mix.n, _MOST_ROWS, body)

    lanes.column_groups(mix.dim, columns)


def _mix_tile(
    lanes: Lanes,
    kind: Kind,
    mix: _Mix,
    rows: list[Value],
    vectors: int,
    column: Value,
    tail: Value | None,
    streamed: bool,
) -> None:
    """`rows` x `vectors` of `mix_rows` in registers; `tail` masks the last vector."""
    words = PAGE * kind.value_bytes // 4
    v_stride, offset = lanes.times(mix.dim, 4), lanes.times(column, 4)
    sums_at = [lanes.at(mix.acc, lanes.b.mul(row, mix.acc_stride), offset) for row in rows]
    lines = [lanes.at(mix.probs, lanes.times(row, SCORE_BYTES)) for row in rows]
    sums = []
    for row, at in zip(rows, sums_at, strict=True):
        rescale = lanes.load(lanes.at(mix.state, lanes.times(row, STATE_BYTES), 128))
        sums += [lanes.b.fmul(lanes.load(lanes.at(at, 64 * j)), rescale) for j in range(vectors)]

    def over_pages(i: Value, sums: list[Value]) -> list[Value]:
        page = lanes.b.add(mix.low, i)
        entry = lanes.times(page, 8)
        values = lanes.at(lanes.load(lanes.at(mix.pages, entry), I64, 8), offset)
        following = lanes.at(lanes.load(lanes.at(mix.ahead, entry), I64, 8), offset)

        def over_words(word: Value, sums: list[Value]) -> list[Value]:
            down = lanes.b.mul(word, v_stride)
            if streamed:
                for j in range(vectors):
                    lanes.prefetch(lanes.at(following, down, 64 * j), Keep.SECOND)
            places = [lanes.at(values, down, 64 * j) for j in range(vectors)]
            loaded = [lanes.load(place, VI) for place in places[: vectors - (tail is not None)]]
            if tail is not None:
                loaded.append(lanes.load_masked(places[-1], tail, VI))
            along = lanes.at(lanes.times(page, words * 4), lanes.times(word, 4))
            return multiply(lanes, kind, sums, loaded, lambda m: lanes.load(lanes.at(lines[m], along), I32))

        return lanes.loop(lanes.i64(words), sums, over_words)

    sums = lanes.loop(lanes.b.sub(mix.high, mix.low), sums, over_pages)
    for m, at in enumerate(sums_at):
        for j in range(vectors):
            lanes.store(sums[m * vectors + j], lanes.at(at, 64 * j))
